"""Checkpoints of old verl and of megatron's dist_checkpointing, loaded into a live training."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from mcore_ckpt.load import foreign, live_training
from tests.distributed import refusals
from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import manager_of
from tests.distributed.foreign_checkpoints import STEP, save_as, save_torch_dist, save_verl_ranks, seed_replicas_alike
from tests.distributed.global_state import assert_same_state, global_state
from tests.distributed.layouts import HAS_HYBRID, LAYOUTS
from tests.distributed.refusals import assert_names
from tests.distributed.snapshot import Snapshot, assert_same, poison, snapshot
from tests.distributed.tiers import marks, pairs
from tests.distributed.training import Layout, Training, build, parallel, train

END = STEP + 2
BOTH_TYPES = ("dp_reshardable", "fully_reshardable")
FORMATS = ("verl_ranks", *BOTH_TYPES)
NAMES = (
    "plain",
    "mtp",
    "dp2-bf16",
    "dp2-fp16",
    "dp2-overlap",
    "pp2-tied-bf16",
    "pp2-vpp2",
    "tp2",
    "ep2",
    "cp2",
    "dp2-expert-bias",
    "tp2-pp2",
    "pp2-vpp2-dp2",
    "ep2-dp4",
    "tp2-ep2-etp1",
    "dp4-two-instances",
    "tower-tp2",
    "tower-megatron-tp2",
    "tower-pp2-vpp2",
    *(("hybrid", "pp2-vpp2-hybrid") if HAS_HYBRID else ()),
)


# Each format with each kind of optimizer that it keeps in a way of its own, and with each way to cut a model.
IN_CI = {
    ("mtp", "verl_ranks"),
    ("dp2-bf16", "verl_ranks"),
    ("dp2-fp16", "fully_reshardable"),
    ("pp2-tied-bf16", "verl_ranks"),
    ("pp2-vpp2", "fully_reshardable"),
    ("tower-megatron-tp2", "fully_reshardable"),
    ("ep2", "verl_ranks"),
    ("ep2", "dp_reshardable"),
    ("dp2-expert-bias", "fully_reshardable"),
}


def write(form: str, training: Training, folder: Path) -> None:
    if form == "verl_ranks":
        save_verl_ranks(training, folder)
    else:
        save_torch_dist(training, folder, form)


def load(
    training: Training,
    folder: Path,
    prepare: Callable[[CheckpointManager], None] = lambda manager: None,
    **config: Any,
) -> Any:
    manager = manager_of(training, folder.parent / "unused", **config)
    try:
        prepare(manager)
        return manager.load(path=folder)
    finally:
        manager.close()


def _attach_parts(manager: CheckpointManager) -> None:
    manager.attach("optional", load=lambda part: None, optional=True)
    if dist.get_rank() == 1:
        manager.attach("needed", load=lambda part: None)


def without(entries: Snapshot, *words: str) -> Snapshot:
    return {name: value for name, value in entries.items() if not any(word in name for word in words)}


def refused(training: Training, folder: Path, expected: type[CheckpointError], **config: Any) -> list[str]:
    return refusals.refused(training, lambda: load(training, folder, **config), expected)


def formats(names: tuple[str, ...], forms: tuple[str, ...] = FORMATS) -> list[Any]:
    return [
        pytest.param(name, form, id=f"{name}-{form}", marks=marks(LAYOUTS[name].world, (name, form) in IN_CI))
        for name in names
        for form in forms
        # No verl that wrote a file per rank had HybridModel.
        if not mixes_buckets_up(name, form) and not (form == "verl_ranks" and LAYOUTS[name].pattern)
    ]


def mixes_buckets_up(name: str, form: str) -> bool:
    """What megatron itself saves wrong: see test_buckets_that_megatron_mixes_up."""
    layout = LAYOUTS[name]
    # A tied embedding under pipeline parallelism has a bucket of its own (_ParamAndGradBuffer, 0.16.1).
    return form == "fully_reshardable" and (
        layout.bucket_size is not None or (layout.tied_embeddings and layout.pp > 1)
    )


@pytest.mark.parametrize(("name", "form"), formats(NAMES))
def test_resumed_training_is_bit_identical(name: str, form: str, shared_path: Path) -> None:
    layout = LAYOUTS[name]
    # verl never saved the gradient scaler: what it does not hold cannot be compared.
    lost = ("scaler",) if form == "verl_ranks" else ()
    folder = shared_path / f"global_step_{STEP}" / "actor"
    with parallel(layout):
        first = build(layout, seed=1)
        if form != "verl_ranks":
            seed_replicas_alike()
        train(first, 0, STEP)
        saved = snapshot(first)
        write(form, first, folder)
        reference = train(first, STEP, END)
        at_end = snapshot(first)

        second = build(layout, seed=2)
        result = load(second, folder, assume_optimizer_step=int(steps_done(saved)))
        loaded = snapshot(second)
        with everywhere():
            assert (result.step, result.extra_state) == (STEP, None)
            assert result.report.nbytes > 0
            assert_same(without(loaded, *lost), without(saved, *lost))
        if lost and layout.precision == "fp16":
            return
        resumed = train(second, STEP, END)
        finally_ = snapshot(second)
        with everywhere():
            assert resumed == reference
            assert_same(finally_, at_end)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("form", "wanted"),
    [("verl_ranks", {"writers", "buckets"}), ("dp_reshardable", {"buckets"}), ("fully_reshardable", set())],
)
def test_only_what_a_form_needs_is_looked_for(
    form: str, wanted: set[str], shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def noting(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: asked.add(word) or function(*arguments)

    monkeypatch.setattr(foreign, "find_writers", noting("writers", foreign.find_writers))
    monkeypatch.setattr(live_training, "_bucket_ranges", noting("buckets", live_training._bucket_ranges))
    folder = shared_path / f"global_step_{STEP}" / "actor"
    with parallel(LAYOUTS["plain"]):
        training = build(LAYOUTS["plain"], seed=1)
        train(training, 0, STEP)
        write(form, training, folder)
        load(training, folder, assume_optimizer_step=STEP)
    assert asked == wanted


def steps_done(entries: Snapshot) -> float:
    """By the optimizer: with a gradient scaler some steps are skipped."""
    counts: list[float] = [max(float(value) for name, value in entries.items() if name.endswith(".step"))]
    dist.broadcast_object_list(counts, src=0)
    return counts[0]


@pytest.mark.parametrize(
    ("name", "form"), formats(("plain", "dp2-bf16", "dp2-buckets"), ("verl_ranks", "dp_reshardable"))
)
def test_into_a_training_that_has_stepped(name: str, form: str, shared_path: Path) -> None:
    layout = LAYOUTS[name]
    with parallel(layout):
        first = build(layout, seed=1)
        seed_replicas_alike()
        train(first, 0, STEP)
        saved = snapshot(first)
        write(form, first, shared_path / "saved")

        second = build(layout, seed=2)
        train(second, 50, 52)
        poison_what_the_format_holds(second, form)
        load(second, shared_path / "saved", assume_optimizer_step=STEP)
        loaded = snapshot(second)
        with everywhere():
            assert_same(loaded, saved)


def poison_what_the_format_holds(training: Training, form: str) -> None:
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in training.optimizer.param_groups
    ]
    poison(training)
    if form == "verl_ranks":
        for group, values in zip(training.optimizer.param_groups, groups, strict=True):
            group.update(values)


# -- parts of a checkpoint ---------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("form", FORMATS)
def test_model_alone(form: str, shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No step count is asked for, and main parameters follow. What a training has attached stays as it is."""
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        write(form, first, shared_path / "saved")
        saved = weights(first)

        second = build(layout, seed=2)
        train(second, 0, 1)
        load(second, shared_path / "saved", _attach_parts, load_contents=("model",))
        loaded = weights(second)
        with everywhere():
            assert_same(loaded, saved)
            told = "is a checkpoint of another program and has no parts, so these parts stay as they are: 'needed'"
            assert [text.endswith(told) for text in caplog.messages].count(True) == (dist.get_rank() == 0)
        # A step of rate zero changes nothing but what main parameters write to the model.
        for group in second.optimizer.param_groups:
            group["max_lr"] = group["min_lr"] = group["lr"] = 0.0
        train(second, 1, 2)
        loaded = weights(second)
        with everywhere():
            assert_same(loaded, saved)


