"""HuggingFace folders into live models: bit for bit under every layout, or refused by all ranks and nothing changed."""

import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from agreement import error_of, everywhere, raised_everywhere
from hf_models import (
    Model,
    Shape,
    assert_holds,
    build_model,
    global_tensors,
    logits_of,
    poison,
    read_tensors,
    sample_tokens,
    transformers_logits,
    wrap,
)
from layouts import HAS_HYBRID
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from refusals import assert_names
from safetensors.torch import save_file
from tiers import marks, pairs
from tiny_models import make_hf_folder, read_config
from training import parallel
from transformers import AutoConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidStateError,
    UnsupportedError,
)
from mcore_ckpt.io import tuning
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.state.model import model_shards, unwrap
from mcore_ckpt.tools.convert_native import convert_to_native
from mcore_ckpt.tools.convert_torch_dist import convert_to_torch_dist
from mcore_ckpt.tools.reshard.target import WantedLayout

UNEVEN = {"pp": 2, "first_stage_layers": 1}
SOURCES = ("shared", "rank0")

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
    "shared-expert-ep2": ("qwen2_moe", Shape(2, ep=2)),
    "tp2-ep2-etp1": ("mixtral", Shape(2, tp=2, ep=2, etp=1)),
    "mla-tp2": ("deepseek_v3", Shape(2, tp=2)),
    "dp2-bf16": ("qwen3", Shape(2, dtype=torch.bfloat16)),
    "tp4": ("qwen3", Shape(4, tp=4)),
    "tp2-pp2": ("qwen3-tied", Shape(4, tp=2, pp=2)),
    "tp2-vpp2": ("qwen2", Shape(4, tp=2, pp=2, vpp=2)),
    "tp2-ep2": ("qwen3_moe", Shape(4, tp=2, ep=2)),
    "pp2-ep2": ("qwen3_moe", Shape(4, ep=2, **UNEVEN)),
    "ep2-dp4": ("qwen3_moe-sparse", Shape(4, ep=2)),
    "glm-tp2-ep2": ("glm4_moe", Shape(4, tp=2, ep=2)),
    "linear": ("qwen3_next", Shape(1)),
    "linear-tp2": ("qwen3_next", Shape(2, tp=2)),
    "mla-tp2-pp2-uneven": ("deepseek_v3", Shape(4, tp=2, **UNEVEN)),
    "shared-expert-tp2-pp2-ep2-etp1": ("qwen2_moe", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "ep2-etp2": ("mixtral", Shape(4, ep=2, etp=2)),
}


# From where ranks get their parts, with each kind of layer and of cut once.
IN_CI = {
    ("tied", "shared"),
    ("tp2", "rank0"),
    ("pp2-uneven", "shared"),
    ("pp2-tied", "rank0"),
    ("vpp2", "shared"),
    ("ep2-sparse", "rank0"),
    ("shared-expert-ep2", "shared"),
    ("tp2-ep2-etp1", "rank0"),
    ("mla-tp2", "rank0"),
    ("linear-tp2", "shared"),
    ("ep2-etp2", "rank0"),
}


def marked(cases: dict[str, tuple[str, Shape]], in_ci: Collection[str]) -> list[object]:
    return [pytest.param(*case, id=name, marks=marks(case[1].world, name in in_ci)) for name, case in cases.items()]


def on_rank_0(work: Callable[[], object]) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            work()


