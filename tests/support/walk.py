"""Reads what a stranger would type from a section of a document: its blocks of code, by what they begin with."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(document: str, title: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    text = (REPOSITORY / "docs" / document).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of code of a language."""
    return [code for found, code in _BLOCK.findall(text) if found == language]


def block(text: str, language: str, containing: str) -> str:
    """The only block of a language that has a certain text."""
    (found,) = [code for code in blocks(text, language) if containing in code]
    return found
