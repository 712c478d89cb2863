"""The soak's rule finds what grows and accepts what does not; and a soak of minutes, honest and with leaks."""

import json
import os
import random
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.soak.arithmetic import compile_nothing
from tests.faults.soak.curves import Line, Panel, draw
from tests.faults.soak.flatness import LEAST_SAMPLES, TOLERANCES, judge
from tests.faults.soak.publish import picture, section
from tests.faults.soak.usage import KINDS, Usage, usage

SCRIPT = Path(__file__).parents[3] / "scripts" / "soak.sh"
SAVES = 120
# Of one save. The smallest that are to be found in a life of SAVES.
LEAKS = Usage(memory=512 << 10, allocated=128 << 10, blocks=50, threads=1, descriptors=1, keys=1, files=1)


def a_life(**growth: float) -> list[Usage]:
    """What a healthy life shows: caches that fill, and what comes and goes. `growth` is of each save."""
    draw_number = random.Random(1)
    samples = []
    for save in range(SAVES):
        warm = min(save, SAVES // 5)
        own = {
            "memory": (400 << 20) + warm * (4 << 20) + draw_number.randrange(4 << 20),
            "allocated": (140 << 20) + warm * (4 << 20) + draw_number.randrange(1 << 20),
            "blocks": 1_500_000 + 60 * warm + draw_number.randrange(300),
            "threads": 60 + draw_number.randrange(4),
            "descriptors": 100 + draw_number.randrange(4),
            "keys": 80 + draw_number.randrange(6),
            "files": 90 + 44 * (save % 6 // 2),  # steps that are kept for a while
        }
        samples.append(Usage(**{kind: value + int(save * growth.get(kind, 0)) for kind, value in own.items()}))
    return samples


def test_a_healthy_life_is_flat() -> None:
    assert [str(verdict) for verdict in judge(a_life()) if not verdict.is_flat] == []


@pytest.mark.parametrize("kind", Usage._fields)
def test_a_leak_is_found(kind: str) -> None:
    assert [verdict.kind for verdict in judge(a_life(**{kind: getattr(LEAKS, kind)})) if not verdict.is_flat] == [kind]


def test_a_short_life_is_not_judged() -> None:
    assert judge(a_life()[: LEAST_SAMPLES - 1]) == []


def test_new_shapes_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an expert meets them, with each number of tokens. oneDNN would keep 0.6 MB of code for each."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)  # is put back after the test
    compile_nothing()
    weight = torch.ones(40, 160, dtype=torch.bfloat16)
    before = usage(dist.HashStore(), tmp_path).allocated
    for tokens in range(1, 129):
        torch.ones(tokens, 40, dtype=torch.bfloat16) @ weight
    assert usage(dist.HashStore(), tmp_path).allocated - before < TOLERANCES.allocated


def test_curves_are_a_picture() -> None:
    lines = [Line([(0, 1.5), (30, 7), (60, 3)], 0), Line([(60, 2)], 1)]
    root = ElementTree.fromstring(draw([Panel("a < b", lines), Panel("nothing", [])], 60, [0, 30]))
    found = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(str(line.get("points")).split()) for line in found] == [3, 1]
    assert [element.text for element in root.iter() if element.text and "a < b" in element.text] == ["a < b"]


def a_result() -> dict[str, Any]:
    samples = [[float(number), 2 * number, *used] for number, used in enumerate(a_life())]
    verdicts = {0: [[each.kind, each.before, each.after, each.tolerance] for each in judge(a_life())]}
    life = {"started": 0.0, "seconds": 130.0, "killed": 1, "saves": 240, "counts": {"faults met": 3}, "problems": []}
    about = {"date": "2026-01-01", "machine": "none", "versions": "none", "seed": 1, "minutes": 2}
    return about | {"lives": [life | {"samples": [samples, samples], "verdicts": verdicts}]}


def test_a_result_is_published() -> None:
    text, drawn = section(a_result()), picture(a_result())
    assert "| saves | 240 |" in text
    assert "| faults that were met, and saves that they refused | 3, 0 |" in text
    # Both ranks in three panels, and what they have in common once.
    assert drawn.count("<polyline") == 8


def soak(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    result = folder / "result.json"
    done = subprocess.run(
        [str(SCRIPT), *options, "--result", str(result)],
        env=os.environ | {"TMPDIR": str(folder), "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, json.loads(result.read_text()), done.stdout


@pytest.mark.full
def test_leaks_of_a_real_training_are_found(tmp_path: Path) -> None:
    """All at once, for the time that they take. The honest soak of `scripts/test.sh --full` has none."""
    for minutes in ("4", "8", "16"):
        status, result, text = soak(tmp_path, "--minutes", minutes, "--seed", "4", "--leak", *KINDS)
        if any(of for life in result["lives"] for of in life["verdicts"].values()):
            break  # on a slow machine no life of the first soak may have had enough saves to be judged
    judged = {kind: after - before > allowed for kind, before, after, allowed in first_judged(result)}
    assert (status, {kind: judged[kind] for kind in KINDS}) == (1, dict.fromkeys(KINDS, True)), text


def first_judged(result: dict[str, Any]) -> list[list[Any]]:
    return next(of for life in result["lives"] for of in life["verdicts"].values() if of)
