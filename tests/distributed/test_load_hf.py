"""HuggingFace folders into live models: bit for bit under every layout, or refused by all ranks and nothing changed."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from agreement import everywhere
from hf_models import (
    Shape,
    assert_holds,
    build_model,
    global_tensors,
    logits_of,
    sample_tokens,
    transformers_logits,
)
from training import parallel

from mcore_ckpt import knobs
from mcore_ckpt.hf.loading import load_hf

sys.path.insert(0, str(Path(__file__).parent.parent / "hf"))
from tiny_models import make_hf_folder

UNEVEN = {"pp": 2, "first_stage_layers": 1}

CASES: dict[str, tuple[str, Shape]] = {
    "dense": ("qwen3", Shape(1)),
    "tied": ("qwen2-tied", Shape(1)),
    "moe": ("qwen3_moe", Shape(1)),
    "tp2": ("qwen3", Shape(2, tp=2)),
    "pp2-uneven": ("qwen2", Shape(2, **UNEVEN)),
    "pp2-tied": ("qwen3-tied", Shape(2, pp=2)),
    "vpp2": ("qwen3", Shape(2, pp=2, vpp=2)),
    "ep2": ("qwen3_moe", Shape(2, ep=2)),
    "ep2-sparse": ("qwen3_moe-sparse", Shape(2, ep=2)),
    "dp2-bf16": ("qwen3", Shape(2, dtype=torch.bfloat16)),
    "tp4": ("qwen3", Shape(4, tp=4)),
    "tp2-pp2": ("qwen3-tied", Shape(4, tp=2, pp=2)),
    "tp2-vpp2": ("qwen2", Shape(4, tp=2, pp=2, vpp=2)),
    "tp2-ep2": ("qwen3_moe", Shape(4, tp=2, ep=2)),
    "pp2-ep2": ("qwen3_moe", Shape(4, ep=2, **UNEVEN)),
    "ep2-dp4": ("qwen3_moe-sparse", Shape(4, ep=2)),
}


def marked(cases: dict[str, tuple[str, Shape]]) -> list[object]:
    return [pytest.param(*case, id=name, marks=pytest.mark.world(case[1].world)) for name, case in cases.items()]


def on_rank_0(work: Callable[[], object]) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            work()


@pytest.mark.parametrize("source", ["shared", "rank0"])
@pytest.mark.parametrize(("name", "shape"), marked(CASES))
def test_every_rank_gets_its_part(
    name: str, shape: Shape, source: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough that tensors are sent in several pieces, and several in one.
    monkeypatch.setattr(knobs, "SCATTER_BYTES", 10_000)
    monkeypatch.setattr(knobs, "BROADCAST_BYTES", 30_000)
    on_rank_0(lambda: make_hf_folder(shared_path / "hf", name))
    folder = shared_path / "hf"
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        seen = folder if source == "shared" or dist.get_rank() == 0 else Path("/nowhere")
        load_hf(chunks, seen, source=source)  # type: ignore[arg-type]
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
        if shape.dtype == torch.float32:
            wanted = transformers_logits(folder)
            found = logits_of(chunks, sample_tokens(wanted.shape[-1]))
            with everywhere():
                if found is not None:
                    torch.testing.assert_close(found[..., : wanted.shape[-1]], wanted, atol=2e-5, rtol=0)
