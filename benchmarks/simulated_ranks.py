"""Lets a few processes stand for all ranks of a large run: they talk to rank 0 as real ranks do, without a training.

Rank 0 runs the package's own code: the rounds of a save, the commit, the listing, the retention, and a load's plan. A
*crowd* stands for many other ranks. For each of them it uses a real `Agreement` and sends the report that a real rank
would send. Only the tensors, their bytes, and the waiting of each rank are left out.
"""

from __future__ import annotations

import hashlib
import operator
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from measuring import peak_memory, reset_peak_memory
from simulated import Layout, Model, Part, SavedFiles, write_sparse

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import IndexPlace, WrittenFile
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.locate import Located, Locator, Wanted
from mcore_ckpt.formats.native import file_plan, stored_tensors
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.native.replica_shares import Share
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.load.candidates import find_candidates
from mcore_ckpt.load.together import names_left_over, positions_taken
from mcore_ckpt.ranks import meeting
from mcore_ckpt.ranks.one_round import Round
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.ranks.topology import RankCoordinates, Replicas
from mcore_ckpt.save import new_manifest
from mcore_ckpt.save.new_manifest import build_manifest
from mcore_ckpt.save.rank_reports import NO_GROUPS, GroupMembers, RankReport, TensorNames, rank_report
from mcore_ckpt.save.replica_check import ReplicaReport, compare_replicas
from mcore_ckpt.save.root import PlaceInRoot
from mcore_ckpt.save.save_times import timeline_of
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey
from mcore_ckpt.state.group_matching import live_groups
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit, listing, tracker
from mcore_ckpt.steps.retention import PreservationPolicy, delete_step, too_old
from mcore_ckpt.steps.transaction import commit_together, open_together, record_of

HOST = "127.0.0.1"
TIMEOUT_S = 600.0
ROLE = "actor"
SMALL_FILE_BYTES = 20_000
# The groups of a usual run, as megatron-core 0.19 and torch's Adam make them.
GROUPS: list[dict[str, Any]] = [
    {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": 0.01,
        "min_lr": 0.0001,
        "lr": 0.005,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    for wd_mult in (1.0, 0.0)
]
KEYS = [[group.key for group in live_groups(GROUPS)]]

# What a rank says of its files in the opening round.
NEED = Need((10**9, 10**9, 40_000, 2_000), frozenset({"model/mp_rank_00_000", "optim", "rng_states", "extra_state"}))


class Barrier(Protocol):
    """The barrier of `threading`, or of `multiprocessing`."""

    def wait(self) -> int: ...


@dataclass(frozen=True)
class Case:
    """One simulated run: a model, its layout, and the layout of another run that loads the checkpoint."""

    model: Model
    layout: Layout
    other: Layout
    saves: int = 3

    @staticmethod
    def of(model: Model, world: int, saves: int = 3) -> Case:
        tp, pp, ep = _SIZES[world]
        ep = ep if model.experts else 1
        dp = world // tp // pp
        other = Layout(max(tp // 2, 1), max(pp // 2, 1), world // max(tp // 2, 1) // max(pp // 2, 1), max(ep // 2, 1))
        return Case(model, Layout(tp, pp, dp, ep), other, saves)

    def is_read(self, at: RankCoordinates) -> bool:
        """Returns True if the two ranks that plan a load may look into the files of this rank."""
        return at.pp <= self.layout.pp // self.other.pp - 1


# The sizes (tp, pp, ep) of each world, as large runs choose them.
_SIZES = {
    8: (2, 2, 4),
    64: (4, 4, 16),
    512: (8, 8, 64),
    1024: (8, 8, 64),
    2048: (8, 8, 64),
    4096: (8, 8, 64),
    8192: (8, 16, 128),
    16384: (8, 16, 128),
}
WORLDS = tuple(_SIZES)


# -- what is counted ---------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """The requests of one client of the store, but for those that only ask whether keys are there, and their bytes."""

    requests: int = 0
    polls: int = 0
    sent: int = 0
    received: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, vars(self).values(), vars(earlier).values()))

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, vars(self).values(), vars(other).values()))

    def copy(self) -> Traffic:
        return Traffic(**vars(self))


