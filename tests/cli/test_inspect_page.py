"""`mcore-ckpt inspect --html`: the page answers in a real browser, whatever a checkpoint is called."""

import base64
import gzip
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.checkpoint.timeline import SaveTimeline
from mcore_ckpt.cli.main import main
from mcore_ckpt.cli.page.build import build_page
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.tools.examine.diff import DifferentTensor, RoleDiff
from mcore_ckpt.tools.examine.differences import DifferentValue
from mcore_ckpt.tools.examine.overview import Overview, overview_of_role
from tests.support import sparse
from tests.support.checkpoints import make as make_small
from tests.support.small_model import make, resharded, tensors_of

pytestmark = pytest.mark.slow

browser = pytest.importorskip("tests.support.browser", reason="needs selenium")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

in_browser = pytest.mark.skipif(browser.MISSING is not None, reason=browser.MISSING or "")

ROW = 17
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">$data${data}'
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BEFORE_ROOMS = Path(__file__).parents[1] / "data" / "before_rooms" / "root" / "global_steps_2" / "actor"


@pytest.fixture(scope="module")
def role_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tp 2, pp 2, dp 2, with a timeline in which rank 5 called `save` late and rank 3 wrote slowly."""
    tmp_path = tmp_path_factory.mktemp("roots")
    folder = resharded(make(tmp_path / "a", tensors_of(), tp=2), tmp_path / "b", tp=2, pp=2, vpp=2, dp=2)
    planned = tuple(100_000 - 90_000 * (rank == 5) for rank in range(8))
    copied = tuple(end + 50_000 for end in planned)
    written = tuple(end + 400_000 + 2_000_000 * (rank == 3) for rank, end in enumerate(planned))
    timeline = SaveTimeline(
        nbytes=(1000,) * 8,
        plan=((0,) * 8, planned),
        copy=(planned, copied),
        write=(planned, written),
        commit=(written[0], written[3] + 10_000),
    )
    manifest = replace(read_manifest(folder), save_timeline=timeline)
    (folder / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return folder


@pytest.fixture(scope="module")
def page(role_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["inspect", str(role_dir), "--html", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser.started(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def data_of(page: Path) -> Any:
    """The data in a page, read without a browser."""
    (packed,) = re.findall(r'<script id="data" type="application/gzip">([A-Za-z0-9+/=]*)</script>', page.read_text())
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def text(driver: Any, element: str) -> str:
    return str(driver.find_element(By.ID, element).text)


def search(driver: Any, words: str) -> None:
    box = driver.find_element(By.ID, "search")
    box.clear()
    box.send_keys(words)


def click_row(driver: Any, row: int) -> None:
    """Clicks into the middle of a row of the drawing."""
    canvas = driver.find_element(By.ID, "drawing")
    y = browser.run(
        driver, "const {frame, rows} = page.tensors; return frame.top + (arguments[0] + 0.5) * frame.height / rows", row
    )
    ActionChains(driver).move_to_element_with_offset(canvas, 0, y - canvas.size["height"] / 2).click().perform()


# -- the file -----------------------------------------------------------------------------------------------


def test_the_page_has_the_data_and_needs_no_network(page: Path, role_dir: Path) -> None:
    found = page.read_text()
    assert data_of(page) == json.loads(json.dumps(Overview(5, (overview_of_role(role_dir),)).to_json()))
    assert "default-src 'none'" in found
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", found)


def test_the_page_replaces_a_page_and_leaves_nothing_beside_it(
    role_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.html").write_bytes(build_page({}))
    (tmp_path / "link.html").symlink_to("page.html")
    assert main(["inspect", str(role_dir), "--html", str(tmp_path / "link.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    assert (tmp_path / "link.html").is_symlink()
    assert data_of(tmp_path / "page.html")["step"] == 5
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "link.html"}


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("nowhere/page.html", "there is no folder"),
        (".", "is a folder"),
        ("/dev/null", "is no regular file"),
        ("{role}/manifest.json", "is within the checkpoint"),
        ("{other}/page.html", "is within the checkpoint"),
        ("{other}/../../latest_checkpointed_iteration.txt", "does not end in .html"),
        ("{other}/../../.run.json", "does not end in .html"),
        ("{other}/../../notes.html", "exists and is not a page of this command"),
        ("link.html", "does not end in .html"),
    ],
)
def test_a_file_that_cannot_be_written(
    file: str, complaint: str, role_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_manifest(role_dir)
    other = file_names.step_dir(tmp_path / "others", 1) / "actor"
    shutil.copytree(role_dir, other)
    kept = [tmp_path / "others" / name for name in ("latest_checkpointed_iteration.txt", ".run.json", "notes.html")]
    for path in kept:
        path.write_text("kept")
    (tmp_path / "link.html").symlink_to(kept[1])
    assert main(["inspect", str(role_dir), "--html", str(tmp_path / file.format(role=role_dir, other=other))]) == 2
    assert complaint in capsys.readouterr().err
    assert read_manifest(role_dir) == before
    assert {path.read_text() for path in kept} == {"kept"}


# -- in a browser -------------------------------------------------------------------------------------------


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_a_complaint(scheme: str, page: Path, driver: Any) -> None:
    browser.prefer(driver, scheme)
    browser.opened(driver, page)
    assert text(driver, "title") == "Step 5 of actor"
    shown = browser.run(driver, "return getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", shown)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    assert len(driver.get_screenshot_as_png()) > 10_000


@in_browser
def test_two_clicks_say_which_rank_holds_a_row(page: Path, role_dir: Path, driver: Any) -> None:
    """Which rank holds row 17 of layer 3's fc1? The bytes that the page names are those of the row."""
    browser.opened(driver, page)
    search(driver, "layer 3 fc1")
    driver.find_element(By.CSS_SELECTOR, "#tensor-list button").click()
    click_row(driver, ROW)
    assert text(driver, "tensor-name") == FC1
    holders = text(driver, "holders").split()
    places = driver.find_elements(By.CSS_SELECTOR, "#answer .place")
    manifest = read_manifest(role_dir)
    wanted = {(kind, file, rank) for kind, file, rank in held_by(role_dir, FC1, ROW)}
    told = set()
    for place in places:
        kind, file = place.find_element(By.TAG_NAME, "b").text, place.find_element(By.CLASS_NAME, "mono").text
        (rank,) = map(int, re.findall(r"written by rank (\d+)", place.text))
        first, last = (
            int(number.replace(",", "")) for number in re.findall(r"bytes ([\d,]+)\W([\d,]+)", place.text)[0]
        )
        stored = torch.frombuffer(bytearray((role_dir / file).read_bytes()[first : last + 1]), dtype=torch.float32)
        assert torch.equal(stored, tensors_of()[FC1][ROW] + (kind == "exp_avg"))
        told.add((kind, file, rank))
    assert told == wanted
    (model_rank,) = {rank for kind, _, rank in wanted if kind == "model"}
    (state_rank,) = {rank for kind, _, rank in wanted if kind == "exp_avg"}
    replicas = [
        rank for rank, at in enumerate(manifest.ranks) if (at.tp, at.pp) == position(manifest.ranks[model_rank])
    ]
    assert holders[: 4 + len(replicas)] == ["Weights", "on", "2", "ranks:", *map(str, replicas)]
    assert str(state_rank) in holders[4 + len(replicas) :]


