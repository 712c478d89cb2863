"""The plan of one rank's load of a real GPTModel: which stored tensors fill which live ones, and what is refused."""

import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.halves import split_halves
from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.cli.demo.tiny_trainer import tiny_config, tiny_model
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.write_requests import TensorWrite
from mcore_ckpt.load.fill import fill_tensors
from mcore_ckpt.load.plan import LoadPlan, check_all_used, plan_load
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas, Topology
from mcore_ckpt.sharding.plan import Coding, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.typed_values import TYPE, to_stored
from tests.support.absent_ranks import rank_of
from tests.support.fused_adam import FusedAdam
from tests.support.stored_tensors import MODEL_FILE, OPTIMIZER_FILE, checkpoint, lone_trainer, shard
from tests.support.unsharded_model import sharded_state_dict

TOKENS, HIDDEN = 20, 16
MOMENTS = ("exp_avg", "exp_avg_sq")
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
NORM, FC1 = "decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"
RNG, EXTRA = file_names.rng_file(0, 0, 0, 0), file_names.extra_file(0, 0, 0, 0)


@dataclass(frozen=True)
class Rank:
    """A rank of a training with a real model, which has done a step."""

    model: torch.nn.Module
    optimizer: Any
    tp: int
    rank: int

    def trainer(self, **config: Any) -> Trainer:
        fields = {name: config.pop(name) for name in ("vocab_size", "adapters", "model") if name in config}
        made = lone_trainer(self.model, self.optimizer, **config)
        at = RankCoordinates(tp=self.rank, etp=self.rank)
        topology = Topology(world_size=self.tp, tp=self.tp, etp=self.tp)
        return replace(made, coordinates=at, topology=topology, **fields)

    @property
    def live(self) -> dict[tuple[str, str], torch.Tensor]:
        """The live tensors by name and kind."""
        found = {}
        for each in model_shards([self.model]):
            found[each.key.name, "model"] = each.tensor
            for kind, value in self.inner.state.get(each.tensor, {}).items():
                found[each.key.name, kind] = value
        return found

    @property
    def inner(self) -> Any:
        return self.optimizer.optimizer


def adam_of(model: torch.nn.Module) -> Any:
    """megatron's optimizer of a training in fp32, whose constructor needs a GPU."""
    inner = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad])
    for parameter in inner.param_groups[0]["params"]:
        # As after a step, which would need gradients.
        inner.state[parameter] = {"step": torch.tensor(1.0), **{kind: torch.zeros_like(parameter) for kind in MOMENTS}}
    optimizer: Any = object.__new__(FP32Optimizer)
    optimizer.optimizer = inner
    return optimizer


def gpt(tp: int = 1, vocabulary: int = TOKENS, layers: int = 1, hidden: int = HIDDEN) -> torch.nn.Module:
    config = tiny_config(num_layers=layers, hidden_size=hidden, num_attention_heads=2, tensor_model_parallel_size=tp)
    return tiny_model(config, vocabulary, max_sequence_length=8)


def rank(tp: int = 1, number: int = 0, change: Callable[[torch.nn.Module], object] = id, **model: Any) -> Rank:
    """One rank of a training; `change` is done to its model before the optimizer is made."""
    with rank_of(tp, number):
        parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
        made = gpt(tp, **model)
        change(made)
        keep_places(made)
        return Rank(made, adam_of(made), tp, number)


def keep_places(model: torch.nn.Module) -> None:
    """Lets a model say where its live tensors belong, as megatron does, when its world is gone."""
    described: Any = model.sharded_state_dict
    found: list[dict[str, Any]] = []

    def kept(metadata: dict[str, Any]) -> dict[str, Any]:
        if not found:
            found.append(described(metadata=metadata))
        return dict(found[0])

    model.sharded_state_dict = kept  # type: ignore[assignment]
    model_shards([model])


def global_values(key: ShardKey, shape: Sequence[int], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """What is stored of a tensor. No two tensors have a number in common, and padding has none."""
    generator = torch.Generator().manual_seed(sum(map(ord, f"{key.name}{kind}")))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def part(values: torch.Tensor, region: Region) -> torch.Tensor:
    found = torch.empty(region.local_shape, dtype=values.dtype)
    for local, there in region.boxes():
        to, at = ([slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)] for box in (local, there))
        found[tuple(to)] = values[tuple(at)]
    return found


