"""A training moves to fewer and to more ranks, and back: every stop has the same state, the last one the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent

SAME: dict[str, Any] = {"padded_vocab": 144, "global_batch": 16, "dropout": 0.0}
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


def move(folder: Path, stops: list[tuple[dict[str, Any], str, str, str]]) -> None:
    """The stops of one journey (tests/distributed/move.py), each on ranks of its own."""
    done = subprocess.run(
        [sys.executable, "tests/distributed/move.py", str(folder), json.dumps(stops)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", CHAINS)
def test_a_training_moves_between_worlds(name: str, tmp_path: Path) -> None:
    first, *others = CHAINS[name]
    stops = [(first, "train", "-", "0")]
    for number, layout in enumerate([*others, first]):
        stops.append((layout, "resume" if layout is first else "load", str(number), str(number + 1)))
    move(tmp_path, stops)
    begun, ended = (tensor_files(tmp_path / stop / "global_steps_2" / "actor") for stop in ("0", str(len(others) + 1)))
    assert begun.keys() == ended.keys()
    assert [path for path in begun if begun[path] != ended[path]] == []


def tensor_files(checkpoint: Path) -> dict[str, bytes]:
    files = [*checkpoint.glob("model/*/*.pt"), *checkpoint.glob("optim/*.pt")]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}
