"""HuggingFace folders into live models: bit for bit under every layout, or refused by all ranks and nothing changed."""

import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from safetensors.torch import save_file
from transformers import AutoConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    InvalidStateError,
    UnsupportedError,
)
from mcore_ckpt.io import tuning
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.state.model import model_shards, unwrap
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.convert.to_native import convert_to_native
from mcore_ckpt.tools.convert.to_torch_dist import convert_to_torch_dist
from tests.distributed import hf_models
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.hf_models import (
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
from tests.distributed.layouts import HAS_HYBRID, HAS_SPARSE
from tests.distributed.refusals import assert_names
from tests.distributed.tiers import marks, pairs
from tests.distributed.training import parallel
from tests.support import quantized_folders
from tests.support.document_examples import CONVERT, CONVERTED_MODEL, relocated, run_in_shell
from tests.support.global_tensors import to_mcore
from tests.support.hub_server import HubServer, use
from tests.support.quantized_folders import FP8_CONFIG, fp8
from tests.support.tiny_models import make_hf_folder, read_config

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
    "separate-projections-tp2": ("qwen3_5_moe_text", Shape(2, tp=2)),
    "separate-projections-pp2-uneven": ("qwen3_5_text", Shape(2, **UNEVEN)),
    "norms-of-all-heads-tp2": ("minimax_m2", Shape(2, tp=2)),
    "norms-of-all-heads-ep2": ("minimax_m2", Shape(2, ep=2)),
    "softmax-mla-tp2": ("deepseek_v2", Shape(2, tp=2)),
    "softmax-mla-ep2": ("deepseek_v2-lite", Shape(2, ep=2)),
    "biased-tp2": ("seed_oss", Shape(2, tp=2)),
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


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("deepseek_v3", Shape(2, tp=2), marks=marks(2, True)),
        pytest.param("qwen3_moe", Shape(2, ep=2, dtype=torch.bfloat16), marks=marks(2, False)),
        pytest.param("qwen3_moe", Shape(4, tp=2, ep=2), marks=marks(4, False)),
    ],
)
def test_published_fp8_is_dequantized_to_what_the_model_keeps(
    name: str, shape: Shape, source: str, shared_path: Path
) -> None:
    """Values of float32 are not rounded to the bfloat16 of the folder's config where the model has float32."""
    folder = shared_path / "hf"

    def publish() -> None:
        plain = make_hf_folder(folder, name, dtype="bfloat16")
        quantized_folders.publish(plain, partial(fp8, block=(24, 40)), {**FP8_CONFIG, "weight_block_size": [24, 40]})

    on_rank_0(publish)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        load_hf(chunks, folder, source=source)  # type: ignore[arg-type]
        with everywhere():
            values = quantized_folders.fp8_values(read_tensors(folder), (24, 40))
            assert_holds(chunks, to_mcore(model_from_config(read_config(folder)), values))


def assert_same_logits(chunks: Model, folder: Path) -> None:
    wanted = transformers_logits(folder)
    found = logits_of(chunks, sample_tokens(wanted.shape[-1]))
    # transformers computes on the CPU. On a GPU, the kernels that megatron's linear attention is compiled to add in
    # another order: seen on an H200, 7e-5 (megatron-core 0.19). A wrong weight changes the logits by hundreds of that.
    tolerance = 2e-4 if next(chunks[0].parameters()).is_cuda else 2e-5
    with everywhere():
        if found is not None:
            torch.testing.assert_close(found[..., : wanted.shape[-1]], wanted, atol=tolerance, rtol=0)


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
    "shape": (_say(intermediate_size=128), CheckpointMismatchError, "requires|ffn_hidden_size"),
    "other-architecture": (lambda f: make_hf_folder(f, "qwen2"), CheckpointMismatchError, "qwen2"),
    "deeper": (
        lambda f: make_hf_folder(f, "qwen3", num_hidden_layers=6),
        CheckpointMismatchError,
        "which no rank of this model has",
    ),
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