def files_of(
    ranks: Sequence[Rank],
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = ("model", "param", *MOMENTS),
    left_out: Sequence[str] = (),
) -> dict[str, list[TensorWrite]]:
    """The files of ranks with the global values of their tensors."""
    found: dict[str, list[TensorWrite]] = {}
    for each in ranks:
        for live in model_shards([each.model]):
            if live.key.name in left_out:
                continue
            for kind in kinds:
                of_kind = dtype if kind == "model" else torch.float32
                values = global_values(live.key, live.region.global_shape, kind, of_kind)
                write = shard(live.key.name, part(values, live.region), kind, live.region)
                path = (
                    file_names.model_file(each.rank, 0)
                    if kind == "model"
                    else file_names.optimizer_file(0, each.rank, 0, 0)
                )
                found.setdefault(path, []).append(write)
    return found


def plain_of(ranks: Sequence[Rank], **common: Any) -> dict[str, dict[str, Any]]:
    group = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8}
    adam = {"kind": "Adam", "param_groups": [group], "step": 3.0, "grad_scaler": None}
    found: dict[str, dict[str, Any]] = {file_names.COMMON_FILE: {"optimizers": [adam], "lr_scheduler": None} | common}
    for each in ranks:
        found[file_names.rng_file(0, each.rank, 0, 0)] = {
            "python": (3, (1, 2), None),
            "numpy": None,
            "torch": torch.full_like(torch.get_rng_state(), 7),
            "device": None,
            "megatron": {},
        }
        found[file_names.extra_file(0, each.rank, 0, 0)] = to_stored({"rank": each.rank}, "extra_state")
    return found


def save(
    folder: Path, ranks: Sequence[Rank], files: Mapping[str, Sequence[TensorWrite]] | None = None, **fields: Any
) -> Path:
    tp = len(ranks)
    plain = fields.pop("plain", None) or plain_of(ranks)
    return checkpoint(
        folder / "actor",
        files_of(ranks) if files is None else files,
        plain=plain,
        topology=Topology(world_size=tp, tp=tp, etp=tp),
        ranks=tuple(RankCoordinates(tp=number, etp=number) for number in range(tp)),
        **fields,
    )


def plan_of(of: Rank, folder: Path, **config: Any) -> LoadPlan:
    """The plan. It must change nothing."""
    before = {key: value.clone() for key, value in of.live.items()}
    plan = plan_load(of.trainer(**config), LocalFolder(folder))
    after = of.live
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    return plan


def fill(plan: LoadPlan) -> None:
    with torch.no_grad():
        fill_tensors(plan.fills, plan.reader.read)


def assert_loaded(of: Rank, plan: LoadPlan) -> None:
    """Fills, and compares each element of each tensor with its place in the stored global tensor."""
    fill(plan)
    for each in model_shards([of.model]):
        rows = each.region.global_shape
        for kind in ("model", *MOMENTS):
            wanted = part(global_values(each.key, rows, kind, torch.float32), each.region)
            assert torch.equal(of.live[each.key.name, kind], wanted), (each.key, kind)


@pytest.fixture(scope="module")
def one() -> Rank:
    return rank()


@pytest.fixture(scope="module")
def stored(one: Rank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("stored"), [one])


def refusal(of: Rank, folder: Path, error: type[Exception] = CheckpointMismatchError, **config: Any) -> str:
    with pytest.raises(error) as caught:
        plan_of(of, folder, **config)
    return str(caught.value)


# -- what is loaded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "now"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_each_live_tensor_gets_its_part_under_any_layout(saved: int, now: int, tmp_path: Path) -> None:
    folder = save(tmp_path, [rank(saved, number) for number in range(saved)])
    for number in range(now):
        mine = rank(now, number)
        plan = plan_of(mine, folder)
        assert len(plan.model_fills) == len(list(model_shards([mine.model])))
        (planned,) = plan.parts
        assert (planned.mains, len(planned.state)) == ((), 2 * len(plan.model_fills))  # fp32: the model is the main
        assert_loaded(mine, plan)
        check_all_used(mine.trainer(), plan, [plan.used])


def test_a_plan_says_what_there_is(one: Rank, stored: Path) -> None:
    plan = plan_of(one, stored)
    assert (plan.newly_started, plan.new_moments, plan.other_model) == ((), [], ())
    assert (plan.seed, plan.extra_state) == (None, {"rank": 0})
    assert plan.rng is not None
    assert set(plan.rng["torch"].tolist()) == {7}
    assert plan.common is not None
    assert [state.step for state in plan.common.optimizers] == [3.0]
    everything = [(0, len(plan.manifest.tensors) - 1)]
    assert plan.used == {"model": everything, "optimizer": everything}
    assert len(plan.fills) == 3 * len(plan.model_fills)
    assert {fill.rounding for fill in plan.fills} == {None}


