"""A config.json of another model with the same tensors, beside a checkpoint that knows what its model was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.models.stated_facts import check_rows, facts_of_model, other_facts
from tests.support.mcore_checkpoints import make, mcore_tensors
from tests.support.tiny_models import make_config, make_hf_folder

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EPSILON = {"rms_norm_eps": 1e-3}
TOLD = "layernorm_epsilon is 3e-06 in the checkpoint and 0.001 in config.json"


def change(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    capsys.readouterr()
    status = main([*map(str, arguments), "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if status == 0 else printed.err


def converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A checkpoint of 8 heads of 8, whose manifest says so."""
    hf = make_hf_folder(tmp_path / "hf", "llama")
    status, _ = run(capsys, "convert", "--hf_model_path", hf, "--output_path", tmp_path / "native")
    assert status == 0
    return tmp_path / "native" / "global_steps_0" / "actor"


MERGE = ("merge", "--target_dir")
BACK = ("convert", "--format", "torch_dist", "--layout")


@pytest.mark.parametrize(
    ("command", "is_own"),
    [
        (MERGE, True),
        (MERGE, False),
        ((*BACK, "megatron", "--output_path"), False),
        ((*BACK, "verl", "--output_path"), True),
    ],
)
def test_another_order_of_rows_is_refused(
    command: tuple[str, ...], is_own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    role = converted(tmp_path, capsys)
    folder = change(role / "huggingface" if is_own else make_hf_folder(tmp_path / "other", "llama"), **HEADS)
    named = () if is_own else ("--hf_model_path", folder)
    status, error = run(capsys, *command, tmp_path / "out", role, *named)
    assert status == 1
    assert "num_attention_heads is 8 in the checkpoint and 4 in config.json" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "field"), [(MERGE, "other_model"), ((*BACK, "verl", "--output_path"), "notes")])
def test_what_changes_no_row_is_told(
    command: tuple[str, ...], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    role = converted(tmp_path, capsys)
    change(role / "huggingface", **EPSILON)
    status, report = run(capsys, *command, tmp_path / "out", role)
    assert status == 0
    assert sum(TOLD in each for each in report[field]) == 1


@pytest.mark.parametrize("how", ["only", "merge"])
def test_adapters_are_cut_as_they_were_trained(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf_folder(tmp_path / "hf", "llama")
    qkv = "decoder.layers.1.self_attention.linear_qkv"
    rows = mcore_tensors(hf)[f"{qkv}.weight"].shape[0]
    adapters = {"linear_in": torch.ones(4, 64), "linear_out": torch.ones(rows, 4)}
    saved = {f"{qkv}.adapter.{name}.weight": tensor for name, tensor in adapters.items()}
    role = make(tmp_path / "s", saved, config=(hf / "config.json").read_bytes(), adapters=AdapterSettings(8))
    merge = ("merge", role, tmp_path / "out", "--adapters", how, "--hf_model_path")
    status, error = run(capsys, *merge, change(make_hf_folder(tmp_path / "other", "llama"), **HEADS))
    assert status == 1
    assert "num_attention_heads is 8 in the checkpoint and 4 in config.json" in error
    assert run(capsys, *merge, hf)[0] == 0


def stated(name: str, **fields: Any) -> HfModel:
    return model_from_config({**make_config(name), **fields})


TOWER = {**make_config("qwen3_vl")["vision_config"], "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "fields", "wrong"),
    [
        ("llama", HEADS, ["num_attention_heads", "num_query_groups", "kv_channels"]),
        ("qwen3_next", {"linear_num_key_heads": 2, "linear_key_head_dim": 16}, ["linear_num_key_heads"]),
        (
            "qwen3_vl",
            {"vision_config": TOWER},
            ["vision_model.num_attention_heads"],
        ),
    ],
)
@pytest.mark.parametrize("has_rules", [True, False])
def test_the_facts_that_order_rows(name: str, fields: dict[str, Any], wrong: list[str], has_rules: bool) -> None:
    saved = {**facts_of_model(stated(name)), "vision_model.num_attention_heads": 4}
    own, other = stated(name), stated(name, **fields)
    if not has_rules:
        own, other = (replace(each, architecture=replace(each.architecture, rules=())) for each in (own, other))
    assert check_rows(saved, own) == other_facts(saved, own) == []
    assert check_rows({}, other) == []
    with pytest.raises(CheckpointMismatchError, match="another order") as caught:
        check_rows(saved, other)
    assert all(f"{fact} is " in str(caught.value) for fact in wrong)


def test_latent_attention_has_one_order_of_rows() -> None:
    """Its kv_channels are nobody's, and a live model has some."""
    saved = {**facts_of_model(stated("deepseek_v3")), "kv_channels": 5, "num_query_groups": 3}
    assert check_rows(saved, stated("deepseek_v3")) == []