class CountingStore:
    """A client of the store that counts its requests and the bytes of keys and values."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.traffic = Traffic()

    def _request(self, *sent: str | bytes) -> None:
        self.traffic.requests += 1
        self.traffic.sent += sum(map(len, sent))

    def _received(self, value: bytes) -> bytes:
        self.traffic.received += len(value)
        return value

    def set(self, key: str, value: str | bytes) -> None:
        self._request(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._request(key)
        return self._received(self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._request(*keys)
        return [self._received(value) for value in self._store.multi_get(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._request(*keys, *values)
        self._store.multi_set(keys, values)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._request(key, expected, value)
        return self._received(self._store.compare_set(key, expected, value))

    def delete_key(self, key: str) -> bool:
        self._request(key)
        return self._store.delete_key(key)

    def check(self, keys: Sequence[str]) -> bool:
        self.traffic.polls += 1
        return self._store.check(list(keys))

    def num_keys(self) -> int:
        return self._store.num_keys()


def client(port: int) -> CountingStore:
    """Returns a client of the store that another process, or this one, hosts."""
    return CountingStore(dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False))


class Phases:
    """The seconds that each phase of rank 0 takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **named)

        return call

    @contextmanager
    def watch(self, places: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Times functions of the package, given as (module or class, name, phase), while they are called by it."""
        kept = [(place, name, getattr(place, name)) for place, name, _ in places]
        for place, name, phase in places:
            setattr(place, name, self.timed(phase, getattr(place, name)))
        try:
            yield
        finally:
            for place, name, function in kept:
                setattr(place, name, function)


_COMMIT_PHASES = (
    (commit, "check_files", "check files"),
    (TensorNames, "in_order", "names"),
    (new_manifest, "build_manifest", "manifest"),
    (commit, "encode_readable", "encode and read back"),
    (commit, "sync_dir", "sync folders"),
    (commit, "write_file", "write"),
    (commit, "publish", "publish"),
)


class Pauses:
    """Finds out how long a training's thread is kept from running, on a thread that wants to run every millisecond."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - 0.001), now

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# -- rank 0 --------------------------------------------------------------------------------------------------


def trainer_of(root: Path, case: Case, agreement: Agreement) -> Trainer:
    """Returns what rank 0 of a simulated run knows of its training."""
    return Trainer(
        root=root,
        role=ROLE,
        chunks=(),
        optimizer=None,
        lr_scheduler=None,
        hf_config=None,
        processing_class=None,
        config=CheckpointConfig(save_contents=("model", "optimizer", "extra")),
        coordinates=RankCoordinates(),
        topology=case.layout.topology,
        replicas=Replicas(),
        stages=(),
        first_instance=True,
        vocab_size=None,
        gpu=None,
        agreement=agreement,
    )


class Rank0:
    """Rank 0 of a simulated run, with all of the package's own code that a commit and a load's plan need."""

    def __init__(self, case: Case, root: Path, port: int, barrier: Barrier) -> None:
        self._case, self._barrier = case, barrier
        self._store, self._commit_store = client(port), client(port)
        self.found: dict[str, Any] = {"meeting": {}, "saves": [], "load": {}}
        start, world = time.perf_counter(), case.layout.world
        barrier.wait()
        agreement, self._commits = (
            meeting.rendezvous_at(store, 0, world, name, TIMEOUT_S, name)
            for store, name in ((self._store, "trainer"), (self._commit_store, "commits"))
        )
        self.found["meeting"] = {"wall_s": time.perf_counter() - start, **vars(self._store.traffic)}
        self._trainer = trainer_of(root, case, agreement)
        self._names = TensorNames()
        self._own = Reporter(case, 0)

    def run(self) -> dict[str, Any]:
        for step in range(1, self._case.saves + 1):
            self.found["saves"].append(self._save(step))
        self.found["load"] = self._load()
        self._barrier.wait()
        return self.found

    def _save(self, step: int) -> dict[str, Any]:
        topic, role_dir = f"saving step {step}", self._trainer.root / f"global_steps_{step}" / ROLE
        found: dict[str, Any] = {"keys_before": self._store.num_keys()}
        before = self._store.traffic.copy(), self._commit_store.traffic.copy()
        self._barrier.wait()
        start = time.perf_counter()
        attempt = open_together(self._trainer.agreement, topic, role_dir)
        found["open_s"] = time.perf_counter() - start
        with_index = step == self._case.saves
        report = self._own.write(attempt.staging, with_index)
        adam = {"kind": "Adam", "param_groups": [dict(group) for group in GROUPS], "grad_scaler": None}
        common = {"optimizers": [adam], "lr_scheduler": None}
        phases = Phases()
        self._barrier.wait()
        base = reset_peak_memory()
        collected: list[float] = []

        def describe(records: Sequence[Record]) -> Any:
            collected.append(time.perf_counter())
            reports = list(map(RankReport.of, records))
            unused: Any = None  # the context and the request of a save, which the checks do not ask
            place = PlaceInRoot(unused, unused, attempt)
            contents = self._trainer.config.save_contents
            save = (step, (ROLE,), contents, reports)
            with phases.phase("describe"):
                assert not compare_replicas([report.replicas for report in reports])
                timeline = timeline_of([report.times for report in reports], (12_345_678, 13_456_789))
                manifest = build_manifest(self._trainer, self._names, place, common, KEYS, *save)
                return replace(manifest, save_timeline=timeline)

        with Pauses() as pauses, phases.watch(_COMMIT_PHASES):
            clocks = time.thread_time()
            commit_together(
                self._commits,
                topic,
                attempt,
                lambda _: report(self._names),
                describe,
                phases.timed("tracker", lambda: tracker.move_tracker(self._trainer.root, step, attempt.role_dir)),
            )
            self._own.committed(self._names)
            ended = time.perf_counter()
            with phases.phase("retention"):
                statuses = [each.having_seen(attempt.role_dir) for each in listing.list_steps(self._trainer.root)]
                old = too_old(statuses, PreservationPolicy(max_to_keep=2), step)
            found["cpu_s"] = time.thread_time() - clocks
        found |= {
            "collected_at": collected[0],
            "ended_at": ended,
            "retention_s": phases.seconds["retention"],
            "peak_bytes": peak_memory() - base,
            "longest_pause_s": pauses.longest,
            "phases": phases.seconds,
            "traffic": vars(self._store.traffic.since(before[0])),
            "commit_traffic": vars(self._commit_store.traffic.since(before[1])),
            "manifest_bytes": (role_dir / file_names.MANIFEST_FILE).stat().st_size,
        }
        for status in old:
            delete_step(status)
        return found

    def _load(self) -> dict[str, Any]:
        case, trainer, found = self._case, self._trainer, {}
        self._barrier.wait()
        listing._heads.clear()
        phases = Phases()
        with phases.phase("candidates"):
            chosen = decide(
                trainer.agreement,
                "finding a checkpoint",
                lambda: {"request": {}, "failure": None},
                lambda records: (
                    (same_everywhere([each["request"] for each in records], "the checkpoint to load") and {})
                    or find_candidates(trainer, None, None, None)
                ),
            )
        role_dir = Path(chosen["candidates"][0]["folder"])
        for name, wanted in (("the same layout", case.layout), ("another layout", case.other)):
            found[name] = plan_of_one_rank(role_dir, case.model, wanted)
        self._barrier.wait()
        reader = NativeReader.open(role_dir)
        locator = Locator(reader, RankPosition(trainer.topology, trainer.coordinates))
        taken = used(case, locator, self._own.files, 0)
        self._barrier.wait()
        base = reset_peak_memory()
        start = time.perf_counter()

        def check(records: Sequence[Record]) -> Record:
            with phases.phase("left over"):
                found["left_over"] = [
                    len(names_left_over(locator, [record["used"][kind] for record in records]))
                    for kind in ("model", "optimizer")
                ]
            return {}

        decide(trainer.agreement, "checking", lambda: {"attempt": "a", "used": taken, "new_moments": []}, check)
        found |= {
            "candidates_s": phases.seconds["candidates"],
            "check_s": time.perf_counter() - start,
            "left_over_s": phases.seconds["left over"],
            "check_peak_bytes": peak_memory() - base,
        }
        return found


def used(case: Case, locator: Locator, files: SavedFiles, rank: int) -> dict[str, Any]:
    """Returns what a rank tells rank 0 of the tensors that it takes from the checkpoint."""
    model, held = files.parts(rank)
    return {
        "model": positions_taken(locator, [ShardKey(part.name, MODEL) for part in model]),
        "optimizer": positions_taken(locator, [ShardKey(part.name, PARAM) for part in held]),
    }


def plan_of_one_rank(role_dir: Path, model: Model, wanted: Layout) -> dict[str, Any]:
    """Plans the load of the second rank of a layout, and measures that."""
    at = wanted.ranks()[1]
    model_parts = wanted.model_parts(model, at)
    held = wanted.optimizer_parts(model_parts, at)
    read: list[int] = []

    def read_entries(role_dir: Path, record: Any) -> Any:
        read.append(record.index.size)
        return own(role_dir, record)

    own, stored_tensors.read_entries = stored_tensors.read_entries, read_entries
    base = reset_peak_memory()
    start, clock = time.perf_counter(), time.thread_time()
    try:
        reader = NativeReader.open(role_dir)
        opened = time.perf_counter()
        located = _locate(Locator(reader, RankPosition(wanted.topology, at)), model_parts, held)
        files = {part.stored.file for each in located for part in each.reads}
        reader.folder.check([reader.file(path) for path in files])
    finally:
        stored_tensors.read_entries = own
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.thread_time() - clock,
        "manifest_s": opened - start,
        "tensors": len(located),
        "indexes": len(read),
        "index_bytes": sum(read),
        "peak_bytes": peak_memory() - base,
    }