@pytest.mark.parametrize(
    ("contents", "fills", "used"),
    [
        (("model",), 1, {"model"}),
        (("optimizer",), 3, {"optimizer"}),
        (("extra",), 0, set()),
        (("model", "optimizer"), 3, {"model", "optimizer"}),
    ],
)
def test_only_what_is_asked_for_is_planned(
    contents: tuple[str, ...], fills: int, used: set[str], one: Rank, stored: Path
) -> None:
    plan = plan_of(one, stored, load_contents=contents)
    assert len(plan.fills) == fills * len(plan.manifest.tensors)
    assert {name for name, runs in plan.used.items() if runs} == used
    assert (plan.common is not None) == ("optimizer" in contents)
    assert (plan.rng is not None) == (plan.extra_state is not None) == ("extra" in contents)


def test_padding_rows_of_a_vocabulary_become_zero(tmp_path: Path) -> None:
    """4 rows more than what is stored, which has 20 tokens and no padding."""
    folder = save(tmp_path, [rank()])
    wide = rank(vocabulary=24)
    plan = plan_of(wide, folder, vocab_size=TOKENS)
    padded = [fill for fill in plan.fills if fill.padded]
    assert len(padded) == 2 * 3  # embedding and head, each with two moments
    fill(plan)
    for name in (EMBEDDING, HEAD):
        for kind in ("model", *MOMENTS):
            wanted = global_values(ShardKey(name, kind), (TOKENS, HIDDEN), kind, torch.float32)
            assert torch.equal(wide.live[name, kind][:TOKENS], wanted)
            assert not wide.live[name, kind][TOKENS:].any()


def test_fewer_padding_rows_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path, [rank(vocabulary=24)])
    narrow = rank(vocabulary=20)
    plan = plan_of(narrow, folder, vocab_size=18)
    assert not any(fill.padded for fill in plan.fills)
    fill(plan)
    wanted = global_values(ShardKey(HEAD, "model"), (24, HIDDEN), "model", torch.float32)
    assert torch.equal(narrow.live[HEAD, "model"], wanted[:20])


def test_another_vocabulary_is_refused(one: Rank, tmp_path: Path) -> None:
    folder = save(tmp_path, [rank(vocabulary=24)])
    words = "the vocabularies seem to differ by more than padding"
    assert words in refusal(one, folder)
    assert f"{words} (vocab_size is 22)" in refusal(one, folder, vocab_size=22)


def test_weights_come_from_main_parameters_if_nothing_else_is_stored(one: Rank, tmp_path: Path) -> None:
    folder = save(tmp_path, [one], files_of([one], kinds=("param",)), contents=("optimizer",))
    plan = plan_of(one, folder, load_contents=("model",))
    assert {read.stored.key.kind for fill in plan.fills for read in fill.reads} == {"param"}
    assert len(plan.model_fills) == len(plan.manifest.tensors)


@pytest.mark.parametrize(
    ("dtypes", "wanted"), [((torch.bfloat16, torch.float32), "param"), ((torch.float32, torch.float32), "model")]
)
def test_main_parameters_are_preferred_to_weights_of_another_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], wanted: str, one: Rank, tmp_path: Path
) -> None:
    """They are more precise."""
    folder = save(tmp_path, [one], files_of([one], dtype=dtypes[0]))
    plan = plan_of(one, folder, load_contents=("model",))
    assert {read.stored.key.kind for fill in plan.model_fills for read in fill.reads} == {wanted}
    assert {fill.rounding for fill in plan.model_fills} == {None}


def to_bf16(model: torch.nn.Module) -> None:
    model.bfloat16()


def test_rounded_weights_are_said_unless_their_main_parameters_are_loaded(stored: Path) -> None:
    narrow = rank(change=to_bf16)
    plan = plan_of(narrow, stored, load_contents=("model",))
    assert {fill.rounding for fill in plan.fills} == {"model: float32 to bfloat16"}
    text = refusal(narrow, stored, load_contents=("model",), strict_dtypes=True)
    assert "strict_dtypes is set, but this load would round values: model: float32 to bfloat16" in text
    narrow.optimizer.__class__ = Float16OptimizerWithFloat16Params
    parameters = narrow.inner.param_groups[0]["params"]
    mains = [torch.nn.Parameter(parameter.float()) for parameter in parameters]
    narrow.optimizer.float16_groups, narrow.optimizer.fp32_from_float16_groups = [parameters], [mains]
    narrow.optimizer.fp32_from_fp32_groups = []
    narrow.optimizer.optimizer = torch.optim.Adam(mains)
    plan = plan_of(narrow, stored)
    assert {fill.rounding for fill in plan.fills} == {None}
    (planned,) = plan.parts
    assert len(planned.mains) == len(plan.model_fills)