@pytest.mark.world(2)
@pytest.mark.parametrize("form", FORMATS)
def test_optimizer_alone_brings_the_model_along(form: str, shared_path: Path) -> None:
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        write(form, first, shared_path / "saved")
        saved = snapshot(first)

        second = build(layout, seed=2)
        load(second, shared_path / "saved", load_contents=("optimizer",), assume_optimizer_step=STEP)
        loaded = snapshot(second)
        with everywhere():
            assert_same(without(loaded, "generator"), without(saved, "generator"))


def weights(training: Training) -> Snapshot:
    return {name: value for name, value in snapshot(training).items() if name.startswith("chunk")}


@pytest.mark.world(2)
def test_torch_dist_without_weights(shared_path: Path) -> None:
    """As verl writes it beside HuggingFace weights: the optimizer must be that of the weights already loaded."""
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        folder = shared_path / "global_step_3" / "actor"
        save_torch_dist(first, folder / "model" / "dist_ckpt", "dp_reshardable")
        save_torch_dist(first, folder / "optimizer" / "dist_ckpt", "dp_reshardable", model={})
        saved = snapshot(first)

        second = build(layout, seed=2)
        result = load(second, folder)
        loaded = snapshot(second)
        with everywhere():
            assert result.step == STEP
            assert_same(without(loaded, "generator"), without(saved, "generator"))

        only = shared_path / "optimizer_only"
        with everywhere():
            if dist.get_rank() == 0:
                shutil.copytree(folder / "optimizer", only / "optimizer")
        third = build(layout, seed=3)
        contents = ("optimizer",)
        assert_names(
            refused(third, only, CheckpointMismatchError, load_contents=contents), "model's present", "weights"
        )
        load(third, folder, load_contents=("model",))
        load(third, only, load_contents=contents)
        loaded = snapshot(third)
        with everywhere():
            assert_same(without(loaded, "generator"), without(saved, "generator"))


