"""Reads what a stranger would type from a document: its blocks of code, and the commands in them."""

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# Where the commands of the pages were typed.
FOLDER_OF_THE_PAGES = "/home/you/counting"
_BLOCK = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, the name of the file that it is to be saved as (or ""), and its text."""

    language: str
    title: str
    code: str


def all_blocks(text: str) -> Iterator[Block]:
    """The blocks of code in their order, without the indentation that they have in a list."""
    for indent, language, title, code in _BLOCK.findall(text):
        yield Block(language, title, re.sub(f"^{indent}", "", code, flags=re.MULTILINE))


def commands(code: str) -> list[str]:
    """The commands in a block of bash: their continued lines are joined, and comments are left out."""
    lines = code.replace("\\\n", " ").splitlines()
    found = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [re.sub(r" {2,}", " ", command) for command in found if command]


def section(document: str, title: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    text = (REPOSITORY / "docs" / document).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of code of a language."""
    return [block.code for block in all_blocks(text) if block.language == language]


def block(text: str, language: str, containing: str) -> str:
    """The only block of a language that has a certain text."""
    (found,) = [code for code in blocks(text, language) if containing in code]
    return found


def assert_prints(text: str, stdout: str, folder: Path) -> None:
    """What a command has printed in a folder is a page's block of text, in which `...` stands for any lines."""
    wanted, found = _as_printed_anywhere(text, FOLDER_OF_THE_PAGES), _as_printed_anywhere(stdout, folder)
    assert doctest.OutputChecker().check_output(wanted, found, doctest.ELLIPSIS), f"{wanted}\n\n{found}"


def _as_printed_anywhere(text: str, folder: Path | str) -> str:
    """A command's output without what differs from run to run: times, sizes, versions, and the folder."""
    # A terminal folds long lines, also within the folder's name.
    text = re.sub(r"\s*".join(map(re.escape, str(folder))), "FOLDER", text)
    text = re.sub(r"just now|\d+ \w+ ago", "AGO", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\S+", "DATE", text)
    text = re.sub(r"\d[\d.,]* ?([kMG]?B|m?s)\b(/s)?", "AMOUNT", text)
    text = re.sub(r"\d+\.\d[\w.+]*", "NUMBER", text)
    return "".join(text.split())