def freeze(*names: str) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in names)

    return change


def test_a_frozen_weight_that_is_rounded_is_said(one: Rank, stored: Path) -> None:
    """It has no main parameter."""

    def change(model: torch.nn.Module) -> None:
        freeze(NORM)(model)
        dict(model.named_parameters())[NORM].data = torch.zeros(HIDDEN, dtype=torch.bfloat16)

    frozen = rank(change=change)
    plan = plan_of(frozen, stored)
    assert {fill.rounding for fill in plan.fills} == {None, "model: float32 to bfloat16"}
    assert [fill.rounding for fill in plan.fills].count("model: float32 to bfloat16") == 1


def test_frozen_weights_are_left_out_if_asked_for(stored: Path) -> None:
    frozen = rank(change=freeze(NORM, EMBEDDING))
    everything, some = (plan_of(frozen, stored, load_contents=("model",), skip_frozen=skip) for skip in (False, True))
    assert len(everything.model_fills) - len(some.model_fills) == 2
    assert some.used == everything.used, "the model has them, so nothing is lost"


# -- what does not fit -------------------------------------------------------------------------------------

ONE_RANK = r"\(saved on 1 ranks \(tp=1, pp=1, cp=1, dp=1\), this is 1 ranks \(tp=1, pp=1, cp=1, dp=1\)\)"


def test_a_missing_weight_is_refused_with_its_file_and_both_layouts(one: Rank, tmp_path: Path) -> None:
    folder = save(tmp_path, [one], files_of([one], left_out=[NORM]))
    text = refusal(one, folder)
    wanted = rf"{re.escape(str(folder))}: {MODEL_FILE}: tensor {NORM}: wanted global shape \[16\], found no such tensor"
    assert re.match(wanted, text)
    assert re.search(ONE_RANK + "$", text)
    assert "skip_frozen" not in text
    frozen = rank(change=freeze(NORM))
    assert "set skip_frozen=True" in refusal(frozen, folder)
    everything = len(list(model_shards([one.model])))
    assert len(plan_of(frozen, folder, skip_frozen=True).model_fills) == everything - 1


def test_a_tensor_of_another_shape_is_refused(one: Rank, tmp_path: Path) -> None:
    folder = save(tmp_path, [rank(hidden=24)])
    text = refusal(one, folder)
    assert "found global shape [" in text
    assert "build the model that was saved, with the same sizes" in text


def test_an_integer_tensor_is_refused(one: Rank, tmp_path: Path) -> None:
    files = files_of([one], left_out=[NORM])
    files[MODEL_FILE].append(shard(NORM, torch.zeros(HIDDEN, dtype=torch.int64)))
    folder = save(tmp_path, [one], files)
    assert f"{MODEL_FILE}: tensor {NORM}: wanted dtype torch.float32, found torch.int64" in refusal(
        one, folder, load_contents=("model",)
    )


@pytest.mark.parametrize(
    ("asked", "lacks"), [(("model", "optimizer"), "optimizer"), (("model", "extra"), "extra"), (("model",), "")]
)
def test_what_a_checkpoint_lacks_cannot_be_asked_for(
    asked: tuple[str, ...], lacks: str, one: Rank, tmp_path: Path
) -> None:
    folder = save(tmp_path, [one], files_of([one], kinds=("model",)), contents=("model",))
    if not lacks:
        plan_of(one, folder, load_contents=asked)
        return
    words = f"load_contents names {lacks}, but the checkpoint has only model: leave out the missing words"
    assert words in refusal(one, folder, load_contents=asked)


def test_no_folder(one: Rank, tmp_path: Path) -> None:
    refusal(one, tmp_path / "nowhere", CheckpointNotFoundError)


def test_a_weight_without_memory_is_refused(stored: Path) -> None:
    offloaded = rank()
    dict(offloaded.model.named_parameters())[NORM].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=rf"^tensor {NORM} has no memory .* before load\(\)$"):
        plan_load(offloaded.trainer(load_contents=("model",)), LocalFolder(stored))


