"""Bridge's own switches, its adapters, pretrained weights, and going back, each in runs of its own training."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from megatron.bridge.peft.lora import LoRA

from mcore_ckpt.checkpoint import read_manifest
from mcore_ckpt.cli.main import main
from tests.bridge.bridge_run import ITERATIONS, LEFT, BridgeRun
from tests.bridge.resuming_bridge import check_went_on, copied, killed, resumed
from tests.support.document_examples import run_in_shell
from tests.support.tiny_models import make_hf_folder
from tests.support.walk import block, section

Uninterrupted = Callable[..., BridgeRun]


@pytest.mark.shows("Megatron-Bridge", "LoRA")
def test_a_run_with_adapters_goes_on(tmp_path: Path, left_by_bridge: BridgeRun) -> None:
    options = {"checkpoint.pretrained_checkpoint": str(left_by_bridge.root)}
    run = killed(tmp_path, 1, options, adapters=lora)
    again = resumed(run)
    whole = replace(run, folder=tmp_path / "whole", root=None, ours=False, killed_at=None).check()
    check_went_on(again, whole, since=4)
    names = read_manifest(run.root / "global_steps_4" / "actor").tensors
    assert names
    assert all("adapter" in name for name in names)


def lora() -> LoRA:
    return LoRA(target_modules=["linear_qkv", "linear_fc1"], dim=4, dropout=0.0)


# Bridge keeps random states of each replica only with expert parallelism.
EXPERTS = {
    "model.num_moe_experts": 4,
    "model.expert_model_parallel_size": 2,
    "model.moe_token_dispatcher_type": "allgather",
    "model.add_bias_linear": False,
}


@pytest.mark.shows("Megatron-Bridge", "moving over", "going back")
@pytest.mark.full
def test_a_strangers_walk(tmp_path: Path, left_by_bridge: BridgeRun) -> None:
    """docs/integrations.md alone: a run of Bridge's moves over by two lines, is looked at, and goes back."""
    text = section("integrations.md", "Megatron-Bridge")
    each = {**LEFT, "checkpoint.save_interval": 1}
    over = copied(left_by_bridge, tmp_path / "over", ours=True, options=each, killed_at=ITERATIONS)
    assert -9 in over.start(), over.log
    (tmp_path / "CHECKPOINTS").symlink_to(over.root)
    command = block(text, "bash", "mcore-ckpt convert")
    (tmp_path / "BACK").mkdir()
    shutil.copy(left_by_bridge.root / "latest_train_state.pt", tmp_path / "BACK")  # of an older conversion
    typed = run_in_shell(f"set -e\nmcore-ckpt list CHECKPOINTS\n{command.strip()} --force", tmp_path, {})
    assert typed.returncode == 0, typed.stderr
    assert "global_steps_5" in typed.stdout
    back = replace(over, folder=tmp_path / "back", root=tmp_path / "BACK", ours=False, killed_at=None).check()
    whole = copied(left_by_bridge, tmp_path / "whole").check()
    check_went_on(back, whole, since=5)


@pytest.mark.full
@pytest.mark.shows("Megatron-Bridge", "going back")
@pytest.mark.parametrize("options", [pytest.param({}, id="dense"), pytest.param(EXPERTS, id="experts")])
def test_a_run_goes_back_to_bridges_own_manager(
    tmp_path: Path, uninterrupted: Uninterrupted, options: dict[str, Any]
) -> None:
    run = killed(tmp_path, 2, options)
    back = tmp_path / "back"
    layout = ("--format", "torch_dist", "--layout", "bridge", "--output_path", str(back))
    assert main(["convert", str(run.root), *layout, "--test"]) == 0
    assert (back / "iter_0000004" / "run_config.yaml").exists()
    theirs = replace(run, folder=tmp_path / "theirs", root=back, ours=False, killed_at=None).check()
    check_went_on(theirs, uninterrupted(2, options), since=4)


PRECISION = {"optimizer.use_precision_aware_optimizer": True}
SWITCHES = {
    "offloaded": {
        **PRECISION,
        "optimizer.optimizer_cpu_offload": True,
        "optimizer.optimizer_offload_fraction": 0.5,
    },
    "precision-aware": {**PRECISION, "optimizer.store_param_remainders": False},
    "remainders": PRECISION,
    "experts": EXPERTS,
    "overlapped": {"ddp.overlap_param_gather": True, "ddp.overlap_grad_reduce": True},
}


SHOWN = {"offloaded": ("offload", "precision-aware"), "precision-aware": ("precision-aware",)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(pytest.mark.full, pytest.mark.shows("Megatron-Bridge", *SHOWN.get(name, ()))))
        for name in SWITCHES
    ],
)
def test_a_run_with_bridges_switches_goes_on(tmp_path: Path, uninterrupted: Uninterrupted, name: str) -> None:
    options = SWITCHES[name]
    again = resumed(killed(tmp_path, 2, options))
    check_went_on(again, uninterrupted(2, options), since=4)


@pytest.mark.full
def test_pretrained_weights_are_those_that_bridge_takes(tmp_path: Path, left_by_bridge: BridgeRun) -> None:
    run = killed(tmp_path, 2, LEFT)
    assert run.losses == left_by_bridge.losses
    new = {**LEFT, "train.train_iters": 2, "optimizer.lr": 1e-3}

    def started(name: str, ours: bool, root: Path | None) -> BridgeRun:
        options = {**new, "checkpoint.pretrained_checkpoint": str(root)}
        return BridgeRun(2, tmp_path / name, None, options, ours=ours).check()

    ours, theirs = started("ours", True, run.root), started("theirs", False, left_by_bridge.root)
    check_went_on(ours, theirs, since=0)
    assert ours.losses.keys() == {1, 2}


LLAMA = {
    "model.normalization": "RMSNorm",
    "model.gated_linear_unit": True,
    "model.activation_func": torch.nn.functional.silu,
    "model.add_bias_linear": False,
    "model.share_embeddings_and_output_weights": False,
    "train.train_iters": 2,
}


@pytest.mark.full
def test_a_huggingface_model_is_saved_too(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 132}
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    source = make_hf_folder(tmp_path / "source", "llama", tie_word_embeddings=False, **sizes)
    options = {"checkpoint.also_save_hf_checkpoint": True, "checkpoint.hf_source_path": str(source)}
    run = BridgeRun(2, tmp_path / "run", tmp_path / "root", {**LLAMA, **options}).check()
    exported = safetensors.torch.load_file(run.root / "global_steps_2" / "actor" / "huggingface" / "model.safetensors")
    found = run.states[0]["chunk0.embedding.word_embeddings.weight"]
    assert torch.equal(exported["model.embed_tokens.weight"], found[:132])
    wanted = safetensors.torch.load_file(source / "model.safetensors")
    assert {name: each.shape for name, each in exported.items()} == {name: each.shape for name, each in wanted.items()}
