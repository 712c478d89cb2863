"""One rank's part of one long life of a training: it loads what the life before has left, trains and saves for minutes.

Everything that a trainer may do with its managers is done in turn, drawn from a seed that all ranks share. What is
expected of the disk, and what the process has in use at each save, is written down in files that outlive it.
"""

import contextlib
import ctypes
import datetime
import gc
import json
import logging
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, pin, unpin
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointError, CheckpointNotFoundError
from mcore_ckpt.io import tuning
from mcore_ckpt.load.report import LoadResult
from mcore_ckpt.recover import recover
from mcore_ckpt.save.background import SaveHandle
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.listing import complete_steps
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.retention import PreservationPolicy
from mcore_ckpt.tools.maintain.prune import prune
from tests.distributed.agreement import gather
from tests.distributed.global_state import global_state
from tests.distributed.hf_words import hf_config
from tests.distributed.snapshot import poison, snapshot
from tests.distributed.training import Layout, build, parallel, train
from tests.faults.soak.usage import Usage, usage
from tests.support.lives import connect, digest, note, notes

# The same model and sequences under every layout.
_SAME = Layout(
    2,
    padded_vocab=144,
    global_batch=4,
    dropout=0.0,
    num_layers=4,
    experts=4,
    precision="bf16",
    distributed_optimizer=True,
)
LAYOUTS = {
    "dp2": _SAME,
    "ep2": replace(_SAME, ep=2),
    "tp2": replace(_SAME, tp=2),
    "tp2-ep2-etp1": replace(_SAME, tp=2, ep=2, etp=1),
    "pp2": replace(_SAME, pp=2),
    "pp2-vpp2": replace(_SAME, pp=2, vpp=2),
    "one": replace(_SAME, world=1),
}
# The roles of each root. One root has a remote store, the other one's steps can hold a HuggingFace model.
PAIR, SINGLE = "pair", "single"
ROOTS = {PAIR: ("actor", "critic"), SINGLE: ("actor",)}

# Of a busy machine, too: only a death may let a deadline pass.
TIMEOUT_S = 20.0
# Far above any deadline here: a rank that hangs must fail the run, not the machine.
ALARM_S = 150
# Pins, and steps that keep_every keeps, go at each so manieth save, so that a quarter of a life has such moments.
PRUNED_EVERY = 6
LEAKS = ("memory", "threads", "descriptors", "keys", "files")
LEAKED_BYTES = 256 << 10


@dataclass(frozen=True)
class Fault:
    """As of tests/faults/disks/shim.c: the first `times` calls on files whose path ends with `file` fail with `number`.

    `refuses`: a save in which it is met fails. Otherwise nobody must notice. Only `rank` has it, or all ranks.
    """

    call: str
    number: int
    file: str
    refuses: bool = True
    times: int = 1 << 30
    rank: int | None = None


_EIO, _ENOSPC, _EMFILE, _EINTR, _EINVAL = 5, 28, 24, 4, 22
FAULTS = (
    Fault("pwritev", _ENOSPC, ".pt"),
    Fault("pwritev", _EIO, ".pt", times=1, rank=0),
    Fault("pwritev", _EIO, ".pt", times=1, rank=1),
    Fault("fdatasync", _EIO, ".pt", rank=1),
    Fault("fallocate", _ENOSPC, ".pt", rank=0),
    Fault("open", _EMFILE, ".pt", rank=1),
    Fault("write", _ENOSPC, ".pt"),
    Fault("write", _ENOSPC, f"/{file_names.MANIFEST_FILE}"),
    Fault("rename", _EIO, "/actor"),
    Fault("rename", _EIO, f"{PAIR}/{file_names.TRACKER_FILE}", refuses=False),
    Fault("pwritev", 0, ".pt", refuses=False),
    Fault("write", 0, ".pt", refuses=False),
    Fault("write", 0, ".json", refuses=False),
    Fault("pwritev", _EINTR, ".pt", refuses=False, times=5),
    Fault("open_direct", _EINVAL, ".pt", refuses=False),
    Fault("pwritev_direct", _EINVAL, ".pt", refuses=False),
)
SLOW_US = 2000


