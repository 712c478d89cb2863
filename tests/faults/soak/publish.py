"""Writes a soak's result into docs/reliability.md, with its five curves as docs/soak.svg.

python -m tests.faults.soak.publish RESULT.json
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.soak.curves import Line, Panel, draw
from tests.faults.soak.flatness import TOLERANCES
from tests.faults.soak.usage import KINDS, Usage

DOCS = Path(__file__).parents[3] / "docs"
BEGIN, END = "<!-- written by tests/faults/soak/publish.py -->", "<!-- end -->"
TITLES = {
    "memory": "memory of each rank (MB in RAM)",
    "threads": "threads of each rank",
    "descriptors": "open descriptors of each rank",
    "keys": "keys in the store",
    "files": "files and folders below the roots and in the remote store",
}
BESIDES = {"allocated": "of its memory, what malloc has given out", "blocks": "blocks of Python's objects"}
SCALES = {"memory": 1e-6}
MB = {"memory", "allocated"}


def picture(result: dict[str, Any]) -> str:
    """All ranks of all lives, one line for each; a mark where a life begins."""
    lives = result["lives"]
    panels = [Panel(TITLES[kind], _lines(lives, kind)) for kind in KINDS]
    seconds = max(life["started"] + life["seconds"] for life in lives)
    return draw(panels, seconds, [life["started"] for life in lives])


def _lines(lives: list[dict[str, Any]], kind: str) -> list[Line]:
    # Keys and files are the same for all ranks.
    ranks = 1 if kind in ("keys", "files") else None
    return [
        Line([(life["started"] + at, getattr(Usage(*used), kind) * SCALES.get(kind, 1)) for at, _, *used in of], rank)
        for life in lives
        for rank, of in enumerate(life["samples"][:ranks])
        if of
    ]


def section(result: dict[str, Any]) -> str:
    lives = result["lives"]
    counts: Counter[str] = sum((Counter(life["counts"]) for life in lives), Counter())
    problems = sum(len(life["problems"]) for life in lives)
    facts = {
        "date": result["date"],
        "machine": f"{result['machine']}; {result['versions']}",
        "seed, minutes": f"{result['seed']}, {result['minutes']:g}",
        "lives of the training, and ranks that were killed": f"{len(lives)}, {sum(life['killed'] for life in lives)}",
        "saves": sum(life["saves"] for life in lives),
        "of them: of a step that existed; on slow disks": f"{counts['saved again']}; {counts['slow saves']}",
        "faults that were met, and saves that they refused": f"{counts['faults met']}, {counts['saves refused']}",
        "restarts that loaded, and rollbacks in a life": f"{counts['restarts']}, {counts['rollbacks']}",
        "loads under the layout of the save, and under another": (
            f"{counts['loads of the same layout']}, {counts['loads of another layout']}"
        ),
        "pins, prunes": f"{counts['pins']}, {counts['prunes']}",
        "problems": problems,
    }
    lines = ["| what | |", "|---|---|", *(f"| {what} | {value} |" for what, value in facts.items())]
    lines += ["", "| curve | judged | most growth | allowed |", "|---|---|---|---|"]
    for kind, title in {
        **TITLES,
        "allocated": "bytes that malloc has given out",
        "blocks": "objects of Python",
    }.items():
        verdicts = [each for life in lives for of in life["verdicts"].values() for each in of if each[0] == kind]
        most = max((after - before for _, before, after, _ in verdicts), default=0)
        lines.append(
            f"| {title.partition(' (')[0]} | {len(verdicts)} | {_shown(kind, most)} | "
            f"{_shown(kind, getattr(TOLERANCES, kind))} |"
        )
    return "\n".join([*lines, "", "![five curves over the soak](soak.svg)", ""])


def _shown(kind: str, value: float) -> str:
    return f"{value / 1e6:.1f} MB" if kind in MB else f"{value:g}"


def main(path: Path) -> None:
    result = json.loads(path.read_text())
    DOCS.joinpath("soak.svg").write_text(picture(result))
    page = DOCS / "reliability.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{section(result)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
