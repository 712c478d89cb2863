"""A disk that hangs under several ranks: all of them raise the same error by the deadline, and training goes on."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import HungDiskError
from mcore_ckpt.formats.huggingface.reader import read_contents
from mcore_ckpt.integrations.kit.together import decided_by_rank_0
from mcore_ckpt.io import disk_watch
from mcore_ckpt.load import huggingface as loading
from mcore_ckpt.load.huggingface import load_hf
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.checkpointing import assert_loads
from tests.distributed.hf_models import Shape, assert_holds, build_model, global_tensors
from tests.distributed.layouts import LAYOUTS
from tests.distributed.refusals import assert_names
from tests.distributed.snapshot import snapshot
from tests.distributed.training import build, parallel, train
from tests.support.small_disks import ext4, frozen
from tests.support.tiny_models import make_hf_folder
from tests.support.waiting import LONG_S, wait_for, wait_for_hung_calls

DP2 = LAYOUTS["dp2-bf16"]
TIMEOUT_S = 2.0
HANGS = r"^rank \d: .* has not returned for \d+ s: the disk, or the server that has it, hangs"

pytestmark = pytest.mark.world(2)


@contextmanager
def disk_of(folder: Path) -> Iterator[Path]:
    """A file system of its own, which rank 0 mounts. If it cannot, all ranks skip the test."""
    place = folder / "disk"
    why_not: list[str | None] = [None]
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            try:
                stack.enter_context(ext4(place, mebibytes=64))
            except pytest.skip.Exception as skipped:
                why_not = [str(skipped)]
        dist.broadcast_object_list(why_not)
        if why_not[0] is not None:
            pytest.skip(why_not[0])
        yield place
        dist.barrier()


@contextmanager
def frozen_by_rank_0(disk: Path) -> Iterator[None]:
    dist.barrier()
    with frozen(disk) if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        try:
            yield
        finally:
            dist.barrier()
    dist.barrier()


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sync", "async"])
def test_a_save_is_one_error_and_the_next_one_is_whole(is_async: bool, shared_path: Path) -> None:
    with disk_of(shared_path) as disk, parallel(DP2):
        training = build(DP2, seed=1)
        config = CheckpointConfig(timeout_s=TIMEOUT_S, async_save=is_async)
        manager = CheckpointManager(disk / "run", training.model, training.optimizer, training.scheduler, config=config)
        train(training, 0, 1)
        manager.save(1).wait()
        with frozen_by_rank_0(disk):
            messages = raised_everywhere(HungDiskError, error_of(lambda: manager.save(2).wait(LONG_S)))
        assert_names(messages, HANGS)
        with everywhere():
            wait_for_hung_calls(manager)
        train(training, 1, 2)
        manager.save(3).wait(LONG_S)
        assert_loads(manager, training, snapshot(training), step=3)
        manager.close()


def test_a_folder_that_does_not_answer_is_one_error(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_hf` refuses pipes, and a frozen file system can be read: so a call that hangs comes before rank 0 reads."""
    shape, folder, pipe = Shape(2, tp=2), shared_path / "hf", shared_path / "pipe"
    with everywhere():
        if dist.get_rank() == 0:
            make_hf_folder(folder, "qwen3")
            os.mkfifo(pipe)

    def hangs_first(*args: Any) -> Any:
        pipe.read_bytes()
        return read_contents(*args)

    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        with monkeypatch.context() as patched:
            patched.setattr(loading, "read_contents", hangs_first)
            error = error_of(lambda: load_hf(chunks, folder, timeout_s=TIMEOUT_S))
        assert_names(raised_everywhere(HungDiskError, error), rf"^rank 0: {re.escape(str(pipe))}: .* has not")
        if dist.get_rank() == 0:
            os.close(os.open(pipe, os.O_RDWR))  # the thread that was left may end
        load_hf(chunks, folder)
        with everywhere():
            assert_holds(chunks, global_tensors(folder))


def test_a_question_to_rank_0_that_hangs_is_one_error(shared_path: Path) -> None:
    pipe = shared_path / "pipe"
    if dist.get_rank() == 0:
        os.mkfifo(pipe)

    def asked(answer: Callable[[], Any]) -> Any:
        return decided_by_rank_0("tests/question", "looking", "which?", answer, TIMEOUT_S)

    messages = raised_everywhere(HungDiskError, error_of(lambda: asked(pipe.read_text)))
    assert_names(messages, rf"^rank 0: {re.escape(str(pipe))}: .* has not")
    if dist.get_rank() == 0:
        os.close(os.open(pipe, os.O_RDWR))
    with everywhere():
        wait_for(lambda: all(work.ended for work in disk_watch._calls._left))
    assert asked(lambda: "this one") == "this one"
