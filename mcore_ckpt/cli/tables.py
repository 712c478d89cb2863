"""Shows tables on a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Cell = str | Text

# The number of spaces between two columns, and the length, in characters, above which a word (a path, a tensor's name)
# may be folded.
_GAP = 2
_LONGEST_WORD = 14


def table_of(console: Console, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> RenderableType:
    """Returns a table, or, if the terminal is too narrow for a table, a few lines for each row.

    No word is cut: a cell that does not fit continues in the next line. Columns whose headings end in ">" are aligned
    to the right. If a row is shown as lines, its first cell is the title of the lines. Square brackets in cells are
    plain text.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    names = [heading.removesuffix(">") for heading in headings]
    columns = list(zip(*texts, strict=True))
    whole = [max(len(name), *(text.cell_len for text in column)) for name, column in zip(names, columns, strict=True)]
    least = [max(len(name), *map(_longest_word, column)) for name, column in zip(names, columns, strict=True)]
    # Names and numbers stay in one line.
    least = [whole[n] if n == 0 or headings[n].endswith(">") else least[n] for n in range(len(headings))]
    widths = _fitted(whole, least, console.width - _GAP * (len(names) - 1))
    if widths is None:
        return Group(*(_block(names, row) for row in texts))
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, _GAP, 0, 0))
    for heading, name, width in zip(headings, names, widths, strict=True):
        justify: JustifyMethod = "right" if heading.endswith(">") else "left"
        table.add_column(name, width=width, justify=justify, overflow="fold")
    for row in texts:
        table.add_row(*row)
    return table


def _fitted(whole: Sequence[int], least: Sequence[int], width: int) -> list[int] | None:
    """Returns the width of each column, between `least` and `whole`. None if even the `least` widths do not fit."""
    if sum(least) > width:
        return None
    widths = list(whole)
    while sum(widths) > width:
        widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
        widths[widest] -= 1
    return widths


def _longest_word(text: Text) -> int:
    return min(_LONGEST_WORD, max((len(word) for word in text.plain.split()), default=0))


def _block(headings: Sequence[str], row: Sequence[Text]) -> RenderableType:
    """Returns one row as lines: the first cell, then each other cell that is not empty, with its heading."""
    first, *others = row
    lines = [
        Padding(Text.assemble((f"{heading} ", "dim"), cell, overflow="fold"), (0, 0, 0, 2))
        for heading, cell in zip(headings[1:], others, strict=True)
        if cell
    ]
    first.stylize("bold")
    return Group(first, *lines)


def _text(cell: Cell) -> Text:
    text = cell.copy() if isinstance(cell, Text) else Text(cell)
    text.overflow = "fold"
    return text
