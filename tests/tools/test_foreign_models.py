"""Checkpoints of other programs, made of tiny HuggingFace models, become these models again."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
)
from mcore_ckpt.formats.verl_ranks.reader import open_verl_ranks
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.cuts import axes_of
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from mcore_ckpt.tools.examine.find import find_checkpoint
from tests.support.global_tensors import to_mcore
from tests.support.tiny_models import make_hf_folder, read_config

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]


def mcore_of(hf: Path) -> Tensors:
    return to_mcore(model_from_config(read_config(hf)), load_file(hf / "model.safetensors"))


def assert_same_model(folder: Path, reference: Path) -> None:
    found, wanted = load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert read_config(folder)["architectures"] == read_config(reference)["architectures"]


# -- verl's folders, by hand ---------------------------------------------------------------------------------

# Queries, keys, values, their gates, betas and alphas of the tiny Qwen3-Next.
SECTIONS = (32, 32, 96, 96, 8, 8)


def cut(name: str, tensor: torch.Tensor, rank: int, size: int, replicated: Callable[[str], bool]) -> torch.Tensor:
    """One rank's part. Gate and up are cut each by itself, and so is what GatedDeltaNet computes in one go."""
    axis = axes_of(name)[0]
    if axis is None or replicated(name) or (name == "output_layer.weight" and len(tensor) == 1):
        return tensor.clone()
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size, axis)[rank] for half in tensor.chunk(2, axis)], axis)
    if "in_proj.weight" in name or "conv1d" in name:
        parts = tensor.split(SECTIONS[: 6 if "in_proj" in name else 3])
        return torch.cat([part.chunk(size)[rank] for part in parts])
    return tensor.chunk(size, axis)[rank].clone()