# -- another layout ----------------------------------------------------------------------------------------

ACROSS = [
    ("tp2", Layout(2, pp=2)),
    ("pp2-vpp2", Layout(2, num_layers=4)),
    ("dp2-bf16", Layout(2, tp=2, precision="bf16")),
    ("ep2", Layout(2, experts=4)),
    ("tp2-pp2", Layout(4, pp=2)),
    ("ep2-dp4", Layout(4, experts=4, ep=4)),
    ("pp2-dp2-uneven", Layout(4, tp=2, num_layers=5)),
]


@pytest.mark.parametrize(
    ("name", "other"),
    [pytest.param(name, other, id=name, marks=marks(other.world, name in ("tp2", "ep2"))) for name, other in ACROSS],
)
def test_fully_reshardable_under_another_layout(name: str, other: Layout, shared_path: Path) -> None:
    there_and_back(LAYOUTS[name], other, "fully_reshardable", shared_path)


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("form", "precision"),
    [
        *(
            pytest.param(form, precision, marks=pytest.mark.full)
            for form, precision in [
                ("fully_reshardable", "bf16"),
                ("fully_reshardable", "fp32"),
                ("dp_reshardable", "fp32"),
                ("dp_reshardable", "bf16"),
            ]
        ),
    ],
)
def test_sharded_over_another_number_of_replicas(precision: Any, form: str, shared_path: Path) -> None:
    """Over two of the four replicas, and over all four."""
    layout = replace(LAYOUTS["dp4-two-instances"], precision=precision)
    there_and_back(layout, replace(layout, optimizer_instances=1), form, shared_path)


