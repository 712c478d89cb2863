"""A checkpoint loads under any other layout: the same bits, and training goes on as if it had never moved."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import everywhere, gather, raised_everywhere
from checkpointing import manager_of, position, save
from global_state import GlobalState, assert_same_state, global_state
from snapshot import poison
from training import VOCAB_SIZE, Layout, Step, Training, build, parallel, train

from mcore_ckpt.errors import CheckpointError, CheckpointMismatchError

# The same model and the same sequences under every layout; no dropout, which draws for a rank.
SAME: dict[str, Any] = {"padded_vocab": 144, "global_batch": 16, "dropout": 0.0, "num_layers": 8}
DENSE: dict[str, Any] = SAME
MOE: dict[str, Any] = SAME | {"experts": 4, "expert_bias": True, "num_layers": 4}
TIED: dict[str, Any] = SAME | {"tied_embeddings": True, "num_layers": 4}
MTP: dict[str, Any] = SAME | {"mtp_layers": 1, "num_layers": 4}

BUCKETS: dict[str, Any] = {"bucket_size": 5000, "overlap_grad_reduce": True}
UNEVEN = "Et|t*3|t|t*3L"  # two stages, two virtual ones each

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
    },
    "tied2": {"dp2": Layout(2, **TIED), "tp2": Layout(2, **TIED, tp=2), "pp2": Layout(2, **TIED, pp=2)},
    "mtp2": {"dp2": Layout(2, **MTP), "pp2": Layout(2, **MTP, pp=2)},
    "bf16-2": {
        "dp2-overlap": Layout(2, **DENSE, **BUCKETS, precision="bf16", overlap_param_gather=True),
        "tp2": Layout(2, **DENSE, tp=2, precision="bf16"),
        "pp2-replicated": Layout(2, **DENSE, pp=2, precision="bf16", distributed_optimizer=False),
    },
    "dense4": {
        "tp2-pp2": Layout(4, **DENSE, tp=2, pp=2),
        "tp4": Layout(4, **DENSE, tp=4),
        "dp4-two-instances": Layout(4, **DENSE, optimizer_instances=2),
        "pp2-vpp2-dp2-uneven": Layout(4, **DENSE, pp=2, vpp=2, stages=UNEVEN),
        "pp4-first": Layout(4, **DENSE, pp=4, first_stage_layers=2),
        "cp2-tp2": Layout(4, **DENSE, cp=2, tp=2),
    },
    "moe4": {
        "ep2-dp4": Layout(4, **MOE, ep=2),
        "ep4": Layout(4, **MOE, ep=4),
        "tp2-ep2-etp1": Layout(4, **MOE, tp=2, ep=2, etp=1),
        "tp2-ep2-etp2": Layout(4, **MOE, tp=2, ep=2, etp=2),
        "pp2-ep2": Layout(4, **MOE, pp=2, ep=2),
    },
    "dense8": {
        "tp2-pp2-dp2": Layout(8, **DENSE, tp=2, pp=2),
        "tp4-cp2": Layout(8, **DENSE, tp=4, cp=2),
        "pp4-vpp2-dp2": Layout(8, **DENSE, pp=4, vpp=2),
    },
    "moe8": {
        "tp2-pp2-ep2-etp1": Layout(8, **MOE, tp=2, pp=2, ep=2, etp=1),
        "ep4-pp2": Layout(8, **MOE, ep=4, pp=2),
    },
}


def families() -> list[Any]:
    return [
        pytest.param(layouts, id=name, marks=pytest.mark.world(next(iter(layouts.values())).world))
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
    """Mean loss over all that see one, the gradient norm, which is everywhere the same, and the rates."""
    losses = [loss for losses in gather(step.losses) for loss in losses]
    assert step.grad_norm is not None
    return [sum(losses) / len(losses), step.grad_norm, *sorted(set(step.learning_rate))]


@pytest.mark.parametrize("layouts", families())
def test_every_layout_loads_every_other(layouts: dict[str, Layout], shared_path: Path) -> None:
    saved = {name: save_and_go_on(layout, shared_path / name) for name, layout in layouts.items()}
    steps = {name: shown(each.next_step) for name, each in saved.items()}
    for target, layout in layouts.items():
        with parallel(layout):
            for source, wanted in saved.items():
                training = load_poisoned(layout, shared_path / source)
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
