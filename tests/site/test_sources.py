"""The sources of the documentation site fit together. These checks do not need mkdocs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "mcore_ckpt"
DOCS = REPOSITORY / "docs"

# Pages that scripts/site_pages.py makes.
MADE = {"project/overview.md", "project/contributing.md", "project/changelog.md"}
# Modules of which all names without an underscore are public.
DOORS = ("recover.py", "schedule.py", "errors.py", "events.py")
# What errors.py and recover.py have for the package itself.
INTERNAL = {"to_record", "from_record", "retried", "logger"}


class _Loader(yaml.SafeLoader):
    """Takes tags of Python objects, such as the function that makes anchors, for their arguments."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, _, node: loader.construct_mapping(node))


def pages_of(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


def listed(module: Path) -> list[str]:
    """The names in `__all__` of a module that may not be importable here."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def defined(module: Path) -> list[str]:
    """The names of the classes and functions of a module that have no underscore in front."""
    body = ast.parse(module.read_text()).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in names if not name.startswith("_") and name not in INTERNAL]


def public_names() -> Iterator[tuple[str, str]]:
    """Yields module and name of all that the API reference must have."""
    yield from (("mcore_ckpt", name) for name in listed(PACKAGE / "__init__.py"))
    for door in DOORS:
        yield from ((f"mcore_ckpt.{door.removesuffix('.py')}", name) for name in defined(PACKAGE / door))
    for module in sorted((PACKAGE / "integrations").glob("*/__init__.py")):
        room = module.parent.name
        names = defined(module) if room == "megatron" else listed(module)
        yield from ((f"mcore_ckpt.integrations.{room}", name) for name in names)
    yield from (("mcore_ckpt.models", name) for name in listed(PACKAGE / "models" / "__init__.py"))


def imported_from(module: str, name: str) -> str | None:
    """The module from which a package has a name; None if it has it from nowhere."""
    package = REPOSITORY / module.replace(".", "/") / "__init__.py"
    for node in ast.walk(ast.parse(package.read_text())) if package.exists() else ():
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return node.module
    return None


def requested() -> dict[str, set[str] | None]:
    """The objects of the API pages. Of a module: the members that are shown, or None for all."""
    found: dict[str, set[str] | None] = {}
    for page in (DOCS / "api").glob("*.md"):
        for name, options in re.findall(r"^::: ([\w.]+)\n((?: {4}.*\n?)*)", page.read_text(), re.MULTILINE):
            members = (yaml.safe_load(options) or {}).get("options", {}).get("members") if options else None
            found[name] = None if members is None else set(members)
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    pages = list(pages_of(yaml.load((REPOSITORY / "mkdocs.yml").read_text(), _Loader)["nav"]))
    assert len(pages) == len(set(pages))
    assert set(pages) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | MADE


@pytest.mark.parametrize(("module", "name"), list(public_names()), ids=lambda value: value)
def test_every_public_name_is_in_the_api_reference(module: str, name: str) -> None:
    found = requested()
    places = (module, imported_from(module, name))
    shown = [members or {name} for place, members in found.items() if place in places]
    assert any(f"{place}.{name}" in found for place in places) or any(name in members for members in shown)


def test_every_module_of_tools_is_in_the_api_reference() -> None:
    found = set(requested())
    for name in listed(PACKAGE / "tools" / "__init__.py"):
        assert any(each.startswith(f"mcore_ckpt.tools.{name}") for each in found), name


def test_every_concept_has_a_picture() -> None:
    for page in set((DOCS / "concepts").glob("*.md")) - {DOCS / "concepts" / "index.md"}:
        (picture,) = re.findall(r"!\[[^]]+\]\(([\w.]+)\)", page.read_text())
        assert picture == f"{page.stem}.svg"
        assert (page.parent / picture).is_file()
