"""A training moves to fewer and to more ranks, and back: every stop has the same state, the last one the same bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def tensor_files(checkpoint: Path) -> dict[str, bytes]:
    files = [*checkpoint.glob("model/*/*.pt"), *checkpoint.glob("optim/*.pt")]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}