@pytest.mark.parametrize(
    ("contents", "kind", "reason"),
    [
        (("model",), "", "wanted no such tensor"),
        (("model", "optimizer"), "", "wanted no such tensor"),
        (("optimizer",), " (param)", "wanted no such state, because no rank trains the parameter (is it frozen now?)"),
    ],
)
def test_a_tensor_that_nobody_takes_is_refused(
    contents: tuple[str, ...], kind: str, reason: str, one: Rank, tmp_path: Path
) -> None:
    folder = save(tmp_path, [rank(layers=2)])
    plan = plan_of(one, folder, load_contents=contents)
    with pytest.raises(CheckpointMismatchError) as caught:
        check_all_used(one.trainer(load_contents=contents), plan, [plan.used, plan.used])
    text = str(caught.value)
    file = OPTIMIZER_FILE if kind else MODEL_FILE
    start = rf"{re.escape(f'{folder}: {file}: tensor ')}decoder\.layers\.1\.\S+"
    assert re.match(start + re.escape(f"{kind}: {reason}"), text)
    assert re.search(rf", found global shape \[.*\] {ONE_RANK}: build the model that was saved, or leave '", text)
    assert f"leave {contents[-1] if kind else 'model'!r} out of load_contents" in text
    # Another rank takes what this one leaves.
    rest = [(0, len(plan.manifest.tensors) - 1)]
    check_all_used(one.trainer(load_contents=contents), plan, [plan.used, {"model": rest, "optimizer": rest}])


def test_state_of_a_parameter_that_is_frozen_now_is_not_lost_silently(stored: Path) -> None:
    frozen = rank(change=freeze(NORM))
    plan = plan_of(frozen, stored)
    words = rf"{OPTIMIZER_FILE}: tensor {NORM} \(param\): wanted no such state, .* or leave 'optimizer' out of "
    with pytest.raises(CheckpointMismatchError, match=words):
        check_all_used(frozen.trainer(), plan, [plan.used])
    check_all_used(frozen.trainer(load_contents=("model",)), plan, [plan.used])


# -- other models, and adapters ----------------------------------------------------------------------------


def test_a_model_that_computes_something_else_is_told_or_refused(one: Rank, tmp_path: Path) -> None:
    facts = {"num_attention_heads": 4, "layernorm_epsilon": 1e-5}
    folder = save(tmp_path, [one], model=facts)
    live = facts | {"num_attention_heads": 2}
    assert plan_of(one, folder, model=facts).other_model == ()
    (found,) = plan_of(one, folder, model=live).other_model
    assert (found.name, found.saved, found.live) == ("num_attention_heads", 4, 2)
    text = refusal(one, folder, model=live, strict_model=True)
    assert "num_attention_heads is 4 in the checkpoint and 2 here: build the model as it was" in text


@pytest.mark.parametrize(
    ("saved", "live", "contents", "is_refused"),
    [
        (16.0, 32.0, ("model",), True),
        (16.0, 16.0, ("model",), False),
        (16.0, 32.0, ("optimizer",), False),
        (None, 32.0, ("model",), False),
    ],
)
def test_adapters_of_another_scale_are_refused(
    saved: float | None, live: float, contents: tuple[str, ...], is_refused: bool, one: Rank, tmp_path: Path
) -> None:
    adapter = "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"
    files = files_of([one])
    files[MODEL_FILE].append(shard(adapter, torch.zeros(2, HIDDEN)))
    settings = None if saved is None else AdapterSettings(saved)
    folder = save(tmp_path, [one], files, adapters=settings)
    config: Any = {"adapters": AdapterSettings(live), "load_contents": contents}
    if is_refused:
        words = f"the saved adapters have alpha {saved:g}, but the model's adapters have alpha {live:g}: give the "
        assert words in refusal(one, folder, **config)
    else:
        plan_of(one, folder, **config)


# -- small state -------------------------------------------------------------------------------------------


def test_another_layout_starts_the_generators_from_the_seed(one: Rank, tmp_path: Path) -> None:
    """Of tensor-parallel rank 0, on all."""
    ranks = [rank(2, number) for number in range(2)]
    folder = save(tmp_path, ranks)
    plan = plan_of(one, folder, load_contents=("extra",))
    assert (plan.rng, plan.seed, plan.extra_state) == (None, int.from_bytes(bytes([7] * 8), "little"), {"rank": 0})
    again = plan_of(ranks[1], folder, load_contents=("extra",))
    assert (again.seed, again.extra_state) == (None, {"rank": 1})
    assert again.rng is not None


