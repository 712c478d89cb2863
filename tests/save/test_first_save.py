"""The first async save finds its host memory prepared, takes what is ready, or writes in place."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.native.file_plan import StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.io import _native, host_memory, tuning
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.save.file_contents import _estimated_request_bytes, estimated_bytes
from mcore_ckpt.save.plan import SavePlanner
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.endings import Ended, run_to_the_end
from tests.support.unsharded_model import sharded_state_dict, trainer_of
from tests.support.waiting import LONG_S, wait_for

pytestmark = pytest.mark.slow

PIECE = tuning.PREPARE_BYTES


class Gate:
    """Stands before a buffer's `fetch`: the preparing thread passes as often as the test lets it."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)
        self.fetched: list[tuple[int, int, str]] = []
        self.fails_at: int | None = None

    def fetch(self, native_fetch: Callable[..., None], begin: int, nbytes: int, threads: int) -> None:
        name = threading.current_thread().name
        if name == "mcore_ckpt host memory":
            assert self.passes.acquire(timeout=LONG_S)
        if self.fails_at is not None and begin >= self.fails_at:
            raise MemoryError("no bytes of host memory")
        native_fetch(begin, nbytes, threads=threads)
        self.fetched.append((begin, nbytes, name))

    def let(self, pieces: int) -> None:
        for _ in range(pieces):
            self.passes.release()

    def open(self) -> None:
        self.let(10_000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    native_fetch = _native.HostBuffer.fetch

    def fetch(buffer: _native.HostBuffer, begin: int, nbytes: int, *, threads: int = 1) -> None:
        gate.fetch(partial(native_fetch, buffer), begin, nbytes, threads)

    monkeypatch.setattr(_native.HostBuffer, "fetch", fetch)
    stop = host_memory._Preparation.stop

    def stop_at_gate(preparation: Any) -> None:
        """Ends the piece that is under way: else the thread would stand before the gate for ever."""
        preparation._is_stopped.set()
        gate.let(1)
        stop(preparation)

    monkeypatch.setattr(host_memory._Preparation, "stop", stop_at_gate)
    yield gate
    gate.open()


# -- the memory ---------------------------------------------------------------------------------------------------


def test_all_bytes_are_fetched_in_small_pieces_before_they_are_taken(gate: Gate) -> None:
    memory = HostMemory()
    memory.prepare(3 * PIECE + 4096)
    gate.open()
    wait_for(lambda: memory.bytes_at_once is None)
    thread = "mcore_ckpt host memory"
    assert gate.fetched == [(n * PIECE, PIECE, thread) for n in range(3)] + [(3 * PIECE, 4096, thread)]
    assert memory.take(3 * PIECE + 4096).address % 4096 == 0
    assert len(gate.fetched) == 4, "take has nothing left to fetch"
    memory.release()


def test_take_fetches_only_what_is_missing(gate: Gate) -> None:
    memory = HostMemory()
    memory.prepare(8 * PIECE)
    gate.let(2)
    wait_for(lambda: memory.bytes_at_once == 2 * PIECE)
    first = memory.take(2 * PIECE)
    assert memory.bytes_at_once == 2 * PIECE, "the thread goes on for a taker of what is ready"
    assert memory.take(7 * PIECE) is first
    begin, nbytes, name = gate.fetched[-1]
    assert begin == sum(nbytes for _, nbytes, _ in gate.fetched[:-1]) >= 2 * PIECE
    assert (begin + nbytes, name) == (7 * PIECE, "MainThread")
    assert memory.take(8 * PIECE) is first
    assert gate.fetched[-1] == (7 * PIECE, PIECE, "MainThread")
    memory.release()


def test_an_estimate_that_is_somewhat_too_small_costs_the_difference(gate: Gate) -> None:
    memory = HostMemory()
    memory.prepare(4 * PIECE)
    gate.open()
    wait_for(lambda: memory.bytes_at_once is None)
    memory.take(5 * PIECE)
    assert gate.fetched[-1] == (4 * PIECE, PIECE, "MainThread")
    memory.release()


def test_an_estimate_that_is_far_too_small_makes_the_memory_grow() -> None:
    memory = HostMemory()
    memory.prepare(4096)
    nbytes = 2 * tuning.PREPARE_SPARE_BYTES
    address = memory.take(nbytes).address
    assert address % 4096 == 0
    _native.copy_host([address + nbytes - 8], [torch.ones(1, dtype=torch.int64).data_ptr()], [8], 1)
    memory.release()


def test_no_memory_on_the_thread_is_the_save_s_error(gate: Gate) -> None:
    gate.fails_at = PIECE
    memory = HostMemory()
    memory.prepare(4 * PIECE)
    gate.open()
    wait_for(lambda: memory.bytes_at_once is None)
    assert memory.take(PIECE)
    with pytest.raises(MemoryError, match="no bytes of host memory"):
        memory.take(2 * PIECE)
    gate.fails_at = None
    memory.take(2 * PIECE)
    memory.release()


def test_no_address_space_or_no_thread_leaves_everything_to_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory()
    memory.prepare(1 << 62)
    assert memory.take(4096).address % 4096 == 0

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = HostMemory()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        memory.prepare(4096)
    assert memory.take(4096).address % 4096 == 0


def test_the_limit_bounds_what_is_prepared(gate: Gate) -> None:
    memory = HostMemory(limit=2 * PIECE)
    memory.prepare(100 * PIECE)
    gate.open()
    wait_for(lambda: memory.bytes_at_once is None)
    assert sum(nbytes for _, nbytes, _ in gate.fetched) == 2 * PIECE
    with pytest.raises(UnsupportedError, match="max_host_bytes"):
        memory.take(2 * PIECE + 1)
    memory.release()


def test_releasing_ends_the_thread(gate: Gate) -> None:
    memory = HostMemory()
    memory.prepare(1000 * PIECE)
    gate.let(1)
    memory.release()
    assert len(gate.fetched) <= 2
    assert not [t for t in threading.enumerate() if t.name == "mcore_ckpt host memory"]


# The exit status of each end.
ENDS = {"pass": 0, "sys.exit(3)": 3, "raise ValueError": 1}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    program = "memory = m.HostMemory(); memory.prepare(8 << 30)\nprint(memory.bytes_at_once < 8 << 30, flush=True)\n"
    programs = {how: program + how for how in ENDS}
    imports = "import sys, threading, mcore_ckpt.io.host_memory as m"
    return run_to_the_end(imports, programs, tmp_path_factory.mktemp("output"))


@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_the_interpreter_ends_the_thread(how: str, ended: dict[str, Ended]) -> None:
    assert ended[how].status == ENDS[how], ended[how].output
    said, _, errors = ended[how].output.partition("\n")
    assert said == "True"
    assert bool(errors) == (how == "raise ValueError"), errors
    assert "Fatal" not in errors


# -- the estimate -------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """As much of a megatron model as saving looks at."""

    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        for number in range(4):
            setattr(self, f"weight{number}", torch.nn.Parameter(torch.rand(rows, 1024)))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return sharded_state_dict(self)


@pytest.mark.parametrize("contents", [("model",), ("optimizer",), ("model", "optimizer")], ids="+".join)
def test_the_estimate_is_close_before_the_first_step_and_after_it(contents: tuple[str, ...]) -> None:
    model = Model()
    adam = torch.optim.Adam(model.parameters())
    trainer = trainer_of(model, SimpleNamespace(optimizer=adam), save_contents=contents)
    before = estimated_bytes(trainer)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    adam.step()
    after = estimated_bytes(trainer)
    actual = sum(plan.nbytes for plan in SavePlanner().plan(trainer).files)
    assert actual <= before <= 1.02 * actual
    assert actual <= after <= 1.02 * actual


@pytest.mark.parametrize("rank", [0, 1])
def test_the_estimate_knows_that_replicas_share_a_file_in_unequal_parts(rank: int) -> None:
    """A tensor comes from one of them, so the one with the large tensor writes more than half."""
    writes = [
        TensorWrite((name,), ShardKey(name, MODEL), Region.whole((rows, 1024)), torch.zeros(rows, 1024), (rows, 1024))
        for name, rows in (("large", 2048), ("small", 512))
    ]
    request = WriteRequest("model/a.pt", "model", tuple(writes), writers=(0, 1))
    actual = plan_file(request, rank, StructureCache()).nbytes
    assert 0.99 * actual <= _estimated_request_bytes(request, 0, rank) <= 1.01 * actual


# -- the first save -----------------------------------------------------------------------------------------------


def manager_of(root: Path, model: Model, **choices: Any) -> CheckpointManager:
    config = CheckpointConfig(save_contents=("model",), load_contents=("model",), async_save=True, **choices)
    return CheckpointManager(root, model, config=config)


def change(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)


def check_saved(manager: CheckpointManager, model: Model, saved: dict[str, torch.Tensor], path: Path) -> None:
    manager.load(path=path, verify="full")
    assert _native.free_idle_buffers() == 0, "load keeps its buffers"
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.parametrize("pieces", [0, 1, 10_000], ids=["nothing ready", "some ready", "all ready"])
def test_a_save_has_the_state_of_its_call_whatever_is_ready(pieces: int, gate: Gate, tmp_path: Path) -> None:
    model = Model()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    manager = manager_of(tmp_path, model)
    gate.let(pieces)
    memory = manager._context.host_images._memory
    if pieces == 1:
        wait_for(lambda: memory.bytes_at_once == PIECE)
    elif pieces:
        wait_for(lambda: memory.bytes_at_once is None)
    handle = manager.save(1)
    if pieces < 10_000:
        # The one file has no image, so it is on the disk although the thread has not gone on.
        assert handle.progress == (manager._context.planner.plan(manager._trainer).files[0].nbytes,) * 2
        assert all(name == "mcore_ckpt host memory" for _, _, name in gate.fetched), "save fetched nothing itself"
    change(model)
    path = handle.wait().path
    assert all(name == "mcore_ckpt host memory" for _, _, name in gate.fetched), "save fetched nothing itself"
    gate.open()
    check_saved(manager, model, saved, path)
    wait_for(lambda: memory.bytes_at_once is None)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    handle = manager.save(2)
    change(model)
    check_saved(manager, model, saved, handle.wait().path)
    manager.close()


def test_a_save_waits_for_the_rest_if_nearly_all_is_ready(gate: Gate, tmp_path: Path) -> None:
    model = Model(rows=2048)  # 32 MiB: 17 pieces with the margin of the estimate
    manager = manager_of(tmp_path, model)
    gate.let(15)
    memory = manager._context.host_images._memory
    wait_for(lambda: memory.bytes_at_once == 15 * PIECE)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    handle = manager.save(1)
    change(model)
    assert gate.fetched[-1][2] == "MainThread"
    check_saved(manager, model, saved, handle.wait().path)
    manager.close()


def test_a_rank_that_writes_no_tensors_can_save_in_the_background(tmp_path: Path) -> None:
    config = CheckpointConfig(save_contents=("extra",), load_contents=("extra",), async_save=True)
    with closing(CheckpointManager(tmp_path, Model(), config=config)) as manager:
        manager.save(1, {"seen": 5}).wait()
        assert manager.load().extra_state == {"seen": 5}


def test_only_async_saves_prepare(gate: Gate, tmp_path: Path) -> None:
    config = CheckpointConfig(save_contents=("model",), load_contents=("model",))
    manager = CheckpointManager(tmp_path, Model(), config=config)
    gate.open()
    manager.save(1)
    assert not gate.fetched
    manager.close()


def test_closing_the_manager_ends_the_thread(gate: Gate, tmp_path: Path) -> None:
    manager = manager_of(tmp_path, Model(rows=4096))
    gate.let(1)
    manager.close()
    assert not [t for t in threading.enumerate() if t.name == "mcore_ckpt host memory"]


def test_a_full_disk_under_files_in_place_fails_the_handle_and_not_the_call(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks must learn of it together, at the commit."""
    from mcore_ckpt.errors import CommitError
    from mcore_ckpt.formats.native.writer import FileWriter

    def fail(writer: FileWriter) -> None:
        raise OSError(28, "No space left on device")

    manager = manager_of(tmp_path, Model())
    monkeypatch.setattr(FileWriter, "wait_for_sources", fail)
    handle = manager.save(1)
    with pytest.raises(CommitError, match="No space left"):
        handle.wait()
    gate.open()
    manager.close()
