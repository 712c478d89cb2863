"""A checkpoint loads under any other layout: the same bits, and training goes on as if it had never moved."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.io import tuning
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import files_of, manager_of, save
from tests.distributed.global_state import GlobalState, assert_same_state, global_state, loss_and_norm
from tests.distributed.layouts import HAS_HYBRID, REDUCES_EXPERTS_APART
from tests.distributed.refusals import assert_names, refused
from tests.distributed.snapshot import poison
from tests.distributed.tiers import marks
from tests.distributed.training import VOCAB_SIZE, Layout, Step, Training, build, parallel, train

# The same model and the same sequences under every layout; no dropout, which draws for a rank.
SAME: dict[str, Any] = {"padded_vocab": 144, "global_batch": 4, "dropout": 0.0, "num_layers": 4}
DENSE: dict[str, Any] = SAME
# Each of four replicas needs a micro-batch of two sequences.
DENSE_4: dict[str, Any] = SAME | {"global_batch": 8}
# Four stages that interleave need four micro-batches on each of two replicas.
DENSE_8: dict[str, Any] = SAME | {"global_batch": 16, "num_layers": 8}
MOE: dict[str, Any] = SAME | {"experts": 4, "expert_bias": True}
MOE_4: dict[str, Any] = DENSE_4 | {"experts": 4, "expert_bias": True}
TIED: dict[str, Any] = SAME | {"tied_embeddings": True}
MTP: dict[str, Any] = SAME | {"mtp_layers": 1}

if REDUCES_EXPERTS_APART:
    ETP: dict[str, Layout] = {"tp2-etp1": Layout(2, **MOE, tp=2, etp=1), "etp2": Layout(2, **MOE, etp=2)}
else:
    ETP = {}

BUCKETS: dict[str, Any] = {"bucket_size": 5000, "overlap_grad_reduce": True}
UNEVEN = "E|t*2|t|tL"  # two stages, two virtual ones each; the first has no layer

FAMILIES: dict[str, dict[str, Layout]] = {
    "dense1": {
        "plain": Layout(1, **DENSE),
        "buckets": Layout(1, **DENSE, **BUCKETS),
        "replicated": Layout(1, **DENSE, distributed_optimizer=False),
    },
    "dense2": {
        "dp2": Layout(2, **DENSE, **BUCKETS),
        "dp2-replicated": Layout(2, **DENSE, distributed_optimizer=False),
        "tp2": Layout(2, **DENSE, tp=2),
        "pp2": Layout(2, **DENSE, pp=2),
        "pp2-vpp2": Layout(2, **DENSE, pp=2, vpp=2),
        "pp2-vpp2-uneven": Layout(2, **DENSE, pp=2, vpp=2, stages=UNEVEN),
        "cp2": Layout(2, **DENSE, cp=2),
    },
    "moe2": {
        "dp2": Layout(2, **MOE),
        "ep2": Layout(2, **MOE, ep=2),
        "tp2": Layout(2, **MOE, tp=2),
        "tp2-ep2-etp1": Layout(2, **MOE, tp=2, ep=2, etp=1),
        "pp2": Layout(2, **MOE, pp=2),
        **ETP,
    },
    "tied2": {"dp2": Layout(2, **TIED), "tp2": Layout(2, **TIED, tp=2), "pp2": Layout(2, **TIED, pp=2)},
    "tied-mtp2": {"dp2": Layout(2, **TIED, mtp_layers=1), "pp2": Layout(2, **TIED, mtp_layers=1, pp=2)},
    "mtp2": {"dp2": Layout(2, **MTP), "pp2": Layout(2, **MTP, pp=2)},
    "tower2": {
        "dp2": Layout(2, **SAME, tower="transformers"),
        "tp2": Layout(2, **SAME, tower="transformers", tp=2),
        "pp2": Layout(2, **SAME, tower="transformers", pp=2),
    },
    "tower-of-megatron2": {
        "dp2": Layout(2, **SAME, tower="megatron"),
        "tp2": Layout(2, **SAME, tower="megatron", tp=2),
        "pp2-vpp2": Layout(2, **SAME, tower="megatron", pp=2, vpp=2),
    },
    "bf16-2": {
        "dp2-overlap": Layout(2, **DENSE, **BUCKETS, precision="bf16", overlap_param_gather=True),
        "tp2": Layout(2, **DENSE, tp=2, precision="bf16"),
        "pp2-replicated": Layout(2, **DENSE, pp=2, precision="bf16", distributed_optimizer=False),
    },
    "dense4": {
        "tp2-pp2": Layout(4, **DENSE_4, tp=2, pp=2),
        "dp4-two-instances": Layout(4, **DENSE_4, optimizer_instances=2),
        "pp2-vpp2-dp2-uneven": Layout(4, **DENSE_4, pp=2, vpp=2, stages=UNEVEN),
        "cp2-tp2": Layout(4, **DENSE_4, cp=2, tp=2),
    },
    "deep4": {
        "tp4": Layout(4, **DENSE_8, tp=4),
        "tp2-pp2": Layout(4, **DENSE_8, tp=2, pp=2),
        "pp4-first": Layout(4, **DENSE_8, pp=4, first_stage_layers=5),
        "pp2-vpp2-dp2-uneven": Layout(4, **DENSE_8, pp=2, vpp=2, stages="Et|t*3|t|t*3L"),
    },
    "moe4": {
        "ep2-dp4": Layout(4, **MOE_4, ep=2),
        "tp2-ep2-etp1": Layout(4, **MOE_4, tp=2, ep=2, etp=1),
        "tp2-ep2-etp2": Layout(4, **MOE_4, tp=2, ep=2, etp=2),
        "pp2-ep2": Layout(4, **MOE_4, pp=2, ep=2),
    },
    "moe4-ep4": {"ep4": Layout(4, **MOE_4, ep=4), "pp2-ep2": Layout(4, **MOE_4, pp=2, ep=2)},
    "dense8": {
        "tp2-pp2-dp2": Layout(8, **DENSE_8, tp=2, pp=2),
        "tp4-cp2": Layout(8, **DENSE_8, tp=4, cp=2),
        "pp4-vpp2-dp2": Layout(8, **DENSE_8, pp=4, vpp=2),
    },
    "moe8": {
        "tp2-pp2-ep2-etp1": Layout(8, **MOE_4, tp=2, pp=2, ep=2, etp=1),
        "ep4-pp2": Layout(8, **MOE_4, ep=4, pp=2),
    },
}


# One model of every kind of layer, with other ends of pipeline stages.
HYBRID: dict[str, Any] = MOE | {"expert_bias": False, "mtp_layers": 1}
HYBRID_4: dict[str, Any] = MOE_4 | {"expert_bias": False, "mtp_layers": 1}
if HAS_HYBRID:
    FAMILIES["hybrid2"] = {
        "dp2": Layout(2, **HYBRID, pattern="M*-GE*-/*E"),
        "pp2": Layout(2, **HYBRID, pp=2, pattern="M*-|GE*-/*E"),
        "tp2": Layout(2, **HYBRID, tp=2, pattern="M*-GE*-/*E"),
        "pp2-vpp2": Layout(2, **HYBRID, pp=2, vpp=2, pattern="M|*-|G|E*-/*E"),
        "ep2": Layout(2, **HYBRID, ep=2, pattern="M*-GE*-/*E"),
    }
    FAMILIES["hybrid4"] = {
        "tp2-pp2": Layout(4, **HYBRID_4, tp=2, pp=2, pattern="M*-|GE*-/*E"),
        "pp2-ep2": Layout(4, **HYBRID_4, pp=2, ep=2, pattern="M*|-GE*-/*E"),
        "pp2-vpp2-dp2": Layout(4, **HYBRID_4, pp=2, vpp=2, pattern="M|*-G|E|*-/*E"),
        "tp2-ep2-etp1": Layout(4, **HYBRID_4, tp=2, ep=2, etp=1, pattern="M*-GE*-/*E"),
    }


def families(in_ci: Collection[str]) -> list[Any]:
    return [
        pytest.param(layouts, id=name, marks=marks(next(iter(layouts.values())).world, name in in_ci))
        for name, layouts in FAMILIES.items()
    ]


@dataclass(frozen=True)
class Saved:
    state: GlobalState
    next_step: Step


def save_and_go_on(layout: Layout, root: Path) -> Saved:
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        state = global_state(training)
        save(training, root, 2)
        return Saved(state, train(training, 2, 3)[0])


def load_poisoned(layout: Layout, root: Path, **config: Any) -> Training:
    training = build(layout, seed=2)
    poison(training)
    manager = manager_of(training, root, **config)
    manager.load()
    manager.close()
    return training


def shown(step: Step) -> list[float]:
    """Mean loss, gradient norm, and the rates."""
    return [*loss_and_norm(step), *sorted(set(step.learning_rate))]


# Each kind of cut is in one of these families. The others repeat it with fewer or more ranks, or with more layers.
@pytest.mark.parametrize("layouts", families(in_ci={"tied-mtp2", "mtp2", "bf16-2"}))
def test_every_layout_loads_the_one_before(layouts: dict[str, Layout], shared_path: Path) -> None:
    names = list(layouts)
    check_loads(layouts, {target: [names[number - 1]] for number, target in enumerate(names)}, shared_path)


@pytest.mark.parametrize("layouts", families(in_ci=()))
def test_every_layout_loads_every_other(layouts: dict[str, Layout], shared_path: Path) -> None:
    check_loads(layouts, {target: list(layouts) for target in layouts}, shared_path)


def check_loads(layouts: dict[str, Layout], sources: dict[str, list[str]], root: Path) -> None:
    """Each layout loads what `sources` names for it."""
    saved = {name: save_and_go_on(layout, root / name) for name, layout in layouts.items()}
    steps = {name: shown(each.next_step) for name, each in saved.items()}
    for target, layout in layouts.items():
        with parallel(layout):
            for source in sources[target]:
                wanted = saved[source]
                training = load_poisoned(layout, root / source)
                found = global_state(training)
                with everywhere():
                    assert_same_state(found, wanted.state)
                (step,) = train(training, 2, 3)
                after = shown(step)
                with everywhere():
                    # Context-parallel ranks attend to their own part of a sequence here: another computation.
                    if layouts[source].cp == layout.cp:
                        tolerance = 2e-2 if layout.precision == "bf16" else 2e-5
                        assert after == pytest.approx(steps[source], rel=tolerance), (source, target)


@pytest.mark.world(4)
def test_a_chain_of_layouts_returns_the_same_bytes(shared_path: Path) -> None:
    chain = [FAMILIES["moe4"][name] for name in ("ep2-dp4", "tp2-ep2-etp1", "pp2-ep2", "ep2-dp4")]
    with parallel(chain[0]):
        training = build(chain[0], seed=1)
        train(training, 0, 2)
        save(training, shared_path / "0", 2)
    for number, layout in enumerate(chain[1:]):
        with parallel(layout):
            save(load_poisoned(layout, shared_path / str(number)), shared_path / str(number + 1), 2)
    with everywhere():
        first, last = (files_of(shared_path / name / "global_steps_2" / "actor") for name in ("0", "3"))
        assert first.keys() == last.keys()
        # The generators started anew, and what the trainer hands over is each rank's own.
        differing = [path for path in first if first[path] != last[path]]
        assert all(path.startswith(("rng_states/", "extra_state/")) for path in differing), differing


@pytest.mark.world(2)
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.full), True])
def test_vocabulary_padding_follows_the_tensor_parallel_size(tied: bool, shared_path: Path) -> None:
    """131 rows and 136 are the same 131 tokens."""
    one, two = (Layout(2, **(SAME | {"padded_vocab": None}), tied_embeddings=tied, tp=tp) for tp in (1, 2))
    assert (one.padded_vocab_size, two.padded_vocab_size) == (131, 136)
    for name, saving, loading in (("more", one, two), ("fewer", two, one)):
        saved = save_and_go_on(saving, shared_path / name)
        with parallel(loading):
            training = load_poisoned(loading, shared_path / name)
            found = global_state(training)
            with everywhere():
                cut = {key: value[:VOCAB_SIZE] if is_vocabulary(key) else value for key, value in found.items()}
                wanted = {k: v[:VOCAB_SIZE] if is_vocabulary(k) else v for k, v in saved.state.items()}
                assert_same_state(cut, wanted)
                padding = [value[VOCAB_SIZE:] for key, value in found.items() if is_vocabulary(key)]
                assert not any(rows.any() for rows in padding) or name == "fewer"
            train(training, 2, 3)


def is_vocabulary(key: str) -> bool:
    return key.rsplit(" ", 1)[0].endswith(("word_embeddings.weight", "output_layer.weight"))


@pytest.mark.world(2)
@pytest.mark.parametrize("how", ["model", "optimizer-alone", "model-alone"])
def test_the_model_comes_from_what_is_there(how: str, shared_path: Path) -> None:
    """bfloat16 parameters from float32 ones, and float32 ones from the main parameters, not from their roundings."""
    bf16 = Layout(2, **DENSE, tp=2, precision="bf16")
    fp32 = Layout(2, **DENSE, pp=2)
    contents = ("optimizer", "extra") if how == "optimizer-alone" else ("model", "optimizer", "extra")
    wanted_contents = ("model",) if how == "model-alone" else ("model", "optimizer", "extra")
    for name, saving, loading in (("rounded", fp32, bf16), ("finer", bf16, fp32)):
        with parallel(saving):
            training = build(saving, seed=1)
            train(training, 0, 2)
            main = {key: value for key, value in global_state(training).items() if key.endswith(" param")}
            save(training, shared_path / name, 2, save_contents=contents)
        with parallel(loading):
            loaded = load_poisoned(loading, shared_path / name, load_contents=wanted_contents)
            found = global_state(loaded)
            with everywhere():
                for key, value in main.items():
                    model = found[key.removesuffix("param") + "model"]
                    assert torch.equal(model, value.to(model.dtype)), key


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "name", ["tp2-ep2-etp1", *(pytest.param(name, marks=pytest.mark.full) for name in ("ep2-dp4", "replicated"))]
)
def test_replicas_may_read_once_and_broadcast(name: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicated = Layout(4, **DENSE_4, tp=2, distributed_optimizer=False, precision="bf16")
    layout = FAMILIES["moe4"].get(name, replicated)
    saved = save_and_go_on(layout, shared_path)
    read = {}
    with parallel(layout):
        for how, batch_bytes in (("read", 0), ("broadcast", 1 << 26), ("in batches", 20000)):
            monkeypatch.setattr(tuning, "BROADCAST_BYTES", batch_bytes)
            training = build(layout, seed=2)
            poison(training)
            manager = manager_of(training, shared_path, load_replicas="read" if how == "read" else "broadcast")
            read[how] = sum(gather(manager.load().report.nbytes))
            manager.close()
            found = global_state(training)
            with everywhere():
                assert_same_state(found, saved.state)
        with everywhere():
            stored = sum(
                file.stat().st_size for file in (shared_path / "global_steps_2" / "actor").glob("[mo]*/**/*.pt")
            )
            # In small batches many readers read the same pages of these small files.
            assert read["broadcast"] < 1.1 * stored < read["read"]


@pytest.mark.world(2)
def test_generators_start_anew_under_another_layout(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the saved seed, the same each time, apart by pipeline stage; with one warning that says so."""
    saving, loading = (Layout(2, **DENSE, **size) for size in ({"tp": 2}, {"pp": 2}))
    save_and_go_on(saving, shared_path)
    draws = []
    with parallel(loading):
        for _ in range(2):
            caplog.clear()
            load_poisoned(loading, shared_path)
            told = [record for record in caplog.records if "start anew from the saved seed" in record.message]
            assert gather(len(told)) == [1, 0]
            draws.append(gather([random.random(), float(np.random.rand()), float(torch.rand(()))]))
        caplog.clear()
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