def test_all_tensor_parallel_ranks_start_from_one_seed(tmp_path: Path) -> None:
    """That of tensor-parallel rank 0, because outside megatron's tracker they must draw equal numbers."""
    ranks = [rank(2, number) for number in range(2)]
    other = {file_names.rng_file(0, 1, 0, 0): {"torch": torch.full((16,), 9, dtype=torch.uint8)}}
    folder = save(tmp_path, ranks, plain=plain_of(ranks) | other)
    of = ranks[1].trainer(load_contents=("extra",))
    plan = plan_load(replace(of, topology=replace(of.topology, ep=2)), LocalFolder(folder))
    assert (plan.rng, plan.seed) == (None, int.from_bytes(bytes([7] * 8), "little"))


def test_a_resharded_checkpoint_has_only_the_seed(one: Rank, tmp_path: Path) -> None:
    folder = save(tmp_path, [one], plain=plain_of([one]) | {RNG: {"seed": 1234}})
    plan = plan_of(one, folder, load_contents=("extra",))
    assert (plan.rng, plan.seed) == (None, 1234)


def test_a_checkpoint_without_extra_state(one: Rank, tmp_path: Path) -> None:
    plain = plain_of([one])
    del plain[EXTRA]
    folder = save(tmp_path, [one], plain=plain)
    assert plan_of(one, folder, load_contents=("extra",)).extra_state is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({TYPE: "nonsense"}, "extra_state cannot be read: "),
        (to_stored(deque([1]), ""), "extra_state cannot be read: it is a deque, not a dict"),
    ],
)
def test_extra_state_that_makes_no_sense_is_damage(
    value: dict[str, Any], words: str, one: Rank, tmp_path: Path
) -> None:
    folder = save(tmp_path, [one], plain=plain_of([one]) | {EXTRA: value})
    text = refusal(one, folder, CheckpointCorruptError, load_contents=("extra",))
    assert text.startswith(f"{folder}/{EXTRA}: {words}")


def test_an_optimizer_of_another_kind_is_refused_or_starts_anew(one: Rank, tmp_path: Path) -> None:
    other = {"kind": "SGD", "param_groups": [{"lr": 0.5}], "step": None, "grad_scaler": None}
    files = files_of([one], kinds=("model", "param", "momentum_buffer"))
    folder = save(tmp_path, [one], files, plain=plain_of([one], optimizers=[other]))
    text = refusal(one, folder)
    assert "optimizer: wanted the state of Adam, found that of SGD: set reset_moments=True" in text
    plan = plan_of(one, folder, reset_moments=True)
    assert all(not planned.state for planned in plan.parts)
    assert len(plan.newly_started) == len(plan.manifest.tensors)


def test_new_moments_are_for_all_ranks_if_one_needs_them(one: Rank, tmp_path: Path) -> None:
    files = files_of([one])
    files[OPTIMIZER_FILE] = [write for write in files[OPTIMIZER_FILE] if write.key.kind != "exp_avg"]
    folder = save(tmp_path, [one], files)
    assert "wanted exp_avg and exp_avg_sq of Adam, found exp_avg_sq: set reset_moments=True" in refusal(one, folder)
    plan = plan_of(one, folder, reset_moments=True)
    assert plan.new_moments == [0]
    anew = plan.with_new_moments([0])
    assert [len(planned.state) for planned in anew.parts] == [0]
    assert anew.common is not None
    assert [(state.step, state.starts_anew) for state in anew.common.optimizers] == [(None, True)]
    assert len(anew.newly_started) == len(plan.manifest.tensors)
    assert plan.with_new_moments([]) is plan


def test_new_moments_of_a_sound_part(one: Rank, stored: Path) -> None:
    """Another rank has found that they are needed."""
    plan = plan_of(one, stored)
    anew = plan.with_new_moments([0])
    assert (len(plan.parts[0].state) > 0, anew.parts[0].state) == (True, ())
    model_alone = plan_of(one, stored, load_contents=("model",))
    assert model_alone.with_new_moments([0]) is model_alone


def test_param_groups_that_rank_0_has_found(one: Rank, stored: Path) -> None:
    plan = plan_of(one, stored)
    assert plan.common is not None
    found = plan.with_groups(plan.common.groups.decide([plan.common.groups.to_record()]))
    assert found.common is not None
    ((group,),) = [state.param_groups or () for state in found.common.optimizers]
    assert group is not None
    assert group["lr"] == 0.5
    assert found.common.changes.kept == ()