def save_verl(
    folder: Path,
    tensors: Tensors,
    stages: list[list[list[int]]],
    tp: int = 1,
    ep: int = 1,
    *,
    experts: int = 4,
    tied: bool = False,
    replicated: Callable[[str], bool] = lambda name: False,
) -> Path:
    """As verl did: `stages` are the layers of each virtual chunk of each pipeline rank."""
    padded = {
        name: torch.cat([tensor, torch.zeros(-len(tensor) % (4 * tp), tensor.shape[1])])
        if name in ("embedding.word_embeddings.weight", "output_layer.weight") and len(tensor) > 1
        else tensor
        for name, tensor in tensors.items()
    }
    if tied and len(stages) > 1:
        padded["output_layer.weight"] = padded["embedding.word_embeddings.weight"]
    for t in range(tp):
        for p, chunks in enumerate(stages):
            for e in range(ep):
                saved = [
                    {
                        local: cut(name, tensor, t, tp, replicated)
                        for name, tensor in padded.items()
                        if (local := local_name(name, layers, (p, number), stages, e, experts // ep)) is not None
                    }
                    for number, layers in enumerate(chunks)
                ]
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if len(stages) > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                (folder / "model" / name).mkdir(parents=True)
                torch.save(saved, folder / "model" / name / "model.pt")
    return folder


def local_name(
    name: str, layers: list[int], at: tuple[int, int], stages: list[list[list[int]]], ep: int, experts: int
) -> str | None:
    """What a chunk calls a tensor, if it has it."""
    if name.startswith("embedding."):
        return name if at == (0, 0) else None
    if not name.startswith("decoder.layers."):
        return name if at == (len(stages) - 1, len(stages[0]) - 1) else None
    words = name.split(".")
    if int(words[2]) not in layers:
        return None
    words[2] = str(layers.index(int(words[2])))
    expert = expert_of(name)
    if expert is not None:
        if expert[1] // experts != ep:
            return None
        words[words.index("local_experts") + 1] = str(expert[1] % experts)
    return ".".join(words)


STAGES: dict[str, list[list[list[int]]]] = {
    "pp1": [[[0, 1, 2, 3]]],
    "pp2": [[[0]], [[1, 2, 3]]],
    "vpp2": [[[0], [2]], [[1], [3]]],
    "an-empty-stage": [[[]], [[0, 1, 2, 3]]],
}


# By the sizes of tensor and expert parallelism that each can have.
VERL_MODELS = {
    "qwen2-tied": [(1, 1), (2, 1)],
    "qwen3_moe-sparse": [(1, 1), (2, 1), (1, 2), (2, 2)],
    "llama-value": [(1, 1), (2, 1)],
    "qwen3_next": [(1, 1), (2, 1), (1, 2), (2, 2)],
}


def verl_layouts() -> list[Any]:
    """Each model in every layout. CI runs it with all stages, and takes the sizes in turn, the largest first."""
    cases = []
    for name, sizes in VERL_MODELS.items():
        for number, stages in enumerate(STAGES):
            in_ci = sizes[-1 - number % len(sizes)]
            cases += [
                pytest.param(name, tp, ep, stages, marks=() if (tp, ep) == in_ci else pytest.mark.full)
                for tp, ep in sizes
            ]
    return cases


@pytest.mark.parametrize(("name", "tp", "ep", "stages"), verl_layouts())
def test_verl_ranks(name: str, tp: int, ep: int, stages: str, tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "hf_config_and_tokenizer", name)
    save_verl(tmp_path, mcore_of(hf), STAGES[stages], tp, ep, tied=name.endswith("tied"))
    merge(MergeRequest(tmp_path, tmp_path / "merged"))
    assert_same_model(tmp_path / "merged", hf)


@pytest.mark.parametrize(
    ("model", "words", "replicated"),
    [
        ("deepseek_v3", ("_down_proj",), True),
        ("deepseek_v3", ("_down_proj",), False),
        ("minimax_m2", (".q_layernorm", ".k_layernorm"), False),
    ],
)
def test_what_is_cut_or_not(model: str, words: tuple[str, ...], replicated: bool, tmp_path: Path) -> None:
    """No name says which. `TELinear` duplicates the down-projections of latent attention, the local spec cuts them.
    Norms of queries and keys are whole, except those that cover all heads.
    """
    hf = make_hf_folder(tmp_path / "hf", model)
    tensors = mcore_of(hf)

    def by_spec(name: str) -> bool:
        return any(word in name for word in words)

    saved = {
        name: tensor.chunk(2)[0] if by_spec(name) and not replicated else tensor for name, tensor in tensors.items()
    }
    save_verl(tmp_path / "actor", saved, STAGES["pp1"], 2)
    if not replicated:
        path = tmp_path / "actor/model/mp_rank_01/model.pt"
        (state,) = torch.load(path)
        state |= {name: tensor.chunk(2)[1].clone() for name, tensor in tensors.items() if by_spec(name)}
        torch.save([state], path)
    merge(MergeRequest(tmp_path / "actor", tmp_path / "merged", hf_model_path=hf))
    assert_same_model(tmp_path / "merged", hf)


def test_sections_that_no_table_names(tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3_next")
    tensors = mcore_of(hf)
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    open_verl_ranks(save_verl(tmp_path / "one", tensors, STAGES["pp1"]), expected)
    cut_in_two = save_verl(tmp_path / "two", tensors, STAGES["pp1"], 2)
    with pytest.raises(CheckpointMismatchError, match=r"\.(?:in_proj|conv1d)\.weight: .*Row\.sections"):
        open_verl_ranks(cut_in_two, expected)


def test_experts_that_are_not_cut_where_the_rest_is(tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "hf", "mixtral")
    save_verl(tmp_path / "actor", mcore_of(hf), STAGES["pp2"], 2, replicated=lambda name: ".experts." in name)
    merge(MergeRequest(tmp_path / "actor", tmp_path / "merged", hf_model_path=hf))
    assert_same_model(tmp_path / "merged", hf)


def test_names_of_transformer_engine(tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "hf", "qwen3_moe")
    tensors = {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_"): tensor
        for name, tensor in mcore_of(hf).items()
    }
    save_verl(tmp_path / "actor", tensors, STAGES["pp2"], 2)
    for path in (tmp_path / "actor").rglob("model.pt"):
        (state,) = torch.load(path)
        torch.save([{f"module.{te_name(name)}": tensor for name, tensor in state.items()} | EXTRA], path)
    merge(MergeRequest(tmp_path / "actor", tmp_path / "merged", hf_model_path=hf))
    assert_same_model(tmp_path / "merged", hf)


EXTRA = {"module.decoder.layers.0.self_attention.linear_qkv._extra_state": None}


def te_name(name: str) -> str:
    words = name.split(".local_experts.")
    if len(words) == 1:
        return name
    number, rest = words[1].split(".", 1)
    return f"{words[0]}.{rest}{number}"


def verl_of(tmp_path: Path, name: str = "qwen2", tp: int = 2, **more: Any) -> Path:
    hf = make_hf_folder(tmp_path / "actor" / "huggingface", name)
    return save_verl(tmp_path / "actor", mcore_of(hf), STAGES["pp2"], tp, **more)


def refused(folder: Path, error: type[Exception], *words: str, **request: Any) -> None:
    target = folder.parent / "refused"
    with pytest.raises(error) as caught:
        merge(MergeRequest(folder, target, **request))
    for word in words:
        assert word in str(caught.value)
    assert not target.exists()


def change(path: Path, edit: Callable[[list[Tensors]], Any]) -> None:
    saved = torch.load(path)
    torch.save(edit(saved) or saved, path)


def test_a_missing_folder(tmp_path: Path) -> None:
    folder = verl_of(tmp_path)
    (folder / "model/mp_rank_01_000/model.pt").unlink()
    refused(folder, CheckpointCorruptError, "tp=1 pp=0")


def test_a_missing_expert_rank(tmp_path: Path) -> None:
    folder = verl_of(tmp_path, "mixtral", ep=2)
    (folder / "model/mp_rank_01_001_001/model.pt").unlink()
    refused(folder, CheckpointCorruptError, "a rank of pp=1 ep=1")
    (folder / "model/mp_rank_00_001_001/model.pt").unlink()
    refused(folder, CheckpointCorruptError, "pp=1 ep=1")


def test_a_number_that_may_be_either_rank(tmp_path: Path) -> None:
    folder = verl_of(tmp_path, tp=1)
    for path in folder.rglob("model.pt"):
        change(path, lambda saved: [state.pop("decoder.final_layernorm.weight", None) for state in saved] and None)
    refused(folder, CheckpointMismatchError, "pipeline or the expert rank", "mp_rank_TT_PPP_EEE")


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (lambda saved: saved * 2, CheckpointCorruptError, "different numbers of virtual chunks"),
        (lambda saved: ["text"], CheckpointCorruptError, "wanted a state dict, found a str"),
        (lambda saved: saved[0].update(a="text"), CheckpointCorruptError, "a: wanted a tensor, found a str"),
        (
            lambda saved: saved[0].update({"decoder.layers.3.input_layernorm.weight": torch.ones(64)}),
            CheckpointCorruptError,
            "different numbers of layers",
        ),
        (
            lambda saved: saved[0].update({"decoder.layers.0.input_layernorm.weight": torch.ones(64).double()}),
            CheckpointCorruptError,
            "different checkpoints",
        ),
        (
            lambda saved: saved[0].pop("decoder.layers.0.self_attention.linear_proj.weight") is None,
            CheckpointCorruptError,
            "is in the files of only 1 of 2 ranks",
        ),
    ],
)
def test_ranks_that_disagree(edit: Any, error: type[CheckpointError], words: str, tmp_path: Path) -> None:
    folder = verl_of(tmp_path)
    change(folder / "model/mp_rank_01_001/model.pt", edit)
    refused(folder, error, words)


def test_another_model(tmp_path: Path) -> None:
    folder = verl_of(tmp_path)
    config = read_config(folder / "huggingface")
    (folder / "huggingface/config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    refused(folder, CheckpointMismatchError, "linear_fc1.weight", "requires [160, 64] in all")


def test_a_tied_head_that_is_another_tensor(tmp_path: Path) -> None:
    folder = verl_of(tmp_path, "qwen2-tied", tp=1, tied=True)
    path = folder / "model/mp_rank_00_001/model.pt"
    change(path, lambda saved: saved[0]["output_layer.weight"].add_(1) is None)
    refused(folder, CheckpointMismatchError, "tie_word_embeddings")


# -- the others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe", "deepseek_v3-mtp"])
def test_fsdp(name: str, tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "actor" / "huggingface", name)
    state = load_file(hf / "model.safetensors")
    if name.endswith("tied"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    merge(MergeRequest(tmp_path, tmp_path / "merged", backend="fsdp"))
    assert_same_model(tmp_path / "merged", hf)


def test_fsdp_of_an_architecture_without_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "architectures": ["NewModel"]}))
    torch.save({"a": torch.randn(3), "b": torch.tensor([1, 2])}, tmp_path / "model_world_size_1_rank_0.pt")
    merge(MergeRequest(tmp_path, tmp_path / "merged", backend="fsdp", dtype=torch.bfloat16))
    found = load_file(tmp_path / "merged/model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.bfloat16, "b": torch.int64}


def save_torch_dist(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    dcp.save(dict(tensors), checkpoint_id=str(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


@pytest.mark.parametrize("name", ["llama-tied", "qwen2_moe"])
def test_torch_dist(name: str, tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "hf", name)
    tensors = mcore_of(hf)
    optimizer = {f"optimizer.state.exp_avg.{key}": tensor for key, tensor in tensors.items()}
    folder = save_torch_dist(tmp_path / "iter_0000012", tensors | optimizer | {"chained_1.optimizer.x": torch.ones(1)})
    merge(MergeRequest(folder, tmp_path / "merged", hf_model_path=hf))
    assert_same_model(tmp_path / "merged", hf)


def test_torch_dist_that_was_cut(tmp_path: Path) -> None:
    hf = make_hf_folder(tmp_path / "hf", "llama")
    folder = save_torch_dist(tmp_path / "iter_0000012", mcore_of(hf))
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1000])
    refused(folder, CheckpointCorruptError, file.name, hf_model_path=hf)


# -- which checkpoint --------------------------------------------------------------------------------------


def other_heads(tmp_path: Path) -> Path:
    """The configuration of a model with the same tensors, of four heads of 16 for eight of 8."""
    folder = make_hf_folder(tmp_path / "other", "llama")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(read_config(folder) | heads))
    return folder


def test_another_order_of_rows(tmp_path: Path) -> None:
    other, told = other_heads(tmp_path), "num_attention_heads is 8 in the checkpoint and 4 in config.json"
    refused(verl_of(tmp_path, "llama"), CheckpointMismatchError, told, hf_model_path=other)
    of_megatron = {"norm_epsilon": 3e-6, "swiglu": True, "squared_relu": False, "position_embedding_type": "rope"}
    heads = {"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 4, "kv_channels": 8}
    folder = save_torch_dist(tmp_path / "iter_0000012", mcore_of(other))
    torch.save({"args": argparse.Namespace(**of_megatron, **heads)}, folder / "common.pt")
    refused(folder, CheckpointMismatchError, told, hf_model_path=other)


def test_fsdp_with_another_configuration(tmp_path: Path) -> None:
    """Its tensors are HuggingFace's, so nothing is cut, but transformers would compute something else."""
    hf = make_hf_folder(tmp_path / "actor" / "huggingface", "llama")
    torch.save(load_file(hf / "model.safetensors"), tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    target = tmp_path / "merged"
    report = merge(MergeRequest(tmp_path / "actor", target, backend="fsdp", hf_model_path=other_heads(tmp_path)))
    assert "num_attention_heads is 8 in the checkpoint and 4 in config.json" in report.other_model
    assert_same_model(target, hf)


def test_which_folder_is_meant(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    for step in (3, 4):
        for role in ("actor", "critic"):
            folder = root / f"global_step_{step}" / role
            save_verl(folder, {"decoder.final_layernorm.weight": torch.ones(1)}, [[[]]])
    torch.save({}, root / "global_step_4/actor/model_world_size_1_rank_0.pt")
    actor = root / "global_step_4/actor"
    for found in (
        find_checkpoint(actor),
        find_checkpoint(actor.parent, role="actor"),
        find_checkpoint(root, step=4, role="actor"),
    ):
        assert (found.path, found.kind) == (actor, "verl_ranks")
    assert find_checkpoint(actor.parent, "fsdp").path == actor
    with pytest.raises(InvalidArgumentError, match="actor, critic"):
        find_checkpoint(actor.parent)
    with pytest.raises(CheckpointNotFoundError):
        find_checkpoint(root, step=5)
    with pytest.raises(CheckpointNotFoundError, match="model_world_size"):
        find_checkpoint(root, "fsdp", step=3)


def test_a_checkpoint_without_config(tmp_path: Path) -> None:
    folder = save_torch_dist(tmp_path / "a" / "iter_0000012", {"a": torch.ones(1)})
    refused(folder, CheckpointNotFoundError, "--hf_model_path")


def test_what_is_not_there_and_what_needs_another_backend(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such folder"):
        find_checkpoint(tmp_path / "Qwen" / "Qwen3-8B")
    (tmp_path / "actor").mkdir()
    torch.save({}, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    for path in (tmp_path, tmp_path / "actor"):
        with pytest.raises(InvalidArgumentError, match="--backend fsdp"):
            find_checkpoint(path)
        assert find_checkpoint(path, "fsdp").kind == "fsdp"
