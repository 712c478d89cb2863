"""Real megatron on the CPU, with mcore_ckpt on the emulated GPU: program.py FOLDER CASE...

Each case is a function below. It ends the process with an assertion if something is wrong.
"""

import gc
import itertools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda import emulation

# isort: split
from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.checkpoint.file_names import trainer_file
from mcore_ckpt.cli.demo import training
from mcore_ckpt.cli.demo.tiny_trainer import train_step
from mcore_ckpt.errors import CheckpointError, CommitError, UnsupportedError
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.save.replica_check import ReplicatedTensors, take_samples
from mcore_ckpt.state.live_facts import read_facts
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.plain import copy_tensor
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.tools.convert.merge import MergeRequest, merge

FOLDER = Path(sys.argv[1])
LAYERS = 2
WITH_EXPORT = ("model", "optimizer", "extra", "hf_model")
CASES: dict[str, Callable[[], None]] = {}
library = emulation.library


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Training:
    """A small model with its distributed optimizer, on a data-parallel rank for each process."""

    def __init__(self) -> None:
        self.device = training.start_distributed(1, 1)
        self.gpu = int(os.environ.get("EMULATED_GPU", dist.get_rank()))
        emulation.install(self.gpu)
        self.model, self.optimizer, self.scheduler = training.build_training_state(self.device, 40, LAYERS)
        self.text = training.StandardLibraryText(self.device)
        for _ in range(2):
            self.step()

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.scheduler, self.text, num_microbatches=1, **training.MICRO_BATCH)

    def manager(self, name: str, with_optimizer: bool = True, **fields: Any) -> CheckpointManager:
        beside = {"hf_config": training.hf_config(LAYERS), "processing_class": training.byte_tokenizer()}
        config = CheckpointConfig(**fields)
        optimizer = self.optimizer if with_optimizer else None
        return CheckpointManager(FOLDER / name, self.model, optimizer, self.scheduler, config=config, **beside)

    def state(self) -> dict[str, torch.Tensor]:
        found = dict(self.model[0].named_parameters())
        for number, part in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            for group in part.optimizer.param_groups:
                for at, parameter in enumerate(group["params"]):
                    found[f"{number}.{at}.main"] = parameter
                    moments = part.optimizer.state[parameter].items()
                    found |= {f"{number}.{at}.{n}": t for n, t in moments if isinstance(t, torch.Tensor)}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def differing(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def rounds(manager: CheckpointManager, first: int = 10) -> int:
    """Saves, trains on while the copies are made, loads, and returns how many tensors came back changed, in all."""
    wrong = 0
    for number in range(int(os.environ.get("ROUNDS", "2"))):
        before = run.state()
        handle = manager.save(first + number)
        for _ in range(2):
            run.step()
        assert differing(before, run.state()), "the training goes on"
        handle.wait()
        manager.load(step=first + number)
        wrong += len(differing(before, run.state()))
    return wrong


@case
def lazy() -> None:
    with closing(run.manager("lazy", async_save=True, async_mode="lazy")) as manager:
        assert rounds(manager) == 0
    assert library.emulated_held_us() > 0, "optimizer.step() has not waited for a copy, so nothing was shown"


@case
def lazy_without_guards() -> None:
    """The control: without the guards, saves are torn."""
    with closing(run.manager("unguarded", async_save=True, async_mode="lazy")) as manager:
        manager._guards.remove()
        assert rounds(manager) > 0


@case
def lazy_without_the_optimizer() -> None:
    """Nothing can delay its step, so the weights are copied before `save` returns."""
    contents = {"save_contents": ("model",), "load_contents": ("model",)}
    with closing(
        run.manager("weights", with_optimizer=False, async_save=True, async_mode="lazy", **contents)
    ) as manager:
        before = weights()
        handle = manager.save(1)
        run.step()
        assert differing(before, weights())
        handle.wait()
        manager.load(step=1)
        assert not differing(before, weights())


def weights() -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.model[0].named_parameters()}


@case
def snapshot() -> None:
    with closing(run.manager("snapshot", async_save=True)) as manager:
        assert rounds(manager) == 0


@case
def sync() -> None:
    """It pins the pieces of eight threads, and not the whole state."""
    piece, held = 256 << 10, library.emulated_pinned_bytes()
    with pytest.MonkeyPatch.context() as patch, closing(run.manager("sync")) as manager:
        patch.setattr(tuning, "WRITE_BYTES", piece)
        before = run.state()
        manager.save(1)
        pinned = library.emulated_pinned_bytes() - held
        run.step()
        manager.load(step=1)
        assert not differing(before, run.state())
    assert pinned <= 8 * piece + (1 << 20) < sum(tensor.nbytes for tensor in before.values()), pinned