@dataclass(frozen=True)
class SoakedLife:
    """`seconds`: until it closes its managers, unless it is killed before. `every_s`: from save to save.

    `roots` are saved to in turn. `exchanges`: folders can be swapped in one step. `background`: saves are async.
    `leaks`: what it leaks at each save, to see that this is found.
    """

    number: int
    seed: str
    folder: str
    port: int
    seconds: float
    layout: str = "dp2"
    roots: tuple[str, ...] = (PAIR,)
    every_s: float = 1.0
    background: bool = False
    exchanges: bool = True
    hf_model: bool = False
    max_to_keep: int = 2
    keep_every: int | None = None
    leaks: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout].world

    def report(self, rank: int) -> Path:
        return Path(self.folder, f"life{self.number}.rank{rank}.json")

    def samples(self, rank: int) -> Path:
        return Path(self.folder, f"life{self.number}.samples{rank}")


def root_of(folder: str | Path, name: str) -> Path:
    return Path(folder, "disk", name)


def ledger(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"ledger.{rank}")


@dataclass(frozen=True)
class Seat:
    """One role below one root."""

    root: str
    manager: CheckpointManager

    @property
    def name(self) -> str:
        return f"{self.root}/{self.manager.role}"


def run_rank(life: SoakedLife, rank: int, ready: int) -> NoReturn:
    """A whole life. Writes to `ready` when it begins to deal with checkpoints."""
    signal.alarm(ALARM_S)
    report: dict[str, Any] = {"error": None, "in": "setting up", "logged": []}
    logging.root.handlers = [_Unexpected(report["logged"])]
    try:
        if not life.exchanges:
            commit._exchange = lambda first, second: False
        with ledger(life.folder, rank).open("a", buffering=1) as book:
            _Rank(life, rank, book, report).live(ready)
        report["in"] = ""
    except BaseException as error:
        report["error"] = [type(error).__name__, str(error), traceback.format_exc()]
        report["is_gloo"] = isinstance(error, RuntimeError)
    life.report(rank).write_text(json.dumps(report))
    # Not through torch's farewell, which waits for the dead.
    os._exit(0)