def _locate(locator: Locator, model_parts: Sequence[Part], held: Sequence[Part]) -> list[Located]:
    wanted = [(part, MODEL) for part in model_parts]
    for part in held:
        wanted += [(part, kind) for kind in (PARAM, *locator.moments(part.name))]
    found = [locator.find(Wanted(ShardKey(part.name, kind), part.region, "here")) for part, kind in wanted]
    return [located for located in found if located is not None]


# -- all other ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedFile:
    """What a rank's report takes from a `FilePlan`."""

    path: str
    names: tuple[str, ...]
    share: Share
    structure: str = "0" * 32

    @cached_property
    def holds(self) -> str:
        return file_plan._digest(self.names)


class Reporter:
    """Writes one rank's files, without their bytes, and makes the rank's report."""

    def __init__(self, case: Case, rank: int, files: SavedFiles | None = None) -> None:
        self.files = files or SavedFiles(case.model, case.layout)
        self._rank, self._at = rank, self.files.ranks[rank]
        self._case = case
        self._saved = self.files.of(rank)
        self._plans = [
            PlannedFile(file.path, tuple(part.name for part in file.parts), Share(file.writers, ()))
            for file in self._saved
        ]
        names = next(
            plan.names for file, plan in zip(self._saved, self._plans, strict=True) if file.kind == "optimizer"
        )
        without_decay = [name for name in names if "norm" in name or name.endswith("bias")]
        with_decay = sorted({*names}.difference(without_decay))
        self._members = GroupMembers(({0: with_decay, 1: without_decay},))
        self._groups = NO_GROUPS

    def write(self, staging: Path, with_index: bool, number: int = 0) -> Callable[[TensorNames], Record]:
        """Makes the files, and returns what makes the report. Each `number` has other checksums and times."""
        written = []
        varied = hash((self._rank, number)) & 0xFFFFFFFF if number else 0
        for file, plan in zip(self._saved, self._plans, strict=True):
            if file.writers[-1] != self._rank:
                continue
            if with_index and self._case.is_read(self._at):
                size, place = write_sparse(staging, file)
            else:
                size, place = 4096, IndexPlace(2048, 1024, varied)
                _truncate(staging / file.path, size)
            written.append(WrittenFile(file.path, file.kind, size, 0xDEADBEEF ^ varied, place, plan.holds))
        for path, kind in (
            (file_names.rng_file(*self._at.place), "rng"),
            (file_names.extra_file(*self._at.place), "extra"),
        ):
            _truncate(staging / path, SMALL_FILE_BYTES)
            written.append(WrittenFile(path, kind, SMALL_FILE_BYTES, 0xDEADBEEF ^ varied))
        trainer: Any = _Told(self._at)

        later = varied % 9999
        spans = (12, 123_456, 123_456, 1_234_567 + later, 234_567, 12_345_678 + later)
        times = (*spans, 10_000_000_000, 1_345_678)

        def report(names: TensorNames) -> Record:
            self._groups = self._members.listed(KEYS)
            sent = names.to_send(self._plans, self._rank, self._groups)
            groups = self._groups.holds
            report = rank_report(trainer, written, self._plans, sent, [1], groups, self._replicas(), times)
            return report.to_record()

        return report

    def _replicas(self) -> ReplicaReport:
        """Returns what a rank tells of its replicas: CRCs of four tensors in each list, and the first one the names."""
        at = self._at
        lists = (f"dense of {at.tp}, {at.pp}", f"experts of {at.etp}, {at.pp}, {at.ep}", f"norms of {at.pp}")
        labels = [hashlib.sha256(text.encode()).hexdigest()[:13] for text in lists]
        names = tuple(f"decoder.layers.{n}.mlp.experts.local_experts.{n}.linear_fc1.weight" for n in range(4))
        return ReplicaReport(
            dict.fromkeys(labels, (0x89ABCDEF, 0x9ABCDEF0, 0xABCDEF01, 0xBCDEF012)),
            dict.fromkeys(labels, names) if (at.dp, at.cp) == (0, 0) else {},
        )

    def committed(self, names: TensorNames) -> None:
        names.mark_sent([*self._plans, self._groups])


