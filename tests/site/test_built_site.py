"""The documentation site is built without a network, needs none, and opens from a disk in a real browser."""

import html.parser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.site.test_sources import imported_from, public_names

browser = pytest.importorskip("tests.support.browser", reason="needs selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
PACKAGES = Path(os.environ.get("MCORE_CKPT_DOCS", REPOSITORY / ".venv" / "docs"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs mkdocs: bash scripts/side_packages.sh docs"),
]
in_browser = pytest.mark.skipif(browser.MISSING is not None, reason=browser.MISSING or "")

# Elements whose attribute a browser follows by itself. A reader follows `a` by hand.
FOLLOWED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
# Pages of each kind: a home page, a picture, an API page, wide tables, a page from outside docs/, plots.
SHOWN = (
    "index.html",
    "concepts/regions.html",
    "api/manager.html",
    "features.html",
    "project/overview.html",
    "scale.html",
)


def run(*command: object) -> None:
    """Runs Python with the packages of the site, and without a network if the kernel lets us cut it off."""
    cut_off = (
        ["unshare", "--net"]
        if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
        else []
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "NO_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [*cut_off, sys.executable, *map(str, command)], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, in which every warning of the build would have been an error."""
    folder = tmp_path_factory.mktemp("built") / "site"
    run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser.started(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


class Page(html.parser.HTMLParser):
    """What a page makes the browser fetch, and the ids of its elements."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids.add(values.get("id") or "")
        followed = values.get(FOLLOWED.get(tag, ""))
        if followed and values.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(followed)


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for path in pages:
        for place in Page(path).fetched:
            assert not re.match(r"\w+:|//", place) or place.startswith("data:"), f"{path.name} fetches {place}"
            file = place.partition("?")[0].partition("#")[0]
            assert path.name == "404.html" or (path.parent / file).exists(), f"{path.name} fetches {place}"
    for style in site.rglob("*.css"):
        for place in re.findall(r"url\(\s*[\"']?([^\"')]+)", style.read_text()):
            assert not re.match(r"(https?:)?//", place), f"{style.name} fetches {place}"


def test_every_public_name_has_an_anchor(site: Path) -> None:
    anchors = set().union(*(Page(path).ids for path in (site / "api").glob("*.html")))
    for module, name in public_names():
        assert anchors & {f"{module}.{name}", f"{imported_from(module, name)}.{name}"}, f"{module}.{name}"


def test_no_link_shows_the_name_of_a_document(site: Path) -> None:
    for path in site.rglob("*.html"):
        shown = re.findall(r"<a [^>]*>([^<]*\.md)</a>", path.read_text())
        assert not shown, f"{path.name}: give the page a title in mkdocs.yml"
    assert 'href="format.html">The format</a> says' in (site / "integrations.html").read_text()


def test_examples_of_docstrings_are_code(site: Path) -> None:
    assert 'class="gp">&gt;&gt;&gt; ' in (site / "api" / "manager.html").read_text()
    for path in (site / "api").glob("*.html"):
        assert "<blockquote>" not in path.read_text(), path.name


def test_the_plots_are_those_of_the_kept_results(tmp_path: Path) -> None:
    run("benchmarks/charts.py", "--to", tmp_path)
    kept = REPOSITORY / "docs" / "plots"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in kept.iterdir()}
    for path in tmp_path.iterdir():
        drawn, before = (_strokes(each / path.name) for each in (tmp_path, kept))
        assert drawn == (before[0], pytest.approx(before[1], abs=1e-5)), f"{path.name}: run scripts/docs.sh"


def _strokes(picture: Path) -> tuple[str, list[float]]:
    """A picture without its numbers, and these. Processors round the last digit otherwise; it names clips, too."""
    text = re.sub(r"\bp[0-9a-f]{10}\b", "clip", picture.read_text())
    number = r"-?\d+\.\d+"
    return re.sub(number, "", text), [float(each) for each in re.findall(number, text)]


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_from_the_disk_without_a_complaint(site: Path, driver: Any, scheme: str) -> None:
    browser.prefer(driver, scheme)
    driver.get_log("browser")
    for page in SHOWN:
        driver.get((site / page).as_uri())
        assert (
            browser.run(driver, "return document.body.dataset.mdColorScheme")
            == {"light": "default", "dark": "slate"}[scheme]
        )
        assert browser.run(driver, "return [...document.images].every(image => image.naturalWidth > 0)"), page
        # Wide tables and code scroll by themselves; the page does not.
        width = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.run(driver, width) <= 0, page
        assert driver.get_log("browser") == [], page


@in_browser
def test_search_finds_a_word_from_the_disk(site: Path, driver: Any) -> None:
    driver.get((site / "index.html").as_uri())
    box = driver.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]")
    box.send_keys("renameat2")
    wait: WebDriverWait[Any] = WebDriverWait(driver, 30)
    found = wait.until(lambda it: it.find_elements(By.CSS_SELECTOR, "a.md-search-result__link"))
    assert any("reliability.html" in link.get_attribute("href") for link in found)
    assert driver.get_log("browser") == []


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    """The build above shows something only if it can fail."""
    copy = tmp_path / "repository"
    copy.mkdir()
    for name in (
        "docs",
        "scripts",
        "mkdocs.yml",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "mcore_ckpt",
        "examples",
    ):
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    with (copy / "docs" / "bench.md").open("a") as page:
        page.write("\n[nowhere](doctor.md#no-such-heading)\n")
    with pytest.raises(AssertionError, match="no-such-heading"):
        run("-m", "mkdocs", "build", "--strict", "--config-file", copy / "mkdocs.yml", "--site-dir", tmp_path / "site")