@pytest.mark.world(2)
def test_extra_state_comes_from_the_rank_in_turn(shared_path: Path) -> None:
    """Data-parallel positions stay where their number is; of a smaller size each is somebody's."""
    saving, loading = Layout(2, **DENSE), Layout(2, **DENSE, tp=2)
    save_and_go_on(saving, shared_path)
    with parallel(loading):
        training = build(loading, seed=2)
        manager = manager_of(training, shared_path)
        result = manager.load()
        manager.close()
        assert [state["rank"] for state in gather(result.extra_state)] == [0, 0]


@dataclass(frozen=True)
class Impossible:
    saving: Layout
    loading: Layout
    says: tuple[str, ...]


IMPOSSIBLE = {
    "hidden-size": Impossible(
        Layout(2, **DENSE), Layout(2, **DENSE, tp=2, hidden_size=48), (r"\.weight", r"48", r"40", "dp=2", "tp=2")
    ),
    "fewer-experts": Impossible(
        Layout(2, **MOE), Layout(2, **(MOE | {"experts": 8}), ep=2), (r"router|experts", "8", "4", "ep=2")
    ),
    "more-experts": Impossible(
        Layout(2, **(MOE | {"experts": 8})), Layout(2, **MOE, ep=2), (r"router|experts", "8", "4", "ep=2")
    ),
    "vocabulary": Impossible(
        Layout(2, **DENSE), Layout(2, **(DENSE | {"padded_vocab": 264}), tp=2), ("word_embeddings", "264", "144")
    ),
    "vocabulary-of-the-same-cut": Impossible(
        Layout(2, **DENSE), Layout(2, **(DENSE | {"padded_vocab": 148}), pp=2), ("word_embeddings", "148", "144")
    ),
    "more-layers": Impossible(
        Layout(2, **(DENSE | {"num_layers": 2})),
        Layout(2, **DENSE, pp=2),
        (r"layers\.[23]\.", r"wanted the layers 4 x \(.*, found 2 x"),
    ),
    "fewer-layers": Impossible(
        Layout(2, **DENSE), Layout(2, **(DENSE | {"num_layers": 2}), pp=2), (r"layers\.[23]\.", "wanted no such")
    ),
    "no-experts": Impossible(Layout(2, **MOE, ep=2), Layout(2, **SAME, tp=2), ("mlp",)),
    "tied": Impossible(Layout(2, **SAME), Layout(2, **TIED, pp=2), ("output_layer", "wanted no such")),
}