def there_and_back(layout: Layout, other: Layout, form: str, root: Path) -> None:
    """What has been through another layout is what it was."""
    contents = ("model", "optimizer")
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        save_torch_dist(first, root / "first", form)
        saved = snapshot(first)
    with parallel(other):
        second = build(other, seed=2)
        load(second, root / "first", load_contents=contents)
        save_torch_dist(second, root / "second", form)
        train(second, STEP, STEP + 1)
    with parallel(layout):
        third = build(layout, seed=3)
        load(third, root / "second", load_contents=contents)
        loaded = snapshot(third)
        with everywhere():
            # The rows that pad the vocabulary are new in each layout.
            lost = ("generator", *(padded(loaded) if layout.padded_vocab_size != other.padded_vocab_size else ()))
            assert_same(without(loaded, *lost), without(saved, *lost))


def padded(entries: Snapshot) -> list[str]:
    """The entries whose size is the vocabulary's, which pads otherwise; and the optimizer's, where places move."""
    return [name for name in entries if "word_embeddings" in name or "output_layer" in name or name.startswith("opt")]


@pytest.mark.world(2)
def test_model_of_dp_reshardable_under_another_layout(shared_path: Path) -> None:
    layout, other = LAYOUTS["tp2"], Layout(2, pp=2)
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        save_torch_dist(first, shared_path / "saved", "dp_reshardable")
    with parallel(other):
        second = build(other, seed=2)
        messages = refused(second, shared_path / "saved", CheckpointMismatchError, load_contents=("model", "optimizer"))
        assert_names(messages, "dp_group_idx|bucket", "dp_reshardable|round")
        messages = refused(second, shared_path / "saved", CheckpointMismatchError)
        load(second, shared_path / "saved", load_contents=("model",))
        train(second, STEP, STEP + 1)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("saving", "loading", "patterns"),
    [
        ("tp2", Layout(2), ("saved on tp=2", "this training has tp=1, pp=1, ep=1")),
        pytest.param(
            *("tp2", Layout(2, pp=2), ("saved on tp=2", "this training has tp=1, pp=2")),
            marks=pytest.mark.full,
        ),
        ("pp2-vpp2", Layout(2, pp=2, num_layers=4), ("vpp=2", "vpp=1")),
        ("dp2-bf16", Layout(2, precision="fp32"), ("model.pt", "float32", "bfloat16")),
        ("dp2-bf16", Layout(2, precision="bf16", num_layers=3), (r"decoder\.layers\.2\.", "found no such tensor")),
        ("dp2-bf16", Layout(2, precision="bf16", num_layers=1), (r"decoder\.layers\.1\.", "wanted no such tensor")),
    ],
)
def test_verl_ranks_under_another_layout(
    saving: str, loading: Layout, patterns: tuple[str, ...], shared_path: Path
) -> None:
    with parallel(LAYOUTS[saving]):
        first = build(LAYOUTS[saving], seed=1)
        train(first, 0, 1)
        save_verl_ranks(first, shared_path / "saved")
    with parallel(loading):
        second = build(loading, seed=2)
        train(second, 0, 1)
        messages = refused(second, shared_path / "saved", CheckpointMismatchError, assume_optimizer_step=1)
        assert_names(messages, *patterns)


