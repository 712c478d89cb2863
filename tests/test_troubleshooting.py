"""docs/troubleshooting.md explains every error, and quotes only messages that the code has."""

import ast
import errno
import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mcore_ckpt import errors

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()

# Public calls raise these besides the classes of errors.py, as its docstring says.
BUILT_IN = ("TimeoutError", "MemoryError", "OSError")
CLASSES = tuple(
    name
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, errors.CheckpointError) and cls.__module__ == errors.__name__
)

HOLE = "\0"
# What the logging module replaces.
PLACEHOLDER = re.compile(r"%(?:\([a-z]+\))?[-\d.]*[a-z]")
CPP_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
CPP_JOIN = re.compile(r'"\s*\+[^";]*\+\s*"')


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {title}"
    return found[1]


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the rows of all tables whose first column has this heading."""
    found: list[list[str]] = []
    is_wanted = False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_wanted = False
        elif line.startswith(f"| {heading} |"):
            is_wanted = True
        elif is_wanted and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


MESSAGES = [cells[0] for cells in rows(PAGE, "message")]


@cache
def templates() -> tuple[str, ...]:
    """All strings of the code, with a hole for each value that they are filled with."""
    found = [text for path in (REPOSITORY / "mcore_ckpt").rglob("*.py") for text in python_strings(path)]
    for path in (REPOSITORY / "csrc").glob("*.cpp"):
        found += CPP_STRING.findall(CPP_JOIN.sub(HOLE, path.read_text()))
    return tuple(found)


def python_strings(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield PLACEHOLDER.sub(HOLE, node.value)


def is_in_code(message: str) -> bool:
    """True if a string of the code has all words of a message in this order, and nothing else between them."""
    pattern = re.compile(f"{HOLE}+".join(map(re.escape, message.split("…"))))
    return any(pattern.search(template) for template in templates())


@pytest.mark.parametrize("name", [*CLASSES, *BUILT_IN])
def test_each_error_has_a_section_that_says_what_to_do(name: str) -> None:
    text = section(name)
    for heading in ("**What happened.**", "**State.**", "**What to do.**"):
        said = text.partition(heading)[2].partition("\n- ")[0].strip()
        assert len(said.split()) >= 3, f"{name} says nothing after {heading}"


def test_the_overview_has_each_error_once() -> None:
    named = re.findall(r"\]\(#([a-z]+error)\)", "".join(cells[0] for cells in rows(section("Errors"), "error")))
    assert sorted(named) == sorted(name.lower() for name in (*CLASSES, *BUILT_IN))


@pytest.mark.parametrize("message", MESSAGES)
def test_each_quoted_message_is_in_the_code(message: str) -> None:
    quoted = re.fullmatch(r"`([^`]+)`", message)
    assert quoted, "the first cell is the message alone"
    words = quoted[1].strip("….,: ")
    assert len(words.replace("…", " ").split()) >= 3, "too short to be searched for"
    assert is_in_code(words), "no string of mcore_ckpt or csrc has these words in this order"


@pytest.mark.parametrize("heading", ["message", "words of the system", "status", "cause", "what you see"])
def test_each_row_says_what_to_do(heading: str) -> None:
    found = rows(PAGE, heading)
    assert found
    for cells in found:
        assert all(cells[:2]), f"the row of {cells[0]} has an empty cell"


def test_no_message_is_explained_twice() -> None:
    assert sorted(MESSAGES) == sorted(set(MESSAGES))


def test_the_words_of_the_system_are_those_of_linux() -> None:
    known = {f"`{os.strerror(number)}`" for number in errno.errorcode}
    named = {cells[0] for cells in rows(PAGE, "words of the system")}
    assert named
    assert named <= known


def test_the_commands_of_the_page_exist() -> None:
    named = set(re.findall(r"mcore-ckpt ([a-z]+)", PAGE))
    page = (REPOSITORY / "docs" / "command_line.md").read_text()
    known = {cells[0].strip("`") for cells in rows(page, "command")}
    assert {"list", "verify", "inspect", "watch", "doctor", "bench"} <= named <= known


def test_a_message_that_no_code_has_is_found() -> None:
    assert is_in_code("no word from rank … within … s")
    assert not is_in_code("no word from rank 3 within … s")
    assert not is_in_code("within … s … no word from rank")