@pytest.mark.parametrize(
    ("name", "shape", "source"),
    [
        pytest.param(*case, source, id=f"{name}-{source}", marks=marks(case[1].world, (name, source) in IN_CI))
        for name, case in CASES.items()
        for source in SOURCES
    ],
)
def test_every_rank_gets_its_part(
    name: str, shape: Shape, source: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough that tensors are sent in several pieces, and several in one.
    monkeypatch.setattr(tuning, "SCATTER_BYTES", 10_000)
    monkeypatch.setattr(tuning, "BROADCAST_BYTES", 30_000)
    on_rank_0(lambda: make_hf_folder(shared_path / "hf", name))
    folder = shared_path / "hf"
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        seen = folder if source == "shared" or dist.get_rank() == 0 else Path("/nowhere")
        load_hf(chunks, seen, source=source)  # type: ignore[arg-type]
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
        if shape.dtype == torch.float32 and source == "shared":
            assert_same_logits(chunks, folder)


def assert_same_logits(chunks: Model, folder: Path) -> None:
    wanted = transformers_logits(folder)
    found = logits_of(chunks, sample_tokens(wanted.shape[-1]))
    with everywhere():
        if found is not None:
            torch.testing.assert_close(found[..., : wanted.shape[-1]], wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("form", ["several-files", "stacked"])
@pytest.mark.world(2)
def test_other_forms_of_folders(form: str, shared_path: Path) -> None:
    folder = shared_path / "hf"
    on_rank_0(lambda: make_hf_folder(folder, "qwen3_moe"))
    expected = global_tensors(folder)
    dist.barrier()
    on_rank_0(lambda: _in_several_files(folder) if form == "several-files" else _stacked(folder))
    with parallel(Shape(2, ep=2).layout):
        chunks = build_model(folder, Shape(2, ep=2))
        load_hf(chunks, folder)
        with everywhere():
            assert_holds(chunks, expected)


def _in_several_files(folder: Path) -> None:
    tensors = sorted(read_tensors(folder).items())
    (folder / "model.safetensors").unlink()
    where = {}
    for number in range(3):
        part = dict(tensors[number::3])
        save_file(part, folder / f"model-{number}.safetensors", {"format": "pt"})
        where |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _stacked(folder: Path) -> None:
    """Experts in one tensor, as transformers 5 has them in memory."""
    tensors = read_tensors(folder)
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        of = [[tensors.pop(f"{name}.{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")] for e in range(4)]
        tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in of])
        tensors[f"{name}.down_proj"] = torch.stack([down for _, _, down in of])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.world(2)
def test_the_optimizer_steps_from_what_was_loaded(shared_path: Path) -> None:
    folder = shared_path / "hf"
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    shape = Shape(2, dtype=torch.bfloat16)
    with parallel(shape.layout):
        chunks = wrap(build_model(folder, shape))
        config = OptimizerConfig(optimizer="adam", lr=0.0, bf16=True, use_distributed_optimizer=True, weight_decay=0.0)
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        load_hf(chunks, folder, optimizer=optimizer)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.step()
        with everywhere():
            # With a rate of 0 the step writes its main parameters, rounded, over the weights.
            assert_holds(chunks, global_tensors(folder))


# -- refusals ---------------------------------------------------------------------------------------------


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: _change(folder, lambda tensors: tensors.pop(name))