@dataclass(frozen=True)
class _Told:
    """What a rank's report takes from its trainer."""

    coordinates: RankCoordinates
    stages: tuple[Any, ...] = ()


def _truncate(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.truncate(descriptor, size)
    os.close(descriptor)


@dataclass
class Crowd:
    """Many ranks other than rank 0, in one process and with one client of the store.

    `seconds` is how long it asks the store without a pause at the end, to find out how many requests the store answers.
    """

    case: Case
    ranks: range
    root: Path
    port: int
    barrier: Barrier
    seconds: float = 1.0
    found: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """Takes part in all rounds, and returns what was counted in each save."""
        self._store = client(self.port)
        files = SavedFiles(self.case.model, self.case.layout)
        reporters = {rank: Reporter(self.case, rank, files) for rank in self.ranks}
        names = {rank: TensorNames() for rank in self.ranks}
        self.barrier.wait()
        trainers, commits = self._meet("trainer"), self._meet("commits")
        for step in range(1, self.case.saves + 1):
            self.found.append(self._save(step, trainers, commits, reporters, names))
        self._load(trainers, files)
        self.barrier.wait()
        self.found.append({"polls_per_s": polls_per_second(self.port, self.seconds)})
        return self.found

    def _meet(self, namespace: str) -> dict[int, Agreement]:
        """Does for all ranks what `meeting._meet_rank_0` does for each, in its order."""
        store, words = self._store, {rank: uuid.uuid4().hex for rank in self.ranks}
        _wait_for(lambda: store.check([f"{namespace}/call"]))
        name = store.get(f"{namespace}/call").decode()
        for rank, word in words.items():
            store.set(meeting._answer_key(namespace, name, rank), word)
        for rank, word in words.items():
            heard = meeting._heard_key(namespace, name, rank, word)
            _wait_for(lambda heard=heard: store.check([heard]))
            store.delete_key(heard)
            store.delete_key(meeting._answer_key(namespace, name, rank))
        world = self.case.layout.world
        return {rank: Agreement(store, rank, world, f"{namespace}/{name}", TIMEOUT_S) for rank in self.ranks}

    def _save(
        self,
        step: int,
        trainers: dict[int, Agreement],
        commits: dict[int, Agreement],
        reporters: dict[int, Reporter],
        names: dict[int, TensorNames],
    ) -> dict[str, Any]:
        topic, role_dir = f"saving step {step}", self.root / f"global_steps_{step}" / ROLE
        self.barrier.wait()
        request = {"folder": str(role_dir), "busy": False, "failure": None, "need": record_of(NEED), "parts": []}
        opening = self._round(trainers, topic, None, lambda _: request)
        number = opening.outcome["attempt"]
        staging = file_names.staging_dir(role_dir, number)
        reports = {rank: each.write(staging, step == self.case.saves) for rank, each in reporters.items()}
        self.barrier.wait()
        committing = self._round(commits, topic, number, lambda rank: reports[rank](names[rank]))
        for rank, each in reporters.items():
            each.committed(names[rank])
        return {"opening": asdict(opening), "committing": asdict(committing)}

    def _load(self, trainers: dict[int, Agreement], files: SavedFiles) -> None:
        self.barrier.wait()
        found = self._round(trainers, "finding", None, lambda _: {"request": {}, "failure": None})
        role_dir = Path(found.outcome["candidates"][0]["folder"])
        # Rank 0 plans alone, because real ranks have processors of their own.
        self.barrier.wait()
        locator = Locator(NativeReader.open(role_dir), None)
        taken = {rank: used(self.case, locator, files, rank) for rank in self.ranks}
        self.barrier.wait()
        self._round(trainers, "checking", None, lambda rank: {"attempt": "a", "used": taken[rank], "new_moments": []})

    def _round(
        self, agreements: dict[int, Agreement], topic: str, name: str | None, record: Callable[[int], Record]
    ) -> RoundOfCrowd:
        rounds: dict[int, Round] = {}
        traffic: dict[int, Traffic] = {}
        slowest = 0.0
        for rank, agreement in agreements.items():
            start, before = time.perf_counter(), self._store.traffic.copy()
            rounds[rank] = agreement.begin(topic, name)
            rounds[rank].submit(record(rank))
            slowest = max(slowest, time.perf_counter() - start)
            traffic[rank] = self._store.traffic.since(before)
        submitted = time.perf_counter()
        outcome: Record = {}
        told = 0.0
        for number, (rank, each) in enumerate(rounds.items()):
            start, before = time.perf_counter(), self._store.traffic.copy()
            outcome = each.outcome(CommitError)
            # The first one waits for all others, too.
            told = max(told, time.perf_counter() - start) if number else 0.0
            now = self._store.traffic.since(before)
            traffic[rank] = Traffic(
                *(a + b for a, b in zip(vars(traffic[rank]).values(), vars(now).values(), strict=True))
            )
        most = {
            name: max(getattr(each, name) for each in traffic.values()) for name in ("requests", "sent", "received")
        }
        return RoundOfCrowd(submitted, slowest + told, most, outcome)


@dataclass(frozen=True)
class RoundOfCrowd:
    """One round of a crowd's ranks.

    Attributes:
        submitted_at: when the last of them had submitted.
        slowest_s: how long a rank works at most in this round, besides its waits.
        most: the most requests, bytes sent and bytes received of one rank.
        outcome: what rank 0 announced.
    """

    submitted_at: float
    slowest_s: float
    most: dict[str, int]
    outcome: Record


def polls_per_second(port: int, seconds: float, clients: int = 4) -> float:
    """Returns how many requests of waiting ranks the store answers in a second, if clients ask without a pause."""
    counts = [0] * clients

    def ask(number: int) -> None:
        store, ends = client(port), time.perf_counter() + seconds
        while time.perf_counter() < ends:
            store.check(["commits/0123456789abcdef/0123456789abcdef/done"])
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def _wait_for(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(0.002)