def position(at: RankCoordinates) -> tuple[int, int]:
    return at.tp, at.pp


def held_by(role_dir: Path, name: str, row: int) -> Iterator[tuple[str, str, int]]:
    """The kind, file and rank of each shard that has a part of a row, as the indexes say."""
    for file in read_manifest(role_dir).files:
        for shard in read_index(role_dir, file).shards if file.index else ():
            rows = [range(box.offset[0], box.offset[0] + box.shape[0]) for _, box in shard.region.boxes()]
            if shard.key.name == name and any(row in each for each in rows):
                yield shard.key.kind, file.path, file.rank


@in_browser
def test_a_search_may_name_the_row(page: Path, driver: Any) -> None:
    browser.opened(driver, page)
    search(driver, f"layer 3 fc1 row {ROW}")
    assert text(driver, "found").startswith("1 of ")
    driver.find_element(By.CSS_SELECTOR, "#tensor-list button").click()
    assert driver.find_element(By.ID, "row").get_property("value") == str(ROW)
    search(driver, "layer 33")
    assert text(driver, "found").startswith("0 of ")


@in_browser
def test_the_drawing_has_the_boxes_of_every_shard(page: Path, role_dir: Path, driver: Any) -> None:
    browser.opened(driver, page)
    drawn = browser.run(
        driver,
        """
        const boxes = {};
        page.tensors.checkpoint.tensors.forEach((name, tensor) => {
          page.chooseTensor(tensor, 0);
          for (const tab of document.querySelectorAll('#kinds button')) {
            tab.click();
            for (const part of page.tensors.parts) {
              const key = [name, part.shard.kind, part.shard.file.path].join(' ');
              boxes[key] = part.boxes.map((box) =>
                [box.local.offset, box.local.shape, box.global.offset, box.global.shape]);
            }
          }
        });
        return boxes;
        """,
    )
    wanted = {
        f"{shard.key.name} {shard.key.kind} {file.path}": [
            [list(local.offset), list(local.shape), list(whole.offset), list(whole.shape)]
            for local, whole in shard.region.boxes()
        ]
        for file in read_manifest(role_dir).files
        if file.index
        for shard in read_index(role_dir, file).shards
    }
    assert drawn == wanted
    assert any(len(boxes) > 2 for boxes in wanted.values()), "the example has no shard that is cut within a row"