def _add(name: str) -> Callable[[Path], None]:
    return lambda folder: _change(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _say(**fields: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return write


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


REFUSED: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "missing": (_drop("model.layers.2.mlp.up_proj.weight"), CheckpointMismatchError, r"layers\.2\.mlp\.up_proj"),
    "unknown": (_add("model.layers.0.extra.weight"), CheckpointMismatchError, r"layers\.0\.extra"),
    "cut": (_cut, CheckpointCorruptError, "cut or damaged"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointNotFoundError, "model.safetensors"),
    "shape": (_say(intermediate_size=128), CheckpointMismatchError, "must have|ffn_hidden_size"),
    "other-architecture": (lambda f: make_hf_folder(f, "qwen2"), CheckpointMismatchError, "qwen2"),
    "deeper": (lambda f: make_hf_folder(f, "qwen3", num_hidden_layers=6), CheckpointMismatchError, "num_layers"),
    "other-groups": (
        lambda f: make_hf_folder(f, "qwen3", num_attention_heads=12, num_key_value_heads=2),
        CheckpointMismatchError,
        "num_attention_heads|num_query_groups",
    ),
    "other-vocabulary": (lambda f: make_hf_folder(f, "qwen3", vocab_size=99), CheckpointMismatchError, "99 tokens"),
    "tied": (lambda f: make_hf_folder(f, "qwen3-tied"), CheckpointMismatchError, "tie"),
}


@pytest.mark.parametrize(("case", "source"), pairs(tuple(REFUSED), SOURCES))
@pytest.mark.world(2)
def test_what_does_not_fit_is_refused_by_all_and_nothing_changes(case: str, source: str, shared_path: Path) -> None:
    folder, other = shared_path / "hf", shared_path / "other"
    change, expected, words = REFUSED[case]
    on_rank_0(lambda: (make_hf_folder(folder, "qwen3"), make_hf_folder(other, "qwen3"), change(other)))
    shape = Shape(2, pp=2)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        error = error_of(lambda: load_hf(chunks, other, source=source))  # type: ignore[arg-type]
        assert_names(raised_everywhere(expected, error), words)
        with everywhere():
            assert all(s.tensor.isnan().all() for s in model_shards(chunks) if s.key.kind == "model")


@pytest.mark.skipif(not HAS_HYBRID, reason="this megatron-core has no HybridModel")
@pytest.mark.parametrize("other", ["deeper", "experts"])
@pytest.mark.world(2)
def test_a_hybrid_model_of_other_layers_is_refused(other: str, shared_path: Path) -> None:
    """By load_hf, and by a manager that would export it."""
    folder, others = shared_path / "hf", shared_path / "other"
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    name, sizes = ("qwen3", {"num_hidden_layers": 6}) if other == "deeper" else ("qwen3_moe", {})
    on_rank_0(lambda: make_hf_folder(others, name, **sizes))
    said = {
        "deeper": [r"wanted the layers 4 x \(attention, mlp\), found 6 x \(attention \+ mlp\)"] * 2,
        "experts": [
            "num_moe_experts is None",
            r"wanted the layers 4 x \(attention, mlp\), found 4 x \(attention \+ experts\)",
        ],
    }[other]
    shape = Shape(2, pp=2, hybrid=True)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        error = error_of(lambda: load_hf(chunks, others))
        assert_names(raised_everywhere(CheckpointMismatchError, error), said[0])
        config = CheckpointConfig(save_contents=("model", "hf_model"), load_contents=("model",))
        hf_config = AutoConfig.from_pretrained(others)
        error = error_of(lambda: CheckpointManager(shared_path / "root", chunks, hf_config=hf_config, config=config))
        assert_names(raised_everywhere(CheckpointMismatchError, error), "hf_config", said[1])


@pytest.mark.world(2)
def test_what_is_said_to_have_no_counterpart_is_left_alone(shared_path: Path) -> None:
    folder, other = shared_path / "hf", shared_path / "other"
    on_rank_0(lambda: (make_hf_folder(folder, "qwen3"), make_hf_folder(other, "qwen3")))
    on_rank_0(lambda: (_add("model.extra")(other), _drop("lm_head.weight")(other)))
    shape = Shape(2, pp=2)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        load_hf(chunks, other, ignore=(r"model\.extra", r"lm_head\.weight", r"output_layer\.weight"))
        with everywhere():
            for shard in model_shards(chunks):
                if shard.key.kind == "model":
                    assert bool(shard.tensor.isnan().all()) == (shard.key.name == "output_layer.weight")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.world(2)
def test_what_is_not_a_number_is_refused_by_all(source: str, shared_path: Path) -> None:
    folder = shared_path / "hf"
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    on_rank_0(lambda: _change(folder, lambda t: t["model.layers.3.mlp.up_proj.weight"][5, 7].fill_(torch.nan)))
    shape = Shape(2, pp=2)
    with parallel(shape.layout):
        error = error_of(lambda: load_hf(build_model(folder, shape), folder, source=source))  # type: ignore[arg-type]
        assert_names(raised_everywhere(CheckpointCorruptError, error), "NaN", "undefined", r"layers\.3\.mlp")


@pytest.mark.world(2)
def test_a_file_that_goes_while_it_is_sent_fails_on_all(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared_path / "hf"
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    monkeypatch.setattr(tuning, "SCATTER_BYTES", 20_000)
    shape = Shape(2, pp=2)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        sent = [0]
        send = dist.send

        def cut_after_three(tensor: torch.Tensor, rank: int) -> None:
            sent[0] += 1
            if sent[0] == 4:
                (folder / "model.safetensors").write_bytes(b"")
            send(tensor, rank)

        monkeypatch.setattr(dist, "send", cut_after_three)
        error = error_of(lambda: load_hf(chunks, folder, source="rank0"))
        assert_names(raised_everywhere(CheckpointCorruptError, error), r"model\.safetensors", "undefined")


@pytest.mark.world(1)
def test_without_megatrons_groups_it_is_refused(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_hf_folder(shared_path / "hf", "qwen3")
    with parallel(Shape(1).layout):
        chunks = build_model(folder, Shape(1))
    # The end of the block destroys the groups that the model has.
    with pytest.raises(InvalidStateError, match=r"the model's pg_collection has been destroyed"):
        load_hf(chunks, folder)
    del chunks[0].pg_collection
    with pytest.raises(InvalidStateError, match=r"initialize_model_parallel\(\.\.\.\) first"):
        load_hf(chunks, folder)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(UnsupportedError, match=r"initialize_model_parallel\(\.\.\.\) first, even in a single process"):
        load_hf(chunks, folder)
    assert all(tensor.isnan().all() for tensor in chunks[0].parameters())


# -- converted --------------------------------------------------------------------------------------------

CONVERTED: dict[str, tuple[str, Shape]] = {
    "moe": ("qwen3_moe", Shape(1)),
    "dense-tp2": ("qwen3", Shape(2, tp=2)),
    "moe-ep2": ("qwen3_moe", Shape(2, ep=2)),
    "tp2-pp2": ("qwen3", Shape(4, tp=2, pp=2)),
    "tp2-pp2-tied": ("qwen2-tied", Shape(4, tp=2, pp=2)),
    "sparse-pp2-ep2": ("qwen3_moe-sparse", Shape(4, pp=2, ep=2)),
    "linear": ("qwen3_next", Shape(1)),
    "linear-tp2": ("qwen3_next", Shape(2, tp=2)),
    "moe-tp2-pp2": ("qwen3_moe", Shape(4, tp=2, pp=2)),
    "shared-expert-tp2-pp2-ep2-etp1": ("qwen2_moe", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "mla-tp2-pp2": ("deepseek_v3", Shape(4, tp=2, pp=2)),
}
MODEL_ONLY = CheckpointConfig(load_contents=("model",), save_contents=("model",), vocab_size=131)
_conversions = [0]


def _seat() -> object:
    _conversions[0] += 1
    return rendezvous(f"test-convert/{_conversions[0]}", 60.0)


@pytest.mark.parametrize(("name", "shape"), marked(CONVERTED, ("moe", "dense-tp2", "linear-tp2")))
def test_megatron_loads_the_dist_checkpoint(
    name: str, shape: Shape, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough that tensors are in several chunks, and the model in several files.
    monkeypatch.setattr(tuning, "SCATTER_BYTES", 8_000)
    monkeypatch.setattr(tuning, "HF_LEAST_FILE_BYTES", 100_000)
    folder, path = shared_path / "hf", shared_path / "dist"
    on_rank_0(lambda: make_hf_folder(folder, name))
    convert_to_torch_dist(folder, path, _seat(), test=True)  # type: ignore[arg-type]
    with everywhere():
        assert len(list(path.glob("*.distcp"))) > 3
        assert (path / "huggingface" / "config.json").is_file()
    with parallel(shape.layout):
        (chunk,) = chunks = build_model(folder, shape)
        model = unwrap(chunk)
        clear_vocabulary(chunks)
        state = dist_checkpointing.load(model.sharded_state_dict(), str(path))  # type: ignore[operator]
        model.load_state_dict(state)
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
        assert_same_logits(chunks, folder)
        assert_computes_what_load_hf_gives(chunks, folder, shape)
        # Ours reads it too, though norms are in it under the names of several layer specs.
        poison(chunks)
        clear_vocabulary(chunks)
        manager = CheckpointManager(shared_path / "root", chunks, config=MODEL_ONLY)
        manager.load(path=path)
        manager.close()
        with everywhere():
            assert_holds(chunks, global_tensors(folder))


def clear_vocabulary(chunks: Model) -> None:
    """Rows that pad the vocabulary are not in megatron's checkpoints: they stay as they are."""
    for name, tensor in chunks[0].named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            tensor.data.zero_()


def assert_computes_what_load_hf_gives(chunks: Model, folder: Path, shape: Shape) -> None:
    others = build_model(folder, shape)
    load_hf(others, folder)
    tokens = sample_tokens(read_config(folder)["vocab_size"])
    found, wanted = logits_of(chunks, tokens), logits_of(others, tokens)
    with everywhere():
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "shape"), marked(CONVERTED, ("moe", "moe-ep2", "shared-expert-tp2-pp2-ep2-etp1")))
def test_a_manager_loads_the_converted_checkpoint(
    name: str, shape: Shape, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_BYTES", 40_000)
    folder, root = shared_path / "hf", shared_path / "root"
    on_rank_0(lambda: make_hf_folder(folder, name))
    # For another layout than the one that loads it.
    experts = {"ep": 2} if "moe" in name else {}
    convert_to_native(folder, root, WantedLayout(tp=2, pp=2, **experts), _seat(), test=True)  # type: ignore[arg-type]
    with everywhere():
        assert (root / "global_steps_0/actor/huggingface/config.json").is_file()
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        manager = CheckpointManager(root, chunks, config=MODEL_ONLY)
        assert manager.load().step == 0
        manager.close()
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
