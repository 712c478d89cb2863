"""A lazy save holds the values that tensors had when it was asked for, whatever happens to them at once after."""

from collections.abc import Callable, Iterator

import pytest
import torch

from mcore_ckpt.formats.native.file_plan import FilePlan, StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import _native
from mcore_ckpt.save.capture import FileTensors
from mcore_ckpt.save.guards import Guards
from mcore_ckpt.save.host_images import HostImages
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region

# Some through the gather kernel, some by copies of their own; 12 MB in all, so that most is still to be copied when the
# host comes back.
SIZES = [1, 77, 1000, 16_384, 40_001, 300_000, 2_500_000]
BUFFER = 0
"""The tensor that changes outside of anything guarded."""

Change = Callable[["Trainer"], None]


class Trainer:
    def __init__(self) -> None:
        self.tensors = [torch.randn(size, device="cuda") for size in SIZES]

    def step(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(float("nan"))


def plan_of(tensors: list[torch.Tensor]) -> FilePlan:
    writes = tuple(
        TensorWrite((str(i),), ShardKey(str(i), "model"), Region.whole((t.numel(),)), t, (t.numel(),))
        for i, t in enumerate(tensors)
    )
    return plan_file(WriteRequest("model.pt", "model", writes), 0, StructureCache())


def image_in(buffer: _native.HostBuffer, plan: FilePlan) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8, count=plan.pt.records_end)


@pytest.fixture
def staging() -> Iterator[HostImages]:
    staging = HostImages(60.0, torch.cuda.current_device())
    yield staging
    staging.close()


def overwrite_in_step(trainer: Trainer) -> None:
    trainer.step()


def offload(trainer: Trainer) -> None:
    for tensor in trainer.tensors:
        tensor.data = tensor.data.cpu()
    refill_free_memory()


def free_storage(trainer: Trainer) -> None:
    for tensor in trainer.tensors:
        tensor.untyped_storage().resize_(0)
    refill_free_memory()


def change_buffer(trainer: Trainer) -> None:
    trainer.tensors[BUFFER].fill_(float("nan"))


def refill_free_memory() -> None:
    """What the allocator takes for free is written over at once."""
    for size in SIZES:
        torch.full((size,), float("nan"), device="cuda")


@pytest.mark.parametrize("change", [overwrite_in_step, offload, free_storage, change_buffer])
def test_old_values_are_saved_a_thousand_times(change: Change, staging: HostImages) -> None:
    trainer = Trainer()
    plan = plan_of(trainer.tensors)
    guards = Guards([(trainer, "step")], staging.hold)
    for round_ in range(1000):
        trainer.tensors = [torch.full((size,), float(round_), device="cuda") for size in SIZES]
        buffer = staging.reserve([plan])
        staging.capture([plan], [FileTensors.of(trainer.tensors)], buffer, lazy=[(0, BUFFER)])
        change(trainer)
        staging.wait()
        image = image_in(buffer, plan)
        for slot in plan.pt.slots:
            saved = image[slot.offset : slot.offset + slot.nbytes].view(torch.float32)
            assert bool((saved == round_).all()), f"round {round_}, tensor of {slot.nbytes} bytes"
    guards.remove()


def test_without_the_guard_it_would_fail(staging: HostImages) -> None:
    """Else the test above proves nothing: copies are slower than what comes after them."""
    found_new = False
    for round_ in range(50):
        trainer = Trainer()
        trainer.tensors = [torch.full((64 << 20,), float(round_), device="cuda")]
        plan = plan_of(trainer.tensors)
        buffer = staging.reserve([plan])
        staging.capture([plan], [FileTensors.of(trainer.tensors)], buffer, lazy=[])
        trainer.step()
        staging.wait()
        (slot,) = plan.pt.slots
        saved = image_in(buffer, plan)[slot.offset : slot.offset + slot.nbytes]
        found_new |= not bool((saved.view(torch.float32) == round_).all())
    assert found_new


def test_a_snapshot_is_whole_when_capture_returns(staging: HostImages) -> None:
    trainer = Trainer()
    plan = plan_of(trainer.tensors)
    for round_ in range(100):
        trainer.tensors = [torch.full((size,), float(round_), device="cuda") for size in SIZES]
        buffer = staging.reserve([plan])
        staging.capture([plan], [FileTensors.of(trainer.tensors)], buffer, lazy=None)
        image = image_in(buffer, plan)
        assert all(
            bool((image[s.offset : s.offset + s.nbytes].view(torch.float32) == round_).all()) for s in plan.pt.slots
        )