@in_browser
def test_the_timeline_names_the_slowest_rank(page: Path, driver: Any) -> None:
    browser.opened(driver, page)
    summary = text(driver, "timeline-summary")
    assert "after 2.51 s. Rank 3 was last: 1.00 kB" in summary
    rows = [row.text for row in driver.find_elements(By.CSS_SELECTOR, "#phases tr")]
    assert rows[0] == "part median longest on"
    assert "write 400 ms 2.40 s rank 3" in rows
    assert "commit (rank 0) 2.01 s rank 0" in rows
    # The ranks are aligned where their first round ended.
    assert browser.run(driver, "return page.timeline.called") == [0, 0, 0, 0, 0, 90_000, 0, 0]


@in_browser
def test_a_rank_is_chosen_in_the_grid(page: Path, driver: Any) -> None:
    browser.opened(driver, page)
    x, y = browser.run(
        driver, "const {ranks} = page, [x, y] = ranks.placeOfCell(ranks.cells[6]); return [x + 5, y + 5]"
    )
    grid = driver.find_element(By.ID, "grid")
    left, top = x - grid.size["width"] / 2, y - grid.size["height"] / 2
    ActionChains(driver).move_to_element_with_offset(grid, left, top).click().perform()
    assert text(driver, "rank").startswith("Rank 6 tp 0, pp 1, cp 0, dp 1")
    assert "optim/distrib_optim_pp1_tp0_cp0_dp1.pt" in text(driver, "rank")


@in_browser
def test_old_and_empty_checkpoints(tmp_path: Path, driver: Any) -> None:
    """One without a timeline; and roles of plain files, which have no tensors."""
    assert main(["inspect", str(BEFORE_ROOMS), "--html", str(tmp_path / "old.html")]) == 0
    browser.opened(driver, tmp_path / "old.html")
    assert "has no timeline" in text(driver, "timeline-summary")
    role = data_of(tmp_path / "old.html")["roles"][0]
    columns: dict[str, list[int]] = {name: [] for name in role["shards"]}
    empty = role | {
        "role": "empty",
        "tensors": [],
        "shards": columns,
        "kinds": [],
        "regions": [],
        "files": [],
        "stages": [],
    }
    data = {"step": 2, "roles": [role, empty], "comparedWith": None, "onlyInB": []}
    (tmp_path / "both.html").write_bytes(build_page(data))
    browser.opened(driver, tmp_path / "both.html")
    driver.find_element(By.CSS_SELECTOR, "#role option:last-child").click()
    assert text(driver, "title") == "Step 2 of empty"
    assert text(driver, "tensor-name") == "no tensors"
    assert browser.complaints(driver) == []