# -- files -------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("name", [MODEL_FILE, OPTIMIZER_FILE, file_names.COMMON_FILE, RNG, EXTRA])
def test_a_missing_or_cut_file_is_found_by_the_plan(
    name: str, damage: Callable[[Path], object], one: Rank, tmp_path: Path
) -> None:
    folder = save(tmp_path, [one])
    damage(folder / name)
    assert str(folder / name) in refusal(one, folder, CheckpointCorruptError)


def test_only_files_that_are_read_must_be_there(one: Rank, tmp_path: Path) -> None:
    folder = save(tmp_path, [one])
    (folder / OPTIMIZER_FILE).unlink()
    plan_of(one, folder, load_contents=("model",))


def test_the_files_of_upper_halves_must_be_there(one: Rank, tmp_path: Path) -> None:
    """The values of lower halves follow from the model's files, too, which this load reads for nothing else."""
    files = files_of([one], dtype=torch.bfloat16)
    for number, write in enumerate(files[OPTIMIZER_FILE]):
        if write.key.kind == "param":
            whole = global_values(write.key, write.region.global_shape, "param", torch.float32)
            upper, lower = (half.view(whole.shape) for half in split_halves(whole.view(-1)))
            coding = Coding("int16", upper="model")
            files[OPTIMIZER_FILE][number] = shard(write.key.name, lower, "param", coding=coding)
            at = [each.key.name for each in files[MODEL_FILE]].index(write.key.name)
            files[MODEL_FILE][at] = shard(write.key.name, upper)
    folder = save(tmp_path, [one], files)
    plan = plan_of(one, folder, load_contents=("optimizer",))
    fill(plan)
    wanted = global_values(ShardKey(NORM, "param"), (HIDDEN,), "param", torch.float32)
    assert torch.equal(one.live[NORM, "model"], wanted)
    cut(folder / MODEL_FILE)
    assert str(folder / MODEL_FILE) in refusal(one, folder, CheckpointCorruptError, load_contents=("optimizer",))


# -- replicas, and opaque state ------------------------------------------------------------------------------


def test_replicated_weights_are_read_by_one_rank(one: Rank, stored: Path) -> None:
    trainer = replace(one.trainer(load_replicas="broadcast"), replicas=Replicas((0, 1)))
    plan = plan_load(trainer, LocalFolder(stored))
    assert {fill.replicas for fill in plan.fills} == {(0, 1)}


def test_weights_that_follow_from_main_parameters_are_not_sent_to_replicas(stored: Path) -> None:
    """A replica's weights, which are sent last, would undo how main parameters have changed those here."""
    mine = rank()
    parameters = mine.inner.param_groups[0]["params"]
    mine.optimizer.optimizer = FusedAdam(parameters, master_weights=True, store_param_remainders=True)
    trainer = replace(mine.trainer(load_replicas="broadcast"), replicas=Replicas((0, 1)))
    plan = plan_load(trainer, LocalFolder(stored))
    assert {fill.replicas for fill in plan.model_fills} == {()}
    assert {fill.replicas for part in plan.parts for fill in part.state} == {(0, 1)}


class QuantizedTensor(torch.Tensor):
    """By this name a weight in 8 bits is known."""


def test_quantized_weights_are_filled_through_their_main_parameters(stored: Path) -> None:
    mine = rank(change=quantize(NORM))
    weight = dict(mine.model.named_parameters())[NORM]
    main = torch.nn.Parameter(torch.zeros(HIDDEN))
    mine.optimizer.__class__ = Float16OptimizerWithFloat16Params
    rest = [parameter for parameter in mine.model.parameters() if parameter is not weight]
    mine.optimizer.float16_groups, mine.optimizer.fp32_from_float16_groups = [[weight]], [[main]]
    mine.optimizer.fp32_from_fp32_groups = [rest]
    mine.optimizer.optimizer = torch.optim.Adam([main, *rest])
    alone = plan_of(mine, stored, load_contents=("model",))
    everything = len(model_shards([mine.model]))
    assert len(alone.model_fills) == everything
    (fill_of_main,) = (each for each in alone.model_fills if each.target() is main)
    assert fill_of_main.encode is None
    with_optimizer = plan_of(mine, stored)
    assert len(with_optimizer.model_fills) == everything - 1, "the optimizer's plan fills it"
    assert [each.target() is main for part in with_optimizer.parts for each in part.mains] == [True]