REFUSED_IN_CI = {"hidden-size", "more-experts", "vocabulary", "more-layers", "fewer-layers", "tied"}


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in REFUSED_IN_CI else pytest.mark.full)
        for name, case in IMPOSSIBLE.items()
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(case: Impossible, shared_path: Path) -> None:
    save_and_go_on(case.saving, shared_path)
    with parallel(case.loading):
        training = build(case.loading, seed=2)
        train(training, 0, 1)
        manager = manager_of(training, shared_path)
        messages = refused(training, manager.load, CheckpointMismatchError)
        manager.close()
        assert_names(messages, *case.says)


class FusedAdam(torch.optim.AdamW):
    """The state layout of transformer-engine's: steps are counted by the groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            done = group.pop("step", 0)
            for parameter in group["params"]:
                if done:
                    self.state[parameter]["step"] = torch.tensor(float(done))
        super().step()
        for group in self.param_groups:
            steps = {
                float(self.state[parameter].pop("step")) for parameter in group["params"] if parameter.grad is not None
            }
            if steps:
                (group["step"],) = map(int, steps)


def count_steps_by_group(training: Training) -> None:
    for part in optimizer_parts(training.optimizer):
        part.inner.__class__ = FusedAdam


@pytest.mark.world(2)
def test_steps_counted_by_parameter_or_by_group(shared_path: Path) -> None:
    by_group, by_parameter = (Layout(2, **DENSE, **size) for size in ({"tp": 2}, {"pp": 2}))
    for name, saving, loading in (("to-parameters", by_group, by_parameter), ("to-groups", by_parameter, by_group)):
        with parallel(saving):
            first = build(saving, seed=1)
            if saving is by_group:
                count_steps_by_group(first)
            train(first, 0, 2)
            state = global_state(first)
            save(first, shared_path / name, 2)
            wanted = shown(train(first, 2, 4)[-1])
        with parallel(loading):
            second = build(loading, seed=2)
            if loading is by_group:
                count_steps_by_group(second)
            poison(second)
            manager = manager_of(second, shared_path / name)
            manager.load()
            manager.close()
            found = global_state(second)
            with everywhere():
                assert_same_state(found, state)
            after = shown(train(second, 2, 4)[-1])
            with everywhere():
                assert after == pytest.approx(wanted, rel=2e-5)
