"""What is exported loads with transformers 4 and 5: nothing missing, nothing left over, the same logits."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mcore_checkpoints import make_checkpoint
from tiny_models import NAMES, make_hf_folder

from mcore_ckpt.cli.demo.huggingface import byte_tokenizer
from mcore_ckpt.hf.merge import MergeRequest, merge

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
# Installed beside the environment, which has transformers 5.
TRANSFORMERS_4 = Path(os.environ.get("MCORE_CKPT_TRANSFORMERS4", REPOSITORY / ".venv" / "transformers4"))
# transformers does not read multi-token prediction: those tensors are left over, by its own design.
LOADED = tuple(name for name in NAMES if not name.endswith("-mtp"))

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each model what transformers has saved, and what came back from a checkpoint of two tensor-parallel ranks."""
    made = {}
    for name in LOADED:
        base = tmp_path_factory.mktemp(name)
        source = make_hf_folder(base / "source", name)
        byte_tokenizer().save_pretrained(source)
        merge(MergeRequest(make_checkpoint(base, source, 2), base / "merged", hf_model_path=source))
        made[name] = (source, base / "merged")
    return made


@pytest.fixture(scope="module")
def results(folders: dict[str, tuple[Path, Path]]) -> Callable[[str], tuple[Results, Results]]:
    """What one version of transformers makes of the sources, and of what was merged: one process for all of them."""

    @functools.cache
    def of(version: str) -> tuple[Results, Results]:
        path = [str(TRANSFORMERS_4)] if version == "4" else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        arguments = [str(folder) for pair in folders.values() for folder in pair]
        done = subprocess.run(
            [sys.executable, str(HERE / "load_with_transformers.py"), *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return dict(zip(folders, lines[::2], strict=True)), dict(zip(folders, lines[1::2], strict=True))

    return of


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(
            "4", marks=pytest.mark.skipif(not TRANSFORMERS_4.is_dir(), reason=f"no transformers 4 in {TRANSFORMERS_4}")
        ),
        "5",
    ],
)
def test_an_export_loads_whole(version: str, name: str, results: Callable[[str], tuple[Results, Results]]) -> None:
    found = results(version)[1][name]
    assert found["version"].startswith(version)
    assert found["wrong"] == {}
    # In the version that has made the source, whose config.json the older one need not understand.
    made = results("5")[0][name]
    assert (found["class"], found["dtype"]) == (made["class"], made["dtype"])
    difference = (torch.tensor(found["logits"]) - torch.tensor(made["logits"])).abs().max().item()
    # Of the same version bit for bit; the versions add up the experts' outputs in different orders.
    assert difference <= (0.0 if version == "5" else 1e-4), difference
    if not name.endswith("-value"):
        assert found["text"].startswith("def f(x):")
        assert len(found["text"]) > len("def f(x):") or version == "4"