@pytest.mark.world(2)
def test_norms_of_each_head_are_not_those_of_all(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own layer specs have no others, and TransformerConfig says the same for both."""
    on_rank_0(lambda: make_hf_folder(shared_path / "hf", "minimax_m2"))
    shape = Shape(2, tp=2)
    monkeypatch.setattr(hf_models, "has_norms_of_all_heads", lambda model: False)
    with parallel(shape.layout):
        chunks = build_model(shared_path / "hf", shape)
        error = error_of(lambda: load_hf(chunks, shared_path / "hf"))
        said = r"self_attention\.q_layernorm\.weight: wanted global shape \[16\], found global shape \[128\]"
        assert_names(raised_everywhere(CheckpointMismatchError, error), said)


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


@pytest.mark.world(2)
def test_the_names_that_a_refusal_gives_can_be_ignored(shared_path: Path) -> None:
    """It gives megatron's. A model without multi-token prediction may load a folder that has it."""
    folder, other = shared_path / "hf", shared_path / "other"
    on_rank_0(lambda: (make_hf_folder(folder, "deepseek_v3"), make_hf_folder(other, "deepseek_v3-mtp")))
    with parallel(Shape(2, tp=2).layout):
        chunks = build_model(folder, Shape(2, tp=2))
        error = error_of(lambda: load_hf(chunks, other))
        assert_names(raised_everywhere(CheckpointMismatchError, error), r"tensor mtp\.layers\.0\.")
        load_hf(chunks, other, ignore=[r"mtp\.layers\..*"])
        with everywhere():
            assert not any(shard.tensor.isnan().any() for shard in model_shards(chunks) if shard.key.kind == "model")
        for ignore, words in ((["*bias"], r"ignore: '\*bias' is no regular expression"), ("lm_head", "is the string")):
            error = error_of(lambda: load_hf(chunks, other, ignore=ignore))  # noqa: B023
            assert_names(raised_everywhere(InvalidArgumentError, error), words)


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
        exchange = dist.batch_isend_irecv

        def cut_after_three(batch: list[dist.P2POp]) -> list[dist.Work]:
            sent[0] += batch[0].op is dist.isend
            if sent[0] == 4:
                (folder / "model.safetensors").write_bytes(b"")
            return exchange(batch)

        monkeypatch.setattr(dist, "batch_isend_irecv", cut_after_three)
        error = error_of(lambda: load_hf(chunks, folder, source="rank0"))
        assert_names(raised_everywhere(CheckpointCorruptError, error), r"model\.safetensors", "undefined")


@pytest.mark.world(2)
def test_no_communicator_is_made_for_two_ranks(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes one for each pair that calls `send` and `recv`, and none for a batch once all ranks have met."""
    folder = shared_path / "hf"
    on_rank_0(lambda: make_hf_folder(folder, "qwen3"))
    shape = Shape(2, pp=2)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        called: list[str] = []

        def listed(name: str, call: Callable[..., object]) -> Callable[..., object]:
            def listing(*args: object, **kwargs: object) -> object:
                group = args[2] if len(args) > 2 else kwargs.get("group")
                called.append(name if group is None else f"{name} in a group")
                return call(*args, **kwargs)

            return listing

        for name in ("send", "recv", "batch_isend_irecv", "all_gather_into_tensor"):
            monkeypatch.setattr(dist, name, listed(name, getattr(dist, name)))
        load_hf(chunks, folder, source="rank0")
        monkeypatch.undo()
        with everywhere():
            assert called[0] == "all_gather_into_tensor"
            assert set(called[1:]) == {"batch_isend_irecv"}


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


# -- from the hub ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.world(2)
def test_each_rank_that_reads_a_model_of_the_hub_has_it(source: str, shared_path: Path) -> None:
    """Each rank has a cache of its own, as if it were on a node of its own."""
    folder, name = shared_path / "hf", "tiny/Qwen3-tiny"
    hub = HubServer()

    def publish() -> None:
        make_hf_folder(folder, "qwen3")
        hub.add(name, {"config.json": b"{}"})
        hub.add(name, folder, branch="v1")
        (shared_path / "variables.json").write_text(json.dumps(hub.variables(shared_path)))

    with hub, parallel(Shape(2, tp=2).layout):
        on_rank_0(publish)
        home = shared_path / f"home-{dist.get_rank()}"
        use(json.loads((shared_path / "variables.json").read_text()) | {"HF_HOME": str(home)})
        chunks = build_model(folder, Shape(2, tp=2))
        report = load_hf(chunks, name, revision="v1", source=source)  # type: ignore[arg-type]
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
            assert report.path.is_relative_to(home if source == "shared" else shared_path / "home-0")
            assert home.exists() == (source == "shared" or dist.get_rank() == 0)
        with everywhere():
            if dist.get_rank() == 0:
                assert hub.downloaded == sorted(["config.json", "model.safetensors"] * (2 if source == "shared" else 1))
        error = error_of(lambda: load_hf(chunks, "tiny/other", source=source))  # type: ignore[arg-type]
        assert_names(raised_everywhere(CheckpointNotFoundError, error), "tiny/other", "has no such model")
        error = error_of(lambda: load_hf(chunks, folder, revision="v1", source=source))  # type: ignore[arg-type]
        assert_names(raised_everywhere(InvalidArgumentError, error), "leave out the revision")
        with everywhere():
            assert_holds(chunks, global_tensors(folder))


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
    "separate-projections-tp2": ("qwen3_5_text", Shape(2, tp=2)),
    "norms-of-all-heads-tp2": ("minimax_m2", Shape(2, tp=2)),
    "moe-tp2-pp2": ("qwen3_moe", Shape(4, tp=2, pp=2)),
    "shared-expert-tp2-pp2-ep2-etp1": ("qwen2_moe", Shape(4, tp=2, pp=2, ep=2, etp=1)),
    "mla-tp2-pp2": ("deepseek_v3", Shape(4, tp=2, pp=2)),
    **({"nemotron-h-mtp": ("nemotron_h-mtp", Shape(1))} if HAS_HYBRID else {}),
    **({"nemotron-h-tp2-pp2": ("nemotron_h", Shape(4, tp=2, pp=2))} if HAS_HYBRID else {}),
    **({"sparse-attention-tp2": ("glm_moe_dsa", Shape(2, tp=2))} if HAS_SPARSE else {}),
    "tower-tp2": ("qwen2_5_vl", Shape(2, tp=2)),
    "tower-of-megatron-tp2": ("qwen3_vl", Shape(2, tp=2)),
    "tower-mixture-ep2": ("qwen3_vl_moe", Shape(2, ep=2)),
}
MODEL_ONLY = CheckpointConfig(load_contents=("model",), save_contents=("model",), vocab_size=131)
_conversions = [0]


def _seat() -> object:
    _conversions[0] += 1
    return rendezvous(f"test-convert/{_conversions[0]}", 60.0)


@pytest.mark.parametrize(("name", "shape"), marked(CONVERTED, ("moe", "dense-tp2", "nemotron-h-mtp")))
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


@pytest.mark.world(1)
def test_megatron_loads_what_the_documented_command_writes(shared_path: Path) -> None:
    """verl's document names a model of the hub. Here a hub on this machine has a tiny one under that name."""
    folder, path = make_hf_folder(shared_path / "hf", "qwen2_moe"), shared_path / "mnt/disk" / CONVERTED_MODEL
    with HubServer() as hub:
        hub.add(CONVERTED_MODEL, folder)
        done = run_in_shell(relocated(CONVERT, shared_path), shared_path, hub.variables(shared_path / "home"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert hub.downloaded == ["config.json", "generation_config.json", "model.safetensors"]
    shape = Shape(1)
    with parallel(shape.layout):
        (chunk,) = chunks = build_model(folder, shape)
        clear_vocabulary(chunks)
        model = unwrap(chunk)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(path)))  # type: ignore[operator]
        assert_holds(chunks, global_tensors(folder))
        assert_same_logits(chunks, folder)


def clear_vocabulary(chunks: Model) -> None:
    """Rows that pad the vocabulary are not in megatron's checkpoints: they stay as they are."""
    for name, tensor in chunks[0].named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            tensor.data.zero_()


def assert_computes_what_load_hf_gives(chunks: Model, folder: Path, shape: Shape) -> None:
    others = build_model(folder, shape)
    load_hf(others, folder)
    config = read_config(folder)
    tokens = sample_tokens(config.get("text_config", config)["vocab_size"])
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
