"""FSDP shards, written by torch's own DTensors, read without torch.distributed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Placement

from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from mcore_ckpt.formats.contract import CheckpointReader, RegionRead, weights_of
from mcore_ckpt.formats.fsdp.kind import Fsdp
from mcore_ckpt.formats.fsdp.reader import fsdp_tensors, open_fsdp, read_copied_model
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.models.accounting import COMPUTED, COPIES
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import hf_mtp_prefix
from mcore_ckpt.models.reconcile import with_tokens
from mcore_ckpt.sharding.regions import Region
from tests.support.fsdp_training import KINDS, WORLD, model_of
from tests.support.global_tensors import to_mcore
from tests.support.tiny_models import make_hf_folder, make_hf_model, read_config

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks have saved under each kind of placement."""
    folder = tmp_path_factory.mktemp("fsdp")
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "fsdp_training.py"), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of what FSDP wrote, to be damaged."""
    return Path(shutil.copytree(saved / "fsdp", tmp_path / "fsdp"))


def rank_file(folder: Path, rank: int, world: int = WORLD) -> Path:
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def read(reader: CheckpointReader, name: str, region: Region | None = None) -> torch.Tensor:
    info = weights_of(reader)[name]
    region = region or Region.whole(info.shape)
    memory = torch.empty(region.local_shape, dtype=info.dtype)
    memory.view(-1).view(torch.uint8).fill_(0xFF)
    read_regions(reader, [RegionRead(name, region, memory.view(-1)[: region.numel])])
    return memory


def save(folder: Path, *states: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, rank_file(folder, rank, len(states)))
    return folder


def refused(folder: Path, error: type[CheckpointError], *words: str) -> None:
    with pytest.raises(error) as caught:
        open_fsdp(folder)
    for word in (str(folder), *words):
        assert word in str(caught.value)


# -- what torch writes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_what_it_was(kind: str, saved: Path) -> None:
    reader = open_fsdp(saved / kind)
    expected = model_of(2 if kind == "otherwise" else 1).state_dict()
    assert set(weights_of(reader)) == set(expected)
    for name, tensor in expected.items():
        assert (weights_of(reader)[name].dtype, weights_of(reader)[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(read(reader, name), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_tensors(kind: str, saved: Path) -> None:
    reader = open_fsdp(saved / kind)
    embedding = model_of(2 if kind == "otherwise" else 1).embed.weight.detach()
    for start, stop in ((0, 7), (5, 31), (29, 78), (40, 40)):
        found = read(reader, "embed.weight", Region.whole((13, 6)).with_flat(start, stop))
        assert torch.equal(found.view(-1)[: stop - start], embedding.view(-1)[start:stop])


def test_what_replicas_hold_is_read_once(saved: Path) -> None:
    reader = open_fsdp(saved / "hsdp")
    memory = torch.empty(13, 6)
    # Files are read in pages; the two replicas' shards would be four.
    assert read_regions(reader, [RegionRead("embed.weight", Region.whole((13, 6)), memory)]) <= 4 * 4096


def test_nothing_of_torch_distributed_is_needed(saved: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.mapping import hf_mtp_prefix
from mcore_ckpt.formats.fsdp.reader import open_fsdp
open_fsdp(Path({str(saved / "hsdp")!r}))
assert "torch.distributed.tensor" not in sys.modules and "megatron" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- names --------------------------------------------------------------------------------------


# transformers would take plain weights for quantized ones.
QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


def unknown_model(**fields: Any) -> HfModel:
    return read_copied_model({"model_type": "nobody_knows", "architectures": ["NobodyKnowsForCausalLM"], **fields})


def test_an_architecture_without_a_table_is_copied(saved: Path) -> None:
    reader = open_fsdp(saved / "fsdp")
    tensors, _ = fsdp_tensors(reader, unknown_model())
    assert [tensor.name for tensor in tensors] == list(weights_of(reader))
    for tensor in tensors:
        (slab,) = tensor.slabs
        assert (slab.start, slab.mcore, slab.region) == (0, tensor.name, Region.whole(tensor.shape))


def test_what_a_config_says_of_an_unknown_architecture(tmp_path: Path) -> None:
    tensors = {name: torch.ones(7, 2) for name in ("model.embed_tokens.weight", "model.layers.1.a.weight")}
    reader = open_fsdp(save(tmp_path / "a", tensors))
    model = unknown_model(num_hidden_layers=2, vocab_size=7)
    assert model.describe() == "nobody_knows of 2 layers"
    assert not any(tensor.name.startswith(hf_mtp_prefix(model)) for tensor in fsdp_tensors(reader, model)[0])
    with pytest.raises(CheckpointMismatchError, match=r"embed_tokens.weight: has 7 rows, but vocab_size .* is 6"):
        fsdp_tensors(reader, unknown_model(vocab_size=6))


def test_only_what_there_is_no_table_for_is_copied_unseen() -> None:
    for name, fields in (("qwen2", {"hidden_size": "wide"}), ("qwen2", QUANTIZED), ("nobody_knows", QUANTIZED)):
        with pytest.raises(UnsupportedError, match=next(iter(fields))):
            read_copied_model({"model_type": name, **fields})
    # megatron has no modules for it, and it is known for that alone.
    assert read_copied_model({"model_type": "gemma3_text"}).architecture.model_type == "gemma3_text"


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    embedding = torch.randn(5, 3)
    state = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "a.rotary_emb.inv_freq": embedding,
    }
    reader = open_fsdp(save(tmp_path / "a", state))
    tied = unknown_model(tie_word_embeddings=True)
    assert [tensor.name for tensor in fsdp_tensors(reader, tied)[0]] == ["model.embed_tokens.weight"]
    assert len(fsdp_tensors(reader, unknown_model())[0]) == 2
    left_out = {each.reason: each.tensors for each in fsdp_tensors(reader, tied)[1]}
    assert left_out == {COPIES: ("lm_head.weight",), COMPUTED: ("a.rotary_emb.inv_freq",)}
    state["lm_head.weight"][4, 2] += 1
    with pytest.raises(CheckpointMismatchError, match="tie_word_embeddings"):
        fsdp_tensors(open_fsdp(save(tmp_path / "b", state)), tied)


@pytest.mark.parametrize("name", ["llama-3", "qwen2-tied", "qwen3_moe", "deepseek_v3-mtp"])
def test_a_known_architecture_has_what_its_table_names(name: str, tmp_path: Path) -> None:
    model = read_copied_model(read_config(make_hf_folder(tmp_path / "hf", name)))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    found, _ = fsdp_tensors(open_fsdp(save(tmp_path / "a", tensors)), model)
    assert {tensor.name: tensor.shape for tensor in found} == {n: tuple(t.shape) for n, t in tensors.items()}

    gone = next(name for name in tensors if "o_proj" in name)
    without = {name: tensor for name, tensor in tensors.items() if name != gone}
    for number, (state, words) in enumerate(
        (
            (without, f"lacks {gone}"),
            (tensors | {"v_head.weight": torch.ones(1)}, "unknown tensors: v_head.weight"),
            (tensors | {gone: torch.ones(4, 4)}, f"{gone}: has shape"),
        )
    ):
        with pytest.raises(CheckpointMismatchError, match=words):
            fsdp_tensors(open_fsdp(save(tmp_path / f"b{number}", state)), model)


def test_names_in_memory_become_those_of_files(tmp_path: Path) -> None:
    model = read_copied_model(read_config(make_hf_folder(tmp_path / "hf", "nemotron_h")))
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    state = make_hf_model("nemotron_h").state_dict()
    assert any(name.startswith("model.") for name in state)
    found, _ = fsdp_tensors(open_fsdp(save(tmp_path / "a", state)), model)
    exported = {tensor.name: state[tensor.slabs[0].mcore] for tensor in found}
    assert {name for name in exported if "experts." not in name} == {name for name in stored if "experts." not in name}
    wanted, there = to_mcore(model, stored), to_mcore(model, exported)
    assert there.keys() == wanted.keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("wrapped", ["_fsdp_wrapped_module.a.{}b", "a._fsdp_wrapped_module.{}b", "_orig_mod.a.{}b"])
def test_names_of_wrappers_are_no_part_of_a_name(wrapped: str, tmp_path: Path) -> None:
    name = wrapped.format("_checkpoint_wrapped_module.")
    assert list(open_fsdp(save(tmp_path / "a", {name: torch.ones(1)})).names) == ["a.b"]


def test_one_name_twice(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a._fsdp_wrapped_module.b": torch.ones(1)}
    refused(save(tmp_path / "a", state), CheckpointCorruptError, "a.b", "twice")


def test_a_peft_model_without_adapters(tmp_path: Path) -> None:
    state = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(1)}
    assert list(open_fsdp(save(tmp_path / "a", state)).names) == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("name", ["embed_tokens.lora_embedding_A.default", "lm_head.ia3_l.default"])
def test_other_adapters_are_refused(name: str, tmp_path: Path) -> None:
    state = {f"base_model.model.{name}": torch.ones(1)}
    refused(save(tmp_path / "a", state), UnsupportedError, name, "merge")


# -- files -------------------------------------------------------------------------------------------------


def test_no_checkpoint(tmp_path: Path) -> None:
    assert not Fsdp().recognizes(tmp_path)
    refused(tmp_path, CheckpointNotFoundError)


def test_a_missing_rank(folder: Path) -> None:
    assert Fsdp().recognizes(folder)
    rank_file(folder, 2).unlink()
    refused(folder, CheckpointCorruptError, "[2] of 4")
    (folder / "fsdp_config.json").unlink()
    refused(folder, CheckpointCorruptError, "[2] of 4")


def test_files_of_another_world_size(folder: Path, tmp_path: Path) -> None:
    save(folder, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    assert "embed.weight" in open_fsdp(folder).names
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 2}))
    assert list(open_fsdp(folder).names) == ["a"]
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 3}))
    refused(folder, CheckpointCorruptError, "of 3", "2 files of world size 2, 4 files of world size 4")
    (folder / "fsdp_config.json").unlink()
    refused(folder, CheckpointCorruptError, "[2, 4]")


def test_a_file_of_a_rank_that_the_world_does_not_have(folder: Path) -> None:
    shutil.copy(rank_file(folder, 0), rank_file(folder, 4))
    refused(folder, CheckpointCorruptError, "rank_4.pt", "a world of 4 has no such rank")


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"world_size": 0}', '{"world_size": "4"}'])
def test_a_bad_config(config: str, folder: Path) -> None:
    (folder / "fsdp_config.json").write_text(config)
    refused(folder, CheckpointCorruptError, "fsdp_config.json")


@pytest.mark.parametrize(
    "other", [{}, {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(2)}, {"a": torch.ones(1).int()}]
)
def test_ranks_that_disagree(other: dict[str, Any], tmp_path: Path) -> None:
    refused(save(tmp_path / "a", {"a": torch.ones(1)}, other), CheckpointCorruptError, "rank_1.pt", "rank_0.pt")


def test_the_file_of_another_rank(folder: Path) -> None:
    shutil.copy(rank_file(folder, 0), rank_file(folder, 3))
    refused(folder, CheckpointCorruptError, "rank_3.pt", "rank 3 has")


@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
def test_a_file_that_was_cut(keep: float, folder: Path) -> None:
    data = rank_file(folder, 1).read_bytes()
    length = int(len(data) * keep) if isinstance(keep, float) else keep % len(data)
    rank_file(folder, 1).write_bytes(data[:length])
    refused(folder, CheckpointCorruptError, "rank_1.pt")


def test_what_is_no_tensor(tmp_path: Path) -> None:
    refused(save(tmp_path / "a", {"a": "text"}), CheckpointCorruptError, "a: wanted a tensor, found a str")
    torch.save([torch.ones(1)], rank_file(tmp_path / "a", 0, 1))
    refused(tmp_path / "a", CheckpointCorruptError, "wanted a state dict, found a list")


def test_code_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    folder = save(tmp_path / "a", {"a": torch.ones(1), "b": Hostile(os.mkdir, str(trace))})
    refused(folder, CheckpointCorruptError, "mkdir does not belong")
    assert not trace.exists()
    torch.load(rank_file(folder, 0, 1), weights_only=False)
    assert trace.exists(), "the payload is not hostile: this test tests nothing"


class Hostile:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


# -- tensors in other forms --------------------------------------------------------------------------------


def pickled(local: torch.Tensor, shape: tuple[int, ...], ranks: Any, *placements: Placement) -> Hostile:
    """A DTensor as torch up to 2.8 pickled it: its mesh was a tensor of ranks."""
    mesh = object.__new__(DeviceMesh)
    mesh.__dict__.update(device_type="cpu", mesh=torch.tensor(ranks, dtype=torch.int), mesh_dim_names=("fsdp",))
    spec = object.__new__(DTensorSpec)
    spec.__dict__.update(mesh=mesh, placements=placements)
    made = torch.empty(shape, device="meta")
    args = (DTensor, local.dtype, made.size(), made.stride(), 0, torch.strided, torch.device("cpu"), False)
    state = {"_local_tensor": local, "_spec": spec}
    return Hostile(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_wrapper_subclass, DTensor, args, state)


def test_meshes_of_older_torch(tmp_path: Path) -> None:
    whole = torch.arange(15.0).reshape(5, 3)
    halves = [{"a": pickled(part, (5, 3), [0, 1], Shard(0))} for part in whole.split(3)]
    assert torch.equal(read(open_fsdp(save(tmp_path / "a", *halves)), "a"), whole)


def test_ranks_stand_in_the_order_of_the_mesh(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    halves = [{"a": pickled(part, (4, 3), [1, 0], Shard(0))} for part in reversed(whole.split(2))]
    assert torch.equal(read(open_fsdp(save(tmp_path / "a", *halves)), "a"), whole)


def test_a_mesh_without_the_rank(tmp_path: Path) -> None:
    state = {"a": pickled(torch.ones(2), (4,), [1, 2], Shard(0))}
    refused(save(tmp_path / "a", state), CheckpointCorruptError, "tensor a", "(1, 2), but not rank 0")


def test_a_part_that_no_rank_has(tmp_path: Path) -> None:
    state = {"a": pickled(torch.ones(2), (4,), [0, 1], Shard(0))}
    reader = open_fsdp(save(tmp_path / "a", state))
    with pytest.raises(CheckpointCorruptError, match=r"tensor a: 2 elements of .* are in none of these files"):
        read(reader, "a")


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    state = {"a": pickled(torch.ones(2), (2,), [0], Partial())}
    refused(save(tmp_path / "a", state), UnsupportedError, "tensor a", "Partial")


def test_placements_that_do_not_fit_the_mesh(tmp_path: Path) -> None:
    state = {"a": pickled(torch.ones(2), (2,), [0], Shard(0), Replicate())}
    refused(save(tmp_path / "a", state), CheckpointCorruptError, "tensor a", "2 placements")
    state = {"a": pickled(torch.ones(2), (2,), [0], Shard(1))}
    refused(save(tmp_path / "b", state), CheckpointCorruptError, "tensor a", "axis 1")


def test_tensors_with_strides_are_refused(tmp_path: Path) -> None:
    state = {"dense": torch.ones(4, 1)[:, :1], "a": torch.ones(2, 3).t()}
    refused(save(tmp_path / "a", state), UnsupportedError, "tensor a", "contiguous")


def test_views_and_parameters(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(4, 3)
    parameter = torch.nn.Parameter(base[1:3])
    parameter.tensor_model_parallel = True
    state = {"view": base[1:3], "parameter": parameter, "empty": torch.ones(0, 4), "scalar": torch.tensor(3)}
    reader = open_fsdp(save(tmp_path / "a", state))
    for name, tensor in state.items():
        assert torch.equal(read(reader, name), tensor), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool, torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([0.0, 1.0, 3.0, 7.0]).to(dtype)
    found = read(open_fsdp(save(tmp_path / "a", {"a": tensor})), "a")
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


# -- reading -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(saved: Path) -> None:
    reader = open_fsdp(saved / "fsdp")
    for name, region, dtype in (
        ("embed", Region.whole((13, 6)), torch.float32),
        ("embed.weight", Region.whole((14, 6)), torch.float32),
        ("embed.weight", Region.whole((78,)), torch.float32),
        ("embed.weight", Region.whole((13, 6)), torch.bfloat16),
    ):
        with pytest.raises(CheckpointMismatchError, match=f"tensor {name}: wanted"):
            read_regions(reader, [RegionRead(name, region, torch.empty(region.local_shape, dtype=dtype))])


def test_a_file_that_is_cut_later(folder: Path) -> None:
    reader = open_fsdp(folder)
    os.truncate(rank_file(folder, 1), 4096)
    parts = [
        RegionRead(name, Region.whole(info.shape), torch.empty(info.shape, dtype=info.dtype))
        for name, info in weights_of(reader).items()
    ]
    with pytest.raises(CheckpointCorruptError, match=r"rank_1\.pt.*cut"):
        read_regions(reader, parts)


def test_without_a_size_of_the_vocabulary_all_rows_belong_to_it() -> None:
    """As in the config of an architecture without a table, whose language model has a config of its own."""
    model = read_copied_model({"model_type": "novel"})
    assert with_tokens(model, rows=8, tokens=5) is model
    stated = read_copied_model({"model_type": "novel", "vocab_size": 4})
    assert with_tokens(stated, rows=8, tokens=5).config["vocab_size"] == 5