@case
def sync_of_a_strided_tensor() -> None:
    """A save waits for the GPU after it has asked it for a copy in rows, which only the wait completes here."""
    turned = torch.rand(64, 32).t()
    run.model[0].module.decoder.final_layernorm.register_buffer("turned", turned)
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []
    in_rows = torch.Tensor.contiguous

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return in_rows(tensor)
        asked.append((torch.zeros(tensor.shape), tensor))
        return asked[-1][0]

    def wait(gpu: int, seconds: float) -> None:
        for copy, tensor in asked:
            copy.copy_(tensor)
        asked.clear()

    with pytest.MonkeyPatch.context() as patch, closing(run.manager("strided")) as manager:
        patch.setattr(_native, "wait_for_device", wait)
        patch.setattr(torch.Tensor, "contiguous", ask)
        manager.save(1)
        patch.undo()
        saved = turned.clone()
        turned.zero_()
        manager.load(step=1)
        assert torch.equal(turned, saved)


@case
def a_call_may_come_from_any_thread_and_mode() -> None:
    """A save waits for the training's GPU, although a new thread's is GPU 0. After a load, the training goes on."""
    waited_for: list[int] = []

    def wait(gpu: int, seconds: float) -> None:
        waited_for.append(gpu)

    def load() -> None:
        with torch.inference_mode(), torch.device("meta"):
            manager.load(step=1)
            load_hf(run.model, hf_folder(manager))

    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1) as thread,
        closing(run.manager("thread", save_contents=WITH_EXPORT)) as manager,
    ):
        patch.setattr(_native, "wait_for_device", wait)
        before = run.state()
        thread.submit(manager.save, 1).result()
        run.step()
        thread.submit(load).result()
        assert not differing(before, run.state())
        run.step()
    assert set(waited_for) == {run.gpu} != {0}


@case
def broadcast() -> None:
    """One rank reads, and sends the bytes to the others' GPUs."""
    with closing(run.manager("broadcast", async_save=True, async_mode="lazy", load_replicas="broadcast")) as manager:
        assert rounds(manager) == 0


@case
def fast_tier() -> None:
    tier = FastTier(FOLDER / "node", replicas=0, durable_every=1)
    with closing(run.manager("fast", async_save=True, async_mode="lazy", fast=tier)) as manager:
        assert rounds(manager) == 0
        assert list((FOLDER / "node").rglob("global_steps_*"))


@case
def an_export_is_of_the_saved_state() -> None:
    """In the background, too, while the training goes on."""
    with closing(run.manager("export", save_contents=WITH_EXPORT)) as manager:
        manager.save(1)
        wanted = exported(manager)
    for mode in ("snapshot", "lazy"):
        fields = {"save_contents": WITH_EXPORT, "async_save": True, "async_mode": mode}
        with closing(run.manager(f"export-{mode}", **fields)) as manager:
            handle = manager.save(1)
            for _ in range(2):
                run.step()
            handle.wait()
            assert exported(manager) == wanted
            manager.load(step=1)


def exported(manager: CheckpointManager) -> dict[str, bytes]:
    folder = hf_folder(manager)
    dist.barrier()
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def hf_folder(manager: CheckpointManager) -> Path:
    return manager.root / "global_steps_1" / manager.role / "huggingface"


@case
def a_model_comes_from_rank_0() -> None:
    with closing(run.manager("rank0", save_contents=WITH_EXPORT)) as manager:
        manager.save(1)
        before = weights()
        run.step()
        assert differing(before, weights())
        with pytest.MonkeyPatch.context() as patch:
            # With NCCL, these make a communicator for each pair of ranks.
            for name in ("send", "recv"):
                patch.delattr(dist, name)
            load_hf(run.model, hf_folder(manager), source="rank0")
        assert not differing(before, weights())


@case
def capture_while_memory_is_prepared() -> None:
    manager = run.manager("prepare", async_save=True)
    with emulation.capturing() as capture:
        preparation(manager)._thread.join()
    assert preparation(manager).ready == preparation(manager)._wanted
    assert capture.is_valid, emulation.unsafe_calls()
    manager.save(1).wait()
    manager.close()