class _Unexpected(logging.Handler):
    """Keeps what was logged with a traceback. Warnings of what this life does on purpose are dropped."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__()
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        if "Traceback (most recent call last)" in text:
            self._kept.append(text)


class _Rank:
    def __init__(self, life: SoakedLife, rank: int, book: Any, report: dict[str, Any]) -> None:
        self._life = life
        self._rank = rank
        self._book = book
        self._report = report
        self._draw = random.Random(f"{life.seed} {life.number}")
        self._shim = ctypes.CDLL(None)
        self._pending: list[tuple[SaveHandle, str, int, str]] = []
        self._seats: list[Seat] = []
        self._saves = 0
        self._step = 0
        self._cycles = 0
        self._unpinned = contextlib.ExitStack()  # readers of steps that were just unpinned
        self._leaked: list[Any] = []

    def live(self, ready: int) -> None:
        life = self._life
        tuning.SHARE_BYTES = tuning.WRITE_BYTES = 4096
        # Set once: later changes replace the text, and native threads may read it at any time.
        os.environ["FAULT"] = os.environ["SLOW"] = "none"
        timeout = datetime.timedelta(seconds=ALARM_S / 2)
        store = connect(life.port, life.number)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=life.world, timeout=timeout)
        with parallel(LAYOUTS[life.layout]):
            self._training = build(LAYOUTS[life.layout], seed=1 + life.number)
            dist.barrier()
            os.write(ready, b"x")
            started = time.monotonic()
            self._open()
            self._resume()
            gc.collect()
            gc.freeze()  # else each collection looks at all of torch and megatron
            with life.samples(self._rank).open("a", buffering=1) as samples:
                while self._goes_on(started):
                    signal.alarm(ALARM_S)
                    until = time.monotonic() + life.every_s
                    self._act()
                    self._tidy()
                    time.sleep(max(0.0, until - time.monotonic()))
                    self._settle()
                    self._leak(store)
                    self._sample(samples, store, started)
            self._report["in"] = "close"
            for seat in self._seats:
                seat.manager.close()

    def _goes_on(self, started: float) -> bool:
        self._report["in"] = "training"
        return bool(self._told_by_rank_0(time.monotonic() - started < self._life.seconds))

    def _told_by_rank_0(self, value: Any) -> Any:
        self._report["in"] = "training"
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    # -- managers ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._report["in"] = "start"
        life, training = self._life, self._training
        for root in life.roots:
            contents = ("model", "optimizer", "extra", *(["hf_model"] if life.hf_model and root == PAIR else []))
            for role in ROOTS[root]:
                config = CheckpointConfig(
                    timeout_s=TIMEOUT_S,
                    async_save=life.background,
                    max_to_keep=life.max_to_keep,
                    # In the remote store, from which no command deletes them, they would be more and more.
                    keep_every=life.keep_every if root == PAIR else None,
                    roles=ROOTS[root],
                    save_contents=contents,
                    remote=f"file://{root_of(life.folder, 'remote')}" if root == SINGLE else None,
                    upload_timeout_s=ALARM_S / 3,
                )
                manager = CheckpointManager(
                    root_of(life.folder, root),
                    training.model,
                    training.optimizer,
                    training.scheduler,
                    role=role,
                    hf_config=hf_config(training.layout) if life.hf_model else None,
                    config=config,
                )
                self._seats.append(Seat(root, manager))

    def _resume(self) -> None:
        """From the first root: in one call for all roles, or, of a single role, by itself."""
        first = [seat for seat in self._seats if seat.root == self._life.roots[0]]
        if self._told_by_rank_0(first[0].manager.latest_step()) is None:
            return
        poison(self._training)
        self._report["in"] = "load"
        if len(first) == 1:
            results = {first[0].name: first[0].manager.load()}
        else:
            recovery = recover([seat.manager for seat in first])
            results = {seat.name: recovery.results[seat.manager.role] for seat in first}
        self._check_loaded(results)
        self._did("restarts")

    # -- what is done in turn --------------------------------------------------------------------------------------

    def _act(self) -> None:
        action = self._draw.choices(
            [self._next, self._again, self._roll_back, self._under_fault, self._at_once, self._slowly],
            [50, 12, 6, 14, 12, 6],
        )[0]
        action()

    def _next(self) -> None:
        self._train()
        self._save()

    def _again(self) -> None:
        if self._step:
            self._did("saved again")
            self._save()

    def _at_once(self) -> None:
        """A save while another may be under way."""
        self._next()
        self._next()

    def _slowly(self) -> None:
        self._did("slow saves")
        self._train()
        with _environment("SLOW", f"{SLOW_US} {self._life.folder}/disk"):
            self._save()
            self._settle()

    def _roll_back(self) -> None:
        """To the oldest step that is there, in the middle of a life. The later ones are saved again when it comes."""
        root = self._life.roots[0]
        roles = set(ROOTS[root])
        complete = complete_steps(root_of(self._life.folder, root)) if self._rank == 0 else []
        step = self._told_by_rank_0(next((each.step for each in complete if roles <= each.committed), None))
        if step is None:
            return
        self._settle()
        # Retention may delete it at any time: a step that is gone is one error on all ranks, and nothing has changed.
        poison_after = self._digests()
        try:
            self._report["in"] = "load"
            results = {seat.name: seat.manager.load(step=step) for seat in self._seats if seat.root == root}
        except CheckpointNotFoundError:
            assert self._digests() == poison_after, "a load that found nothing has changed something"
            return
        self._check_loaded(results)
        self._did("rollbacks")

    def _under_fault(self) -> None:
        fault = self._draw.choice(FAULTS)
        self._train()
        before = self._digests()
        self._shim.fault_hits()
        raised: dict[str, CheckpointError] = {}
        text = f"{fault.call} {fault.number} 0 {fault.times} {fault.file}"
        with _environment("FAULT", text if fault.rank in (None, self._rank) else "none"):
            for work in (self._save_in, self._settle_in):
                for seat in self._seats:
                    with self._caught(seat, raised):
                        work(seat, before)
        self._report["in"] = "training"
        hits = sum(gather(self._shim.fault_hits()))
        types = {name: type(error).__name__ for name, error in raised.items()}
        fails = bool(fault.refuses and hits)
        told = f"{fault}, met {hits} times, has raised {raised}"
        assert gather(types) == [types] * self._life.world, told
        assert set(types.values()) == ({"CommitError"} if fails else set()), told
        assert self._digests() == before, f"{fault} has changed the state of the training"
        self._did("faults met", int(hits > 0))
        self._did("saves refused", len(raised))
        # What was refused is saved in the next moment, by the same managers.
        self._save()

    def _tidy(self) -> None:
        """Pins that come and go, and what an operator does beside the training."""
        self._cycles += 1
        if self._rank:
            return
        for root in (root_of(self._life.folder, name) for name in self._life.roots):
            with contextlib.suppress(CheckpointNotFoundError):  # retention was faster
                steps = complete_steps(root)
                phase = self._cycles % PRUNED_EVERY
                if phase == 1 and steps:
                    pin(root, steps[0].step)
                    self._did("pins")
                # Long before the step is deleted: a pin that the remote store has stays there with a step that only the
                # store has left. A reader keeps `prune` from it until commits have seen it unpinned.
                for status in steps:
                    if phase == PRUNED_EVERY // 2 and status.pinned:
                        self._unpinned.enter_context(reading(map(status.role_dir, status.committed)))
                        unpin(root, status.step)
                if phase == 0:
                    self._unpinned.close()
                    prune(root, PreservationPolicy(self._life.max_to_keep))
                    self._did("prunes")

    # -- training, saving, loading -----------------------------------------------------------------------------------

    def _train(self) -> None:
        self._report["in"] = "training"
        train(self._training, self._step, self._step + 1)
        self._step += 1

    def _save(self) -> None:
        digests = self._digests()
        for seat in self._seats:
            self._save_in(seat, digests)

    def _settle(self) -> None:
        """Until nothing is under way. Raises what a save in the background has failed with."""
        for seat in self._seats:
            self._settle_in(seat)

    def _save_in(self, seat: Seat, digests: tuple[str, str]) -> None:
        self._saves += 1
        number = f"{self._life.number}.{self._saves}"
        self._note("saving", seat.name, self._step, number, self._life.layout, *digests)
        self._report["in"] = "save"
        handle = seat.manager.save(self._step, extra_state={"save": number, "step": self._step})
        self._pending.append((handle, seat.name, self._step, number))

    def _settle_in(self, seat: Seat, digests: tuple[str, str] | None = None) -> None:
        own = [each for each in self._pending if each[1] == seat.name]
        self._pending = [each for each in self._pending if each[1] != seat.name]
        self._report["in"] = "save"
        seat.manager.wait()
        for handle, name, step, number in own:
            handle.wait()
            self._note("committed", name, step, number)

    def _digests(self) -> tuple[str, str]:
        """Of this rank's state, and of the whole training's tensors, which no layout changes."""
        self._report["in"] = "training"
        return digest(snapshot(self._training)), digest(global_state(self._training))

    def _check_loaded(self, results: dict[str, LoadResult]) -> None:
        """What was loaded last is what was saved, bit for bit, and the other roles are of the same step."""
        steps = {result.step for result in results.values()}
        assert len(steps) == 1, f"roles of several steps: {steps}"
        (self._step,) = steps
        local, whole = self._digests()
        name, result = list(results.items())[-1]
        extra = result.extra_state
        assert extra is not None, result
        assert not result.report.skipped, result.report.skipped
        own, first = (self._saved(rank, name, extra["save"]) for rank in (self._rank, 0))
        assert first is not None, f"{name} step {self._step}: nobody knows save {extra['save']}"
        assert whole == first[6], f"{name} step {self._step}: not what was saved by {first}"
        if own is not None and own[4] == self._life.layout:
            assert local == own[5], f"{name} step {self._step}: this rank's part is not what was saved by {own}"
            self._did("loads of the same layout")
        else:
            self._did("loads of another layout")

    def _saved(self, rank: int, name: str, number: str) -> list[Any] | None:
        for each in notes(ledger(self._life.folder, rank)):
            if each[0] == "saving" and (each[1], each[3]) == (name, number):
                return each
        return None

    def _did(self, what: str, times: int = 1) -> None:
        self._note("did", self._life.number, what, times)

    def _note(self, *what: Any) -> None:
        note(self._book, *what)

    @contextlib.contextmanager
    def _caught(self, seat: Seat, raised: dict[str, CheckpointError]) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raised[seat.name] = error

    # -- what it uses ------------------------------------------------------------------------------------------------

    def _sample(self, samples: Any, store: Any, started: float) -> None:
        gc.collect()
        disk = Path(self._life.folder, "disk")
        found: Usage = usage(store, disk)
        note(samples, time.monotonic() - started, self._saves, *found)

    def _leak(self, store: Any) -> None:
        leaks = self._life.leaks
        if "memory" in leaks:
            self._leaked.append(bytearray(os.urandom(1)) * LEAKED_BYTES)
        if "threads" in leaks:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if "descriptors" in leaks:
            self._leaked.append(os.open("/dev/null", os.O_RDONLY))
        if "keys" in leaks and self._rank == 0:
            store.set(f"leaked/{self._saves}", b"")
        if "files" in leaks and self._rank == 0 and self._saves:
            root_of(self._life.folder, self._life.roots[0]).joinpath(f"leaked.{self._saves}").touch()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ[name] = "none"