@in_browser
def test_names_are_text_and_nothing_else(tmp_path: Path, driver: Any) -> None:
    role_dir = tmp_path / "global_steps_7" / "actor"
    role_dir.mkdir(parents=True)
    file = "model/<img src=x onerror=alert(1)>/model_states.pt".replace("/>", ">")
    held = [
        sparse.shard(HOSTILE, "model", sparse.rows((4, 4), 0, 1)),
        sparse.shard("b", HOSTILE, sparse.rows((4,), 0, 1)),
    ]
    manifest = sparse.write(role_dir, Topology(), {file: ("model", RankCoordinates(), held)})
    manifest = replace(
        manifest, versions={HOSTILE: HOSTILE}, created=HOSTILE, contents=(HOSTILE,), metrics={HOSTILE: 0.1 + 0.2}
    )
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    found = RoleDiff(
        role_dir,
        Path(HOSTILE),
        compared=1,
        tensors=(DifferentTensor(HOSTILE, HOSTILE, TensorInfo(torch.float32, (2,)), None),),
        values=(DifferentValue(HOSTILE, HOSTILE, HOSTILE),),
        notes=(HOSTILE,),
        nbytes=1,
    )
    overview = Overview(7, (overview_of_role(role_dir),), HOSTILE, {role_dir: found}, (HOSTILE,))
    (tmp_path / "page.html").write_bytes(build_page(overview.to_json()))
    browser.opened(driver, tmp_path / "page.html")
    for words in ("", "b"):
        search(driver, words)
        driver.find_element(By.CSS_SELECTOR, "#tensor-list button").click()
        assert browser.run(driver, "return [window.hacked ?? null, document.querySelectorAll('img').length]") == [
            None,
            0,
        ]
    assert HOSTILE in text(driver, "facts")
    assert f"metrics\n{HOSTILE} 0.3" in text(driver, "facts")
    assert text(driver, "differences").count(HOSTILE) == 8
    assert browser.complaints(driver) == []


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose checkpoint has another layout than `role_dir`, other values of one tensor, and other tensors."""
    root = tmp_path_factory.mktemp("other")
    tensors = tensors_of()
    tensors[FC1][ROW] += 0.0625
    tensors["output_layer.weight"] = torch.ones(22, 8)
    tensors["only.there"] = tensors.pop("decoder.final_layernorm.weight")
    make(root, tensors, scheduler={"max_lr": 0.5})
    return root


def rows_of(driver: Any, element: str) -> list[list[str]]:
    rows = driver.find_elements(By.CSS_SELECTOR, f"#{element} .row")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "span")] for row in rows]


@in_browser
def test_differences_lead_to_their_tensors(role_dir: Path, other: Path, tmp_path: Path, driver: Any) -> None:
    """A change of one row, of a shape and of a name: in the weights, and in the optimizer's state."""
    page = tmp_path / "page.html"
    assert main(["inspect", str(role_dir), "--html", str(page), "--diff", str(other)]) == 0
    browser.opened(driver, page)
    assert text(driver, "compared-with").startswith("12 tensors and 2 values differ; ")
    assert text(driver, "difference-sides") == f"A {role_dir} (this page)\nB {other / 'global_steps_5' / 'actor'}"
    assert "random states: not compared, because the layouts differ" in text(driver, "difference-notes")
    rows = rows_of(driver, "difference-list")
    assert {(name, kind, problem) for name, kind, problem, *_ in rows} == {
        (name, kind, problem)
        for kind in ("model", "param", "exp_avg")
        for name, problem in (
            (FC1, "values"),
            ("output_layer.weight", "shape"),
            ("decoder.final_layernorm.weight", "only in A"),
            ("only.there", "only in B"),
        )
    }
    (values,) = [row for row in rows if row[:2] == [FC1, "exp_avg"]]
    assert values[3:7] == ["float32 32x8", "float32 32x8", "8 of 256", "0.0625"]
    (shape,) = [row for row in rows if row[:2] == ["output_layer.weight", "model"]]
    assert shape[3:] == ["float32 20x8", "float32 22x8", "", "", ""]
    by_name = {
        tuple(cell.text for cell in row.find_elements(By.TAG_NAME, "span")[:2]): row
        for row in driver.find_elements(By.CSS_SELECTOR, "#difference-list .row")
    }
    assert not by_name["only.there", "model"].is_enabled()
    by_name[FC1, "exp_avg"].click()
    assert text(driver, "tensor-name") == FC1
    assert driver.find_element(By.CSS_SELECTOR, "#kinds [aria-selected=true]").text == "exp_avg"
    assert rows_of(driver, "value-list") == [
        ["optim/common.pt: lr_scheduler", "None", "-"],
        ["optim/common.pt: lr_scheduler.max_lr", "-", "0.5"],
    ]
    assert browser.complaints(driver) == []


