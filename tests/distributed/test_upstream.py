"""What megatron's own load of an optimizer loses of what its own save has written, beside ours.

Each case is megatron's defect, seen with 0.16.1 and 0.19.2. If one fails because nothing is lost any more, it goes, and
so does its row in docs/features.md.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import save
from tests.distributed.foreign_checkpoints import load_by_megatron
from tests.distributed.global_state import GlobalState, assert_same_state, global_state
from tests.distributed.resuming import SIZES, loaded, saved_by_megatron
from tests.distributed.training import Layout, build, device, parallel, train

pytestmark = [pytest.mark.full, pytest.mark.world(2)]

PLAIN = Layout(2, precision="bf16", **SIZES)
OFFLOADED = replace(PLAIN, offload=0.5)


@pytest.mark.parametrize(
    ("layout", "form", "lost"),
    [
        # `_set_main_param_and_optimizer_states` wants the step among the tensors of the state.
        pytest.param(PLAIN, "fully_reshardable", "KeyError: 'step'", id="adam-fully"),
        pytest.param(PLAIN, "dp_reshardable", "step", id="adam-dp"),
        # `_update_fp32_params_by_new_state` looks for each parameter among those that have a copy in fp32.
        pytest.param(OFFLOADED, "fully_reshardable", "KeyError", id="offloaded-fully"),
        pytest.param(OFFLOADED, "dp_reshardable", "KeyError", id="offloaded-dp"),
        pytest.param(replace(OFFLOADED, precision_aware=True), "dp_reshardable", "step", id="offloaded-aware-dp"),
    ],
)
def test_what_megatron_loses(layout: Layout, form: str, lost: str, shared_path: Path) -> None:
    with parallel(layout):
        first = saved_by_megatron(layout, shared_path / "megatron", form)
        state = global_state(first)
        save(first, shared_path / "ours", 2)
    with parallel(layout):
        ours, _ = loaded(layout, shared_path / "ours")
        found = global_state(ours)
        with everywhere():
            assert_same_state(found, state)
    with parallel(layout):
        theirs = build(layout, seed=2)
        train(theirs, 0, 1)
        error: Exception | None = None
        try:
            with device(layout):
                load_by_megatron(theirs, shared_path / "megatron", form)
        except Exception as raised:
            error = raised
        difference = f"{type(error).__name__}: {error}" if error else differing(global_state(theirs), state)
        with everywhere():
            assert difference.startswith(lost), difference


def differing(found: GlobalState, wanted: GlobalState) -> str:
    """The kinds of state that differ."""
    differing = (name for name in wanted if not found[name].equal(wanted[name]))
    return ", ".join(sorted({name.split()[-1] for name in differing}))
