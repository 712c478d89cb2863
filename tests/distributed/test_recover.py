"""Actor and critic of real trainings come back from one step together, on all ranks."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.recover import recover
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of, position
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.test_fallback import SHARD, flip_a_bit
from tests.distributed.training import build, parallel, train

DP2 = LAYOUTS["dp2-bf16"]
ROLES = ("actor", "critic")


@pytest.mark.world(2)
def test_roles_come_back_together_or_not_at_all(shared_path: Path) -> None:
    with parallel(DP2):
        trainings = {role: build(DP2, seed=seed) for seed, role in enumerate(ROLES)}
        managers = {role: manager_of(trainings[role], shared_path, role, roles=ROLES) for role in ROLES}
        states: list[dict] = []
        for step in (1, 2):
            for role in ROLES:
                train(trainings[role], step - 1, step)
                managers[role].save(step, extra_state=position(step))
            states.append({role: snapshot(trainings[role]) for role in ROLES})
        # The critic never comes for step 3, and its part of step 2 is damaged: of the actor, both are sound.
        managers["actor"].save(3)
        with everywhere():
            if dist.get_rank() == 0:
                flip_a_bit(shared_path / "global_steps_2" / SHARD.replace("actor", "critic"))
        _spoil(trainings)
        recovery = recover(list(managers.values()))
        found = {role: snapshot(trainings[role]) for role in ROLES}
        with everywhere():
            assert recovery.step == 1
            assert [result.extra_state["step"] for result in recovery.results.values()] == [1, 1]
            missing, reason = recovery.skipped
            assert missing.endswith("global_steps_3: not committed by critic")
            assert "critic: rank 1" in reason
            assert "wrong CRC" in reason
            # Both have the same generators, which are as they were when the last one was saved.
            assert_same(found["critic"], states[0]["critic"])
            assert_same(_without_generators(found["actor"]), _without_generators(states[0]["actor"]))
        _nothing_to_come_back_to(managers, shared_path)
        for manager in managers.values():
            manager.close()


def _spoil(trainings: dict) -> None:
    for training in trainings.values():
        poison(training)


def _without_generators(state: dict) -> dict:
    return {name: value for name, value in state.items() if not name.startswith("generator.")}


def _nothing_to_come_back_to(managers: dict[str, CheckpointManager], root: Path) -> None:
    with everywhere():
        if dist.get_rank() == 0:
            flip_a_bit(root / "global_steps_1" / SHARD)
    for message in raised_everywhere(CheckpointCorruptError, error_of(lambda: recover(list(managers.values())))):
        assert "no step can be loaded by all of actor, critic" in message
        assert message.count("wrong CRC") == 2
    with everywhere():
        if dist.get_rank() == 0:
            for step in (1, 2):
                shutil.rmtree(root / f"global_steps_{step}")
    for message in raised_everywhere(CheckpointNotFoundError, error_of(lambda: recover(list(managers.values())))):
        assert "global_steps_3: not committed by critic" in message
    assert recover(list(managers.values()), "off").step is None