@case
def capture_under_training_lazy() -> None:
    capture_under_training("lazy")


@case
def capture_under_training_snapshot() -> None:
    capture_under_training("snapshot")


def capture_under_training(mode: str) -> None:
    manager = run.manager(mode + "-capture", async_save=True, async_mode=mode)
    handle = manager.save(1)
    with emulation.capturing() as capture:
        if mode == "lazy":
            manager.before_step()  # copies are under way: the host waits for them, because a capture cannot
        handle.wait()
    assert capture.is_valid, emulation.unsafe_calls()
    manager.close()


@case
def no_call_after_a_snapshot() -> None:
    """Once the trainer's thread has copied the state, no other thread calls CUDA."""
    manager = run.manager("quiet", async_save=True)
    manager.save(1).wait()
    run.step()
    before = calls_of_our_threads()
    manager.save(2).wait()
    assert calls_of_our_threads() == before, (calls_of_our_threads(), before)
    manager.close()


def calls_of_our_threads() -> dict[str, str]:
    """Counts them by name, without that for which `save` itself waits before it reads numbers of the GPU."""
    counted = {line[2]: line[3] for line in emulation.report() if line[:2] == ["call", "ours"]}
    counted.pop("cudaDeviceSynchronize", None)
    return counted


@case
def the_host_waits_with_a_deadline_before_it_reads_numbers() -> None:
    """Of the trainer's own state, of the optimizer's steps, of all replicas, and of the rotary embedding."""
    waits: list[int] = []
    weight = next(run.model[0].parameters())
    replicas = [ReplicatedTensors("label", ("weight",), (weakref.ref(weight),), True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "wait_for_device", lambda gpu, seconds: waits.append(gpu))
        for read in (
            lambda: copy_tensor(torch.ones(2), "positions"),
            lambda: optimizer_parts(run.optimizer)[0].steps(),
            lambda: take_samples(replicas, "attempt", True, {}),
            lambda: read_facts(run.model),
        ):
            before = len(waits)
            read()
            assert len(waits) > before, read.__code__.co_names


@case
def hold_in_a_capture() -> None:
    manager = run.manager("hold", async_save=True, async_mode="lazy")
    manager.save(1).wait()
    with emulation.capturing() as capture:
        manager.before_step()
    assert capture.is_valid, emulation.unsafe_calls()
    manager.close()


@case
def tensors_outlive_the_manager() -> None:
    manager = run.manager("close", async_save=True, async_mode="lazy")
    manager.save(1).wait()
    assert emulation.recorded
    manager.close()
    assert not any(library.emulated_stream_is_dead(stream) for _, stream in emulation.recorded)


@case
def one_context() -> None:
    """No thread of ours makes a context on another GPU than the rank's, with an export in line, a load, or a tool."""
    for mode in ("snapshot", "lazy", "sync"):
        fields = {"async_save": mode != "sync", "async_mode": "lazy" if mode == "lazy" else "snapshot"}
        with closing(run.manager(f"context-{mode}", save_contents=WITH_EXPORT, **fields)) as manager:
            manager.save(1).wait()
            manager.load(step=1)
        gc.collect()
    assert emulation.contexts() == {run.gpu}, emulation.report()


@case
def what_is_prepared_is_used() -> None:
    manager = run.manager("estimate", async_save=True)
    prepared = preparation(manager)
    prepared._thread.join()
    buffer = manager._context.host_images._memory._buffer
    manager.save(1).wait()
    assert preparation(manager) is prepared  # a save that needs more memory ends it
    assert manager._context.host_images._memory._buffer is buffer
    manager.close()


@case
def nothing_is_pinned_for_the_host() -> None:
    """All of the state is offloaded, on a machine that has GPUs."""
    on_gpu, emulation.is_on_gpu = emulation.is_on_gpu, lambda tensor: False
    before = times_pinned()
    with closing(run.manager("host", async_save=True)) as manager:
        manager.save(1).wait()
        manager.load(step=1)
    merge(MergeRequest(manager.root / "global_steps_1" / "actor", FOLDER / "merged"))
    assert times_pinned() == before
    emulation.is_on_gpu = on_gpu


@case
def kernels_are_queued_before_copies() -> None:
    """With one connection to the GPU, the training's kernels would otherwise wait for the large copies in between."""
    copier, large = _native.DeviceCopier(run.gpu, _native.side_stream(run.gpu)), 4 << 20
    sizes = [16, large, 32, large, large, 64]
    sources = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    offsets = [0, *itertools.accumulate(sizes)][:-1]
    buffer = _native.HostBuffer(sum(sizes), device=run.gpu)
    emulation.queued()
    addresses = [source.data_ptr() for source in sources]
    groups = copier.start(buffer, offsets, addresses, sizes, 0, large)
    assert emulation.queued() == "k" + 3 * "c"
    assert len(groups) == 3
    copier.wait(10.0)
    assert bytes(memoryview(buffer)) == bytes([1]) * sum(sizes)


@case
def memory_is_pinned_in_pieces() -> None:
    """The driver holds a lock while it pins, which the training may want."""
    before, nbytes = times_pinned(), _native.HostBuffer.PIN_BYTES + 4096
    buffer = _native.HostBuffer(nbytes, device=run.gpu)
    assert buffer.pinned_bytes == nbytes
    assert times_pinned() - before == 2


def times_pinned() -> int:
    return sum(int(line[3]) for line in emulation.report() if line[0] == "call" and line[2] == "cudaHostRegister")


@case
def a_stuck_gpu_has_a_deadline() -> None:
    """Copies are stuck behind a collective. `wait`, `save`, `close` and the exit of the interpreter end."""
    manager = run.manager("stuck", async_save=True, async_mode="lazy", timeout_s=3.0)
    other = run.manager("stuck-sync", timeout_s=3.0)
    idle = run.manager("stuck-idle", async_save=True, async_mode="lazy", timeout_s=3.0)
    idle.save(1).wait()
    library.emulated_stick(1)
    handle = manager.save(1)
    assert_hangs(lambda: handle.wait(60))
    assert_hangs(lambda: manager.save(2))
    assert_hangs(manager.close)
    assert_hangs(lambda: other.save(3))
    assert_hangs(lambda: run.manager("stuck", timeout_s=3.0))  # it is told before the first save
    idle.close()  # it has copies no more, but pinned memory, which cannot be unpinned now
    TrainerLock(manager.root, manager.role).take(patience_s=0)  # the lock was released


def assert_hangs(call: Callable[[], object]) -> None:
    with pytest.raises(CommitError, match="rank 0: GPU 0 has not done its work for 3 s:"):
        call()


@case
def exit_with_a_stuck_gpu() -> None:
    manager = run.manager("exit", async_save=True, async_mode="lazy", timeout_s=2.0)
    library.emulated_stick(1)
    manager.save(1)
    sys.exit(7)


@case
def a_fault_closes_everything() -> None:
    """After an error that stays, `close` raises it and still releases the lock, and this node serves no longer."""
    tier = FastTier(FOLDER / "fault-node", replicas=0, durable_every=1)
    manager = run.manager("fault", async_save=True, async_mode="lazy", timeout_s=10.0, fast=tier)
    manager.save(1).wait()

    def locks() -> list[Path]:
        roots = manager.root, FOLDER / "fault-node"
        return [path for root in roots for path in root.rglob(trainer_file(root, manager.role).name)]

    host, port = manager._tier.server.address.rsplit(":", 1)  # type: ignore[union-attr]
    socket.create_connection((host, int(port))).close()
    assert locks()
    library.emulated_fault_after(3)
    handle = manager.save(2)
    with pytest.raises(CheckpointError, match="illegal memory access"):
        handle.wait()
    with pytest.raises(CheckpointError, match="illegal memory access"):
        manager.close()
    assert not locks()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


@case
def a_build_without_cuda_is_refused_at_once() -> None:
    class Refusing:
        def __init__(self, device: int, stream: int) -> None:
            raise RuntimeError(
                "mcore_ckpt cannot copy GPU tensors: it was built without CUDA, because there was no nvcc"
            )

    ours, _native.DeviceCopier = _native.DeviceCopier, Refusing  # type: ignore[misc,assignment]
    with pytest.raises(UnsupportedError, match="cannot copy GPU tensors: it was built without CUDA"):
        run.manager("refused", async_save=True)
    _native.DeviceCopier = ours  # type: ignore[misc]


def preparation(manager: CheckpointManager) -> Any:
    return manager._context.host_images._memory._preparation


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = Training()
    for name in sys.argv[2:]:
        started = time.perf_counter()
        CASES[name]()
        sys.stdout.write(f"{name}: {time.perf_counter() - started:.1f} s\n")
        sys.stdout.flush()
    assert emulation.contexts() <= {run.gpu}, emulation.report()
