"""A save of several ranks that does not fit: the same error on all of them, before any has written a byte."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import NoRoomError
from mcore_ckpt.io import tuning
from mcore_ckpt.save.hf_export import least_exported_bytes
from mcore_ckpt.save.plan import SavePlanner
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import manager_of, position
from tests.distributed.layouts import Layout
from tests.distributed.test_export import CONTENTS, cases, hf_config, read_weights
from tests.distributed.training import build, parallel
from tests.support.small_disks import bytes_below, fill, free_bytes, tmpfs

# How many bytes the estimate may be too low: tokenizer files, headers of the export, manifest and CRCs.
UNKNOWN = 10 * 4096


def mounted_by_rank_0(stack: ExitStack, disk: Path) -> None:
    """Mounts a small disk that all ranks see. If it cannot be mounted, all ranks skip the test."""
    reasons: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            stack.enter_context(tmpfs(disk, "64m"))
        except pytest.skip.Exception as reason:
            reasons = [str(reason)]
    dist.broadcast_object_list(reasons, src=0)
    if reasons[0] is not None:
        pytest.skip(reasons[0])


def assert_bound(manager: CheckpointManager, role_dir: Path) -> None:
    """The bound of the HuggingFace weights is not above what they have, and not far below."""
    trainer = manager._trainer
    plans = SavePlanner().plan(trainer).files
    parts: list[int | None] = [None] * dist.get_world_size()
    owned = [plan for plan in plans if plan.share.owner == dist.get_rank()]
    dist.all_gather_object(parts, least_exported_bytes(trainer, owned))
    weights = read_weights(role_dir / file_names.HUGGINGFACE_DIR).values()
    exported = sum(tensor.nbytes for tensor in weights)
    assert 0.9 * exported < sum(part or 0 for part in parts) <= exported


@pytest.mark.parametrize("layout", cases("tp2!", "ep2", "pp2-tied-bf16"))
def test_an_export_and_optimizer_that_do_not_fit(
    layout: Layout, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SPACE_SETTLES_S", 0.0)
    with ExitStack() as stack, parallel(layout):
        disk = shared_path / "disk"
        mounted_by_rank_0(stack, disk)
        training = build(layout, seed=1)
        manager = manager_of(training, disk / "root", hf_config=hf_config(layout), save_contents=CONTENTS)
        manager.save(1, extra_state=position(1)).wait()
        with everywhere():
            assert_bound(manager, file_names.step_dir(manager.root, 1) / manager.role)
        # The second manifest names the save before it, which may take another block.
        needed = bytes_below(file_names.step_dir(manager.root, 1)) + 2 * 4096
        for spare, fits in ((-UNKNOWN, False), (0, True)):
            dist.barrier()
            if dist.get_rank() == 0:
                fill(disk, 0)
                fill(disk, free_bytes(disk) - needed - spare)
            dist.barrier()
            error = error_of(lambda: manager.save(2, extra_state=position(2)).wait())
            if fits:
                with everywhere():
                    assert error is None
            else:
                for message in raised_everywhere(NoRoomError, error):
                    assert "are needed, but only" in message
                with everywhere():
                    assert not file_names.step_dir(manager.root, 2).exists()
        manager.close()
        dist.barrier()