# -- what cannot be trusted --------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["dp2-buckets", "pp2-tied-bf16"])
def test_buckets_that_megatron_mixes_up(name: str, shared_path: Path) -> None:
    """fully_reshardable with several padded buckets (0.16 to 0.19): refused by name, and the model still loads."""
    layout = LAYOUTS[name]
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        buckets = first.model[0].buffers[0].buckets
        padded = any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buckets[:-1])
        assert any(gather(padded)), "no bucket but the last is padded: this test tests nothing"
        save_torch_dist(first, shared_path / "saved", "fully_reshardable")
        saved = weights(first)
        second = build(layout, seed=2)
        train(second, 0, 1)
        messages = refused(second, shared_path / "saved", CheckpointMismatchError)
        assert_names(messages, "main parameters do not round", "fully_reshardable", "dp_reshardable")
        load(second, shared_path / "saved", load_contents=("model",))
        loaded = weights(second)
        with everywhere():
            assert_same(loaded, saved)


@pytest.mark.world(2)
def test_optimizer_of_other_weights(shared_path: Path) -> None:
    """Of the same shapes, from another run: nothing but the values tells."""
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        for seed, name in ((1, "one"), (2, "two")):
            training = build(layout, seed)
            train(training, 0, 1)
            save_verl_ranks(training, shared_path / name)
        with everywhere():
            if dist.get_rank() == 0:
                shutil.rmtree(shared_path / "one" / "optim")
                shutil.copytree(shared_path / "two" / "optim", shared_path / "one" / "optim")
        messages = refused(training, shared_path / "one", CheckpointMismatchError, assume_optimizer_step=1)
        assert_names(messages, "do not round to the checkpoint's weights")


@pytest.mark.world(2)
def test_missing_step(shared_path: Path) -> None:
    layout = LAYOUTS["dp2-bf16"]
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        save_verl_ranks(training, shared_path / "saved")
        messages = refused(training, shared_path / "saved", CheckpointMismatchError)
        assert_names(messages, "step count", "assume_optimizer_step")


@pytest.mark.world(2)
@pytest.mark.parametrize(("form", "frozen_then"), pairs(BOTH_TYPES, (True, False)))
def test_another_frozen_layer(frozen_then: bool, form: str, shared_path: Path) -> None:
    trainable = LAYOUTS["dp2-bf16"]
    frozen = replace(trainable, frozen=r"decoder\.final_layernorm")
    saving, loading = (frozen, trainable) if frozen_then else (trainable, frozen)
    with parallel(saving):
        first = build(saving, seed=1)
        train(first, 0, 1)
        save_torch_dist(first, shared_path / "saved", form)
    with parallel(loading):
        refused(build(loading, seed=2), shared_path / "saved", CheckpointMismatchError)


@pytest.mark.world(2)
def test_ranges_of_a_distributed_optimizer_are_for_another_one(shared_path: Path) -> None:
    with parallel(LAYOUTS["dp2-bf16"]):
        first = build(LAYOUTS["dp2-bf16"], seed=1)
        train(first, 0, 1)
        save_torch_dist(first, shared_path / "saved", "dp_reshardable")
    other = LAYOUTS["dp2-bf16-replicated"]
    with parallel(other):
        messages = refused(build(other, seed=2), shared_path / "saved", UnsupportedError)
        assert_names(messages, "Float16OptimizerWithFloat16Params", "use_distributed_optimizer")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


HOSTILE = [
    ("verl_ranks", "model/mp_rank_00/model.pt"),
    ("verl_ranks", "optim/distrib_optim_pp0_tp0_cp0_dp0.pt"),
    pytest.param("verl_ranks", "rng_states/rng_states_pp0_tp0_cp0_dp1.pt", marks=pytest.mark.full),
    ("verl_ranks", "optimizer_scheduler/optimizer_scheduler.pt"),
    ("torch_dist", ".metadata"),
]


@pytest.mark.world(2)
@pytest.mark.parametrize(("kind", "file"), HOSTILE)
def test_hostile_pickle_is_not_run(kind: Any, file: str, shared_path: Path) -> None:
    trace, saved = shared_path / "it_ran", shared_path / "saved"
    with parallel(LAYOUTS["dp2-bf16"]):
        training = build(LAYOUTS["dp2-bf16"], seed=1)
        train(training, 0, 1)
        save_as(kind, training, saved)
        with everywhere():
            assert (saved / file).is_file()
            if dist.get_rank() == 0:
                payload = {"a": Hostile(trace)}
                if file == ".metadata":
                    (saved / file).write_bytes(pickle.dumps(payload))
                else:
                    torch.save(payload, saved / file)
        messages = refused(training, saved, CheckpointCorruptError, assume_optimizer_step=1)
        assert_names(messages, file.rpartition("/")[2].replace(".", r"\."))
        with everywhere():
            assert not trace.exists()


