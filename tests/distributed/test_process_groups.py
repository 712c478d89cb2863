"""Checkpoints of models with process groups of their own, while megatron's parallel_state is uninitialized."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agreement import everywhere
from checkpointing import manager_of, save
from layouts import LAYOUTS
from megatron.core import parallel_state
from snapshot import assert_same, poison, snapshot
from tiers import marks
from training import Layout, build, parallel, train

STEP = 2
IN_CI = {"pp2-tied-bf16", "pp2-vpp2", "cp2", "ep2", "tp2", "tp2-ep2-etp1", "dp4-two-instances"}


@contextmanager
def no_parallel_state() -> Iterator[None]:
    """Hides megatron's own groups. Whatever asks for one of them in the block fails."""
    hidden = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
    for name in hidden:
        setattr(parallel_state, name, None)
    assert not parallel_state.model_parallel_is_initialized()
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(parallel_state, name, value)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name, marks=marks(layout.world, name in IN_CI)) for name, layout in LAYOUTS.items()],
)
def test_a_checkpoint_needs_no_parallel_state(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        with no_parallel_state():
            save(first, shared_path, STEP)
        at_save = snapshot(first)
        reference = train(first, STEP, STEP + 2)

        second = build(layout, seed=2)
        poison(second)
        with no_parallel_state():
            manager = manager_of(second, shared_path, load_replicas="broadcast")
            result = manager.load()
            manager.close()
        loaded = snapshot(second)
        with everywhere():
            assert result.step == STEP
            assert_same(loaded, at_save)
        resumed = train(second, STEP, STEP + 2)
        with everywhere():
            assert resumed == reference