def test_quantized_weights_without_an_optimizer(stored: Path) -> None:
    mine = rank(change=quantize(NORM))
    plan = plan_load(replace(mine.trainer(load_contents=("model",)), optimizer=None), LocalFolder(stored))
    assert [each.encode is not None for each in plan.model_fills].count(True) == 1


def quantize(name: str) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        module, _, last = name.rpartition(".")
        weight = torch.nn.Parameter(torch.zeros(HIDDEN).as_subclass(QuantizedTensor))
        setattr(model.get_submodule(module), last, weight)

    return change


class Opaque(torch.nn.Module):
    """A module with `_extra_state`, as transformer-engine's have, and a buffer."""

    def __init__(self, state: torch.Tensor | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("counts", torch.zeros(2))
        self.state = state

    def get_extra_state(self) -> torch.Tensor | None:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return sharded_state_dict(self)


def opaque_plan(
    folder: Path, stored_state: torch.Tensor | None, more: Sequence[TensorWrite] = ()
) -> tuple[Opaque, Callable[[], LoadPlan]]:
    writes = [shard("weight", torch.ones(3)), shard("counts", torch.ones(2)), *more]
    if stored_state is not None:
        writes.append(shard("_extra_state", stored_state, "opaque"))
    saved = checkpoint(folder / "actor", {MODEL_FILE: writes}, contents=("model",))
    module = Opaque(torch.zeros(4, dtype=torch.uint8))
    return module, lambda: plan_load(lone_trainer(module, None, load_contents=("model",)), LocalFolder(saved))


def test_extra_state_of_a_module_is_restored_once_it_is_read(tmp_path: Path) -> None:
    """Of any size."""
    wanted = torch.arange(9, dtype=torch.uint8)
    module, planned = opaque_plan(tmp_path, wanted)
    plan = planned()
    assert module.state is not None
    assert module.state.tolist() == [0] * 4
    fill(plan)
    assert torch.equal(module.state, wanted)


def test_extra_state_that_the_saved_layers_did_not_have(tmp_path: Path) -> None:
    _, planned = opaque_plan(tmp_path / "none", None)
    assert len(planned().fills) == 2
    other = shard("decoder.layers.0.mlp._extra_state", torch.zeros(2, dtype=torch.uint8), "opaque")
    _, planned = opaque_plan(tmp_path / "others", None, [other])
    words = r"tensor _extra_state \(opaque\): wanted 4 bytes, found no such tensor"
    with pytest.raises(CheckpointMismatchError, match=words):
        planned()


def test_a_layer_without_extra_state_wants_none(tmp_path: Path) -> None:
    """Although others of the checkpoint have some."""
    other = shard("decoder.layers.0.mlp._extra_state", torch.zeros(2, dtype=torch.uint8), "opaque")
    module, planned = opaque_plan(tmp_path, None, [other])
    module.state = torch.zeros(0, dtype=torch.uint8)
    assert len(planned().fills) == 2


def test_a_buffer_that_is_rounded_is_said(tmp_path: Path) -> None:
    """It has no main parameter either."""
    module = Opaque(None)
    writes = [shard("weight", torch.ones(3).double()), shard("counts", torch.ones(2).double())]
    moments = [shard("weight", torch.ones(3), kind) for kind in ("param", *MOMENTS)]
    one_group = plain_of([])[file_names.COMMON_FILE]
    folder = checkpoint(
        tmp_path / "actor",
        {MODEL_FILE: writes, OPTIMIZER_FILE: moments},
        plain={file_names.COMMON_FILE: one_group},
        contents=("model", "optimizer"),
    )
    trainer = lone_trainer(module, adam_of(module), load_contents=("model", "optimizer"))
    plan = plan_load(trainer, LocalFolder(folder))
    roundings = {fill.target().numel(): fill.rounding for fill in plan.model_fills}
    assert roundings == {3: None, 2: "model: float64 to float32"}


def test_extra_state_that_nobody_takes_is_not_refused(tmp_path: Path) -> None:
    """The transformer-engine spec has such state where the local one has none."""
    other = shard("decoder.layers.0.mlp._extra_state", torch.zeros(2, dtype=torch.uint8), "opaque")
    module, planned = opaque_plan(tmp_path, torch.zeros(4, dtype=torch.uint8), [other])
    plan = planned()
    check_all_used(lone_trainer(module, None, load_contents=("model",)), plan, [plan.used])