@pytest.mark.world(2)
@pytest.mark.parametrize("where", ["object", "common"])
def test_hostile_object_in_torch_dist(where: str, shared_path: Path) -> None:
    """megatron's own reader opens sharded objects without weights_only (`DefaultLoadPlanner.load_bytes`).

    What all ranks share is such an object since 0.19, and a file of its own before.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    trace = shared_path / "it_ran"
    with parallel(LAYOUTS["dp2-bf16"]):
        training = build(LAYOUTS["dp2-bf16"], seed=1)
        train(training, 0, 1)
        hostile: dict[str, Any] = {"args": Hostile(trace)}
        if where == "object":
            rng = ShardedObject("rng_state", [Hostile(trace)], (1, 1), (0, 0), replica_id=dist.get_rank())
            hostile = {"rng_state": rng}
        save_torch_dist(training, shared_path / "saved", "dp_reshardable", **hostile)
        with everywhere():
            if dist.get_rank() == 0:
                # To save what all ranks share, megatron sends it to other ranks, which runs it.
                shutil.rmtree(trace, ignore_errors=True)
        messages = refused(training, shared_path / "saved", CheckpointCorruptError)
        assert_names(messages, "rng_state" if where == "object" else "common", "more than data")
        with everywhere():
            assert not trace.exists()


@pytest.mark.world(2)
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_torch_dist(damage: str, shared_path: Path) -> None:
    with parallel(LAYOUTS["dp2-bf16"]):
        training = build(LAYOUTS["dp2-bf16"], seed=1)
        train(training, 0, 1)
        save_torch_dist(training, shared_path / "saved", "dp_reshardable")
        with everywhere():
            if dist.get_rank() == 0:
                file = max((shared_path / "saved").glob("*.distcp"), key=lambda file: file.stat().st_size)
                if damage == "missing":
                    file.unlink()
                else:
                    os.truncate(file, file.stat().st_size // 2)
        assert_names(refused(training, shared_path / "saved", CheckpointCorruptError), "cannot be read")


@pytest.mark.world(2)
def test_torch_dist_into_a_stage_with_a_copy_of_the_embedding(shared_path: Path) -> None:
    """Megatron's own sharded_state_dict fails on this stage: its MTP layers have the embedding, too."""
    same: dict[str, Any] = {"tied_embeddings": True, "mtp_layers": 1, "padded_vocab": 144}
    with parallel(Layout(2, **same)):
        first = build(Layout(2, **same), seed=1)
        train(first, 0, 1)
        save_torch_dist(first, shared_path / "saved", "dp_reshardable")
        saved = global_state(first)
    other = Layout(2, **same, pp=2)
    with parallel(other):
        second = build(other, seed=2)
        poison(second)
        load(second, shared_path / "saved", load_contents=("model",))
        found = global_state(second)
        with everywhere():
            weights = [name for name in saved if name.endswith(" model")]
            assert_same_state({name: found[name] for name in weights}, {name: saved[name] for name in weights})


@pytest.mark.world(2)
def test_folder_of_neither_kind(shared_path: Path) -> None:
    with parallel(LAYOUTS["dp2-bf16"]):
        training = build(LAYOUTS["dp2-bf16"], seed=1)
        with everywhere():
            if dist.get_rank() == 0:
                (shared_path / "saved" / "model").mkdir(parents=True)
        assert_names(refused(training, shared_path / "saved", CheckpointNotFoundError), r"manifest\.json")
