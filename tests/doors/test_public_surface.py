"""Integrations and commands import only the doors and the names that rooms list in `__all__`."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import mcore_ckpt

PACKAGE = Path(mcore_ckpt.__file__).parent
# All names of a door without an underscore are public.
DOORS = (
    "mcore_ckpt.config",
    "mcore_ckpt.errors",
    "mcore_ckpt.events",
    "mcore_ckpt.manager",
    "mcore_ckpt.recover",
    "mcore_ckpt.schedule",
)
# They check options, word amounts, and make the public names of packages, those of integrations included.
HELPERS = (
    "mcore_ckpt.amounts",
    "mcore_ckpt.field_checks",
    "mcore_ckpt.public_names",
    "mcore_ckpt.redaction",
    "mcore_ckpt.urls",
)
# The public names of this room are the modules that its own rooms list: see its docstring.
ROOM_OF_MODULES = "mcore_ckpt.tools"
OUTSIDE = ("mcore_ckpt.integrations", "mcore_ckpt.cli")


def packages_with_public_names() -> list[ModuleType]:
    rooms = (mcore_ckpt, *(importlib.import_module(f"mcore_ckpt.{info.name}") for info in sub_packages()))
    return [room for room in rooms if hasattr(room, "__all__")]


def sub_packages() -> list[pkgutil.ModuleInfo]:
    return [info for info in pkgutil.iter_modules(mcore_ckpt.__path__) if info.ispkg]


def imports() -> Iterator[tuple[str, str, str]]:
    """Yields file, module and name of what the outside imports from the package."""
    for outside in OUTSIDE:
        for path in sorted((PACKAGE / outside.rpartition(".")[2]).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert not node.level, path
                    yield from ((str(path), node.module or "", alias.name) for alias in node.names)
                elif isinstance(node, ast.Import):
                    yield from ((str(path), alias.name, "") for alias in node.names)


def is_public(module: str, name: str) -> bool:
    room, _, within = module.removeprefix("mcore_ckpt.").partition(".")
    if module in HELPERS:
        return True
    if module in DOORS or module.startswith(f"{ROOM_OF_MODULES}."):
        inner, _, rest = within.partition(".")
        is_listed = module in DOORS or (
            inner in importlib.import_module(ROOM_OF_MODULES).__all__
            and rest.partition(".")[0] in importlib.import_module(f"{ROOM_OF_MODULES}.{inner}").__all__
        )
        return is_listed and not name.startswith("_") and hasattr(importlib.import_module(module), name)
    if module == "mcore_ckpt":
        return name in (*mcore_ckpt.__all__, "__version__")
    return not within and name in getattr(importlib.import_module(f"mcore_ckpt.{room}"), "__all__", ())


def test_the_outside_imports_only_public_names() -> None:
    inside = [
        (path, module, name)
        for path, module, name in imports()
        if module.split(".")[0] == "mcore_ckpt" and not module.startswith(OUTSIDE) and not is_public(module, name)
    ]
    assert not inside


@pytest.mark.parametrize("room", packages_with_public_names(), ids=lambda room: room.__name__)
def test_public_names_exist_and_say_what_they_are(room: ModuleType) -> None:
    assert len(room.__all__) == len(set(room.__all__))
    assert (room.__doc__ or "").strip()
    for name in room.__all__:
        value = importlib.import_module(f"{room.__name__}.{name}") if room.__name__ == ROOM_OF_MODULES else None
        value = getattr(room, name) if value is None else value
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
            assert (value.__doc__ or "").strip(), name
            assert not (value.__doc__ or "").startswith(f"{name}("), name  # the docstring that a dataclass makes itself


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    for room in packages_with_public_names():
        assert not hasattr(room, "no_such_name")


def test_a_private_name_is_noticed() -> None:
    assert is_public("mcore_ckpt.steps", "list_steps")
    assert not is_public("mcore_ckpt.steps.listing", "list_steps")
    assert not is_public("mcore_ckpt.steps", "commit")
    assert not is_public("mcore_ckpt.tools.no_such_module", "verify")
    assert not is_public("mcore_ckpt.recover", "_found")


def test_no_name_that_is_found_on_first_use_is_the_name_of_a_module() -> None:
    """Python would find the module instead, as soon as somebody has imported it."""
    found = []
    for path in PACKAGE.rglob("__init__.py"):
        modules = {each.stem for each in path.parent.glob("*.py")}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy_names":
                names = {name for of in ast.literal_eval(node.args[1]).values() for name in of}
                found += [f"{path.parent.name}.{name}" for name in names & modules]
    assert found == []