@in_browser
def test_a_page_about_two_checkpoints_that_are_the_same(role_dir: Path, tmp_path: Path, driver: Any) -> None:
    make(tmp_path, tensors_of())
    page = tmp_path / "page.html"
    assert main(["inspect", str(role_dir), "--html", str(page), "--diff", str(tmp_path)]) == 0
    browser.opened(driver, page)
    assert text(driver, "compared-with").startswith("the same; 69 tensors compared")
    assert not driver.find_element(By.ID, "difference-table").is_displayed()
    assert not driver.find_element(By.ID, "value-table").is_displayed()


@in_browser
def test_roles_that_only_one_checkpoint_has(tmp_path: Path, driver: Any) -> None:
    for root, roles in (("a", ("actor", "critic")), ("b", ("actor", "reward"))):
        for role in roles:
            make_small(file_names.step_dir(tmp_path / root, 10) / role, 10, roles)
    page, a, b = (tmp_path / name for name in ("page.html", "a", "b"))
    assert main(["inspect", str(a), "--html", str(page), "--diff", str(b)]) == 0
    browser.opened(driver, page)
    assert text(driver, "difference-notes") == "only in B: role reward"
    driver.find_element(By.CSS_SELECTOR, "#role option:last-child").click()
    assert text(driver, "compared-with") == "only in A: role critic"
    assert main(["inspect", str(a), "--role", "actor", "--html", str(page), "--diff", str(b)]) == 0
    browser.opened(driver, page)
    assert text(driver, "difference-notes") == ""


@pytest.mark.parametrize(
    ("there", "with_page", "status", "complaint"),
    [
        ("nowhere", True, 2, "--diff {path}: there is no such folder"),
        ("empty", True, 1, "{path}: no complete checkpoint"),
        (
            "critics",
            True,
            2,
            "/global_steps_5 has actor, {path}/global_steps_3 has critic, reward, so no role is in both: name",
        ),
        ("other", False, 2, "--diff {path}: the differences are shown on a page: name the page's file"),
    ],
)
def test_a_checkpoint_that_cannot_be_compared(
    there: str,
    with_page: bool,
    status: int,
    complaint: str,
    role_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for role in ("critic", "reward"):
        make_small(file_names.step_dir(tmp_path / "critics", 3) / role, 3, ("critic", "reward"))
    path, page = tmp_path / there, tmp_path / "page.html"
    html = ["--html", str(page)] if with_page else []
    assert main(["inspect", str(role_dir), "--diff", str(path), *html]) == status
    assert complaint.format(path=path) in capsys.readouterr().err
    assert not page.exists()


@in_browser
def test_a_page_without_a_comparison_shows_no_place_for_it(page: Path, driver: Any) -> None:
    browser.opened(driver, page)
    assert not driver.find_element(By.ID, "differences").is_displayed()


@in_browser
@pytest.mark.full
def test_a_large_checkpoint_opens_as_quickly_as_a_small_one(
    page: Path, tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 tensors x 64 ranks. Only what can be seen is in the document; times are compared, and generously."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from page import write_large

    large = tmp_path / "large.html"
    assert main(["inspect", str(write_large(tmp_path)), "--html", str(large)]) == 0
    seconds = [min(browser.opened(driver, each) for _ in range(3)) for each in (page, large)]
    assert seconds[1] < 20 * max(seconds[0], 0.1)
    assert browser.run(driver, "return document.querySelectorAll('*').length") < 1500
    search(driver, f"layer 3 fc1 row {ROW}")
    driver.find_element(By.CSS_SELECTOR, "#tensor-list button").click()
    assert text(driver, "tensor-name") == FC1
    assert text(driver, "holders").startswith("Weights on 8 ranks:")


@in_browser
def test_all_roles_of_a_step_are_in_the_page(tmp_path: Path, driver: Any) -> None:
    for role in ("actor", "critic"):
        make_small(file_names.step_dir(tmp_path, 10) / role, 10, ("actor", "critic"))
    assert main(["inspect", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    browser.opened(driver, tmp_path / "page.html")
    assert text(driver, "title") == "Step 10 of actor"
    driver.find_element(By.CSS_SELECTOR, "#role option:last-child").click()
    assert text(driver, "title") == "Step 10 of critic"
    assert browser.complaints(driver) == []
