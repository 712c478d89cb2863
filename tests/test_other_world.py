"""A training moves to fewer and to more ranks, and back: every stop has the same state, the last one the same bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select

pytestmark = pytest.mark.slow

SAME: dict[str, Any] = {"padded_vocab": 144, "global_batch": 8, "dropout": 0.0}
MOE = SAME | {"experts": 4, "expert_bias": True}

CHAINS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        SAME | {"world": 4, "tp": 2, "pp": 2, "bucket_size": 5000, "overlap_grad_reduce": True},
        SAME | {"world": 2, "precision": "fp32"},
        SAME | {"world": 1, "distributed_optimizer": False},
    ],
    "moe": [
        MOE | {"world": 4, "tp": 2, "ep": 2, "etp": 1},
        MOE | {"world": 1},
        MOE | {"world": 2, "ep": 2},
    ],
}


@pytest.mark.parametrize("name", ["dense", pytest.param("moe", marks=pytest.mark.full)])
def test_a_training_moves_between_worlds(name: str, tmp_path: Path, run_python: Callable[..., str]) -> None:
    first, *others = CHAINS[name]
    stops = [(first, "train", "-", "0")]
    for number, layout in enumerate([*others, first]):
        stops.append((layout, "resume" if layout is first else "load", str(number), str(number + 1)))
    run_python("tests/distributed/move.py", tmp_path, json.dumps(stops))
    begun, ended = (tensor_files(tmp_path / stop / "global_steps_2" / "actor") for stop in ("0", str(len(others) + 1)))
    assert begun.keys() == ended.keys()
    assert [path for path in begun if begun[path] != ended[path]] == []


# With the first checkpoint resharded, the later loads are under other sizes, too.
@pytest.mark.parametrize("is_resharded", [pytest.param(False, marks=pytest.mark.full), True])
def test_every_sample_is_taken_once(is_resharded: bool, tmp_path: Path, run_python: Callable[..., str]) -> None:
    """By 4, 2 and 3 data-parallel ranks, of which each is ahead of the one before it; then one rank takes the rest.

    `is_resharded`: the first checkpoint is rewritten for another layout, with fewer files than there are positions.
    """
    first = SAME | {"world": 4}
    others = [(SAME | {"world": 4, "tp": 2}, 3), (SAME | {"world": 3}, 2), (SAME | {"world": 1}, 60)]
    run_python("tests/distributed/take_samples.py", tmp_path, json.dumps([(first, "-", "0", 5)]))
    source = "0"
    if is_resharded:
        reshard(select(tmp_path / "0"), tmp_path / "resharded", WantedLayout(dp=1))
        source = "resharded"
    stops = []
    for number, (layout, count) in enumerate(others, 1):
        stops.append((layout, source, str(number), count))
        source = str(number)
    run_python("tests/distributed/take_samples.py", tmp_path, json.dumps(stops))
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(4)]
    assert [len(by_rank) for by_rank in found] == [4, 2, 3, 1]
    taken = sorted(sample for by_rank in found for samples, _ in by_rank.values() for sample in samples)
    assert taken == list(range(len(taken)))
    for number, by_rank in enumerate(found, 1):
        files = [(name, offset) for _, files in by_rank.values() for name, offset in files.items()]
        assert sorted(files) == sorted((f"file_{n}", 10 * number) for n in range(12))


def tensor_files(checkpoint: Path) -> dict[str, bytes]:
    files = [*checkpoint.glob("model/*/*.pt"), *checkpoint.glob("optim/*.pt")]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}
