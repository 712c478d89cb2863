"""Several ranks write one file: the bytes are those of a file that one rank has written, or all get an error."""

import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_ckpt.checkpoint.index import BLOCK_BYTES
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.native.file_plan import StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.io.checksums import file_crcs
from mcore_ckpt.io.host_memory import HostMemory
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.save.capture import FileTensors, arena_bytes, capture_copies, capture_in_place
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps.commit import check_structures
from tests.support.checkpoints import write_alone
from tests.support.rank_threads import SLACK_S, on_threads
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.slow

PATH = "model/mp_rank_00_000/model_states.pt"
TOPIC = "saving step 7"

SHORT_S = 0.5

# Around the pages that ranges end on, and around CRC blocks.
PAGE = 4096
SIZES = [0, 1, 7, PAGE - 1, PAGE, 3 * PAGE + 5, 20 * PAGE, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 9]


def request_of(sizes: Sequence[int], writers: tuple[int, ...] = (), path: str = PATH) -> WriteRequest:
    writes = []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(size)
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        key = ShardKey(f"t{number}", "model")
        writes.append(TensorWrite((key.name,), key, Region.whole((size,)), tensor, (size,)))
    return WriteRequest(path, "model", tuple(writes), writers=writers)


Part = Callable[[Agreement], Record]


class Ranks:
    """Ranks as threads over one store."""

    def __init__(self, world: int, timeout_s: float = LONG_S) -> None:
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.agreements = [Agreement(self.store, rank, world, "test", timeout_s) for rank in range(world)]

    def __call__(self, parts: dict[int, Part]) -> dict[int, Any]:
        """One round, in which a rank that is not in `parts` is dead. What each got, or what it raised."""

        def one(rank: int, part: Part) -> Record:
            agreement = self.agreements[rank]
            return decide(agreement, TOPIC, lambda: part(agreement), committed, CommitError)

        return on_threads({rank: partial(one, rank, part) for rank, part in parts.items()})


def tensors_of(requests: Sequence[WriteRequest]) -> list[FileTensors]:
    return [FileTensors.of([write.tensor for write in request.tensors]) for request in requests]


def writing(
    folder: Path, *requests: WriteRequest, copied: bool = False, written: list[WrittenFile] | None = None
) -> Part:
    """A rank's part: what of the files is its to write, from where the tensors are or from a copy."""

    def part(agreement: Agreement) -> Record:
        images = StructureCache()
        planned = [(plan_file(request, agreement.rank, images), request) for request in requests]
        planned = [(plan, request) for plan, request in planned if plan.nbytes]
        plans, own = [plan for plan, _ in planned], [request for _, request in planned]
        arena = HostMemory()
        if copied and plans:
            capture = capture_copies(plans, tensors_of(own), arena.take(arena_bytes(plans)), None)
        else:
            capture = capture_in_place(plans, tensors_of(own))
        with FileWriter(folder, capture.writes, agreement) as writer:
            writer.start()
            owned = writer.finish()
        if written is not None:
            written.extend(owned)
        return {"owned": [file.path for file in owned], "parts": {plan.path: plan.structure for plan in plans}}

    return part


def committed(records: Sequence[Record]) -> Record:
    check_structures([record.get("parts", {}) for record in records])
    return {"all": [{key: value for key, value in record.items() if key != "parts"} for record in records]}


def nothing(agreement: Agreement) -> Record:
    return {}


def after(event: threading.Event, part: Part) -> Part:
    def late(agreement: Agreement) -> Record:
        assert event.wait(LONG_S)
        return part(agreement)

    return late


def before(part: Part, event: threading.Event) -> Part:
    def early(agreement: Agreement) -> Record:
        try:
            return part(agreement)
        finally:
            event.set()

    return early


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from(SIZES), max_size=8),
    order=st.integers(1, 5).flatmap(lambda world: st.permutations(range(world))),
    copied=st.booleans(),
    data=st.data(),
)
def test_any_writers_write_what_one_would(
    sizes: list[int], order: list[int], copied: bool, data: st.DataObject, tmp_path: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    alone = write_alone(folder, request_of(sizes, path="alone/a.pt"))
    writers = tuple(data.draw(st.permutations(range(len(order)))))
    written: list[WrittenFile] = []
    part = writing(folder, request_of(sizes, writers), copied=copied, written=written)
    # One after the other, where nobody waits: the owner, which takes what the others give, may begin at any point.
    done = [threading.Event() for _ in order]
    parts: dict[int, Part] = {}
    for position, rank in enumerate(order):
        own = before(part, done[position]) if rank != writers[0] else part
        previous = [done[i] for i in range(position) if order[i] != writers[0]]
        parts[rank] = after(previous[-1], own) if previous else own
    results = Ranks(len(order))(parts)
    assert all(isinstance(result, dict) for result in results.values()), results
    assert (folder / PATH).read_bytes() == (folder / "alone/a.pt").read_bytes().replace(b"alone/a.pt", PATH.encode())
    assert written == [replace(alone, path=PATH)]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=8), world=st.integers(2, 4), copied=st.booleans())
def test_no_tensor_is_a_mixture_of_replicas_that_differ(
    sizes: list[int], world: int, copied: bool, tmp_path: Path
) -> None:
    """Each replica has other bytes everywhere. The file is sound, and each tensor in it is that of one replica."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    writers = tuple(range(world))

    def of_rank(rank: int) -> WriteRequest:
        request = request_of(sizes, writers)
        tensors = (replace(write, tensor=torch.full_like(write.tensor, rank + 1)) for write in request.tensors)
        return replace(request, tensors=tuple(tensors))

    written: list[WrittenFile] = []
    parts = {rank: writing(folder, of_rank(rank), copied=copied, written=written) for rank in writers}
    results = Ranks(world)(parts)
    assert all(isinstance(result, dict) for result in results.values()), results
    stored = torch.load(folder / PATH, weights_only=True)
    assert all(len(set(tensor.tolist())) <= 1 for tensor in stored.values())
    assert file_crcs([(folder / PATH, written[0].size)]) == [written[0].crc32]
    with zipfile.ZipFile(folder / PATH) as archive:
        assert archive.testzip() is None


def test_two_owners_of_each_others_files_do_not_wait_for_ever(tmp_path: Path) -> None:
    """Ranks 0 and 1 share two files, each owns one: as dense tensors and experts are shared."""
    sizes, other = [5 * PAGE, 9 * PAGE], "model/other.pt"
    part = writing(tmp_path, request_of(sizes, (0, 1)), request_of(sizes, (1, 0), other))
    results = Ranks(2)({0: part, 1: part})
    assert results[0] == results[1] == {"all": [{"owned": [PATH]}, {"owned": [other]}]}
    assert (tmp_path / PATH).read_bytes() == (tmp_path / other).read_bytes()


def test_what_was_given_is_deleted_from_the_store(tmp_path: Path) -> None:
    ranks = Ranks(3)
    counts = []
    for number in range(6):
        request = request_of([40 * PAGE], (0, 1, 2), f"{number}/a.pt")
        ranks({rank: writing(tmp_path, request) for rank in range(3)})
        counts.append(ranks.store.num_keys())
    ranks(dict.fromkeys(range(3), nothing))
    # Of two rounds: three records, an outcome and a word each. What two ranks have given in the last one, and whom the
    # owner waited for.
    assert counts[-1] == counts[2] <= 2 * 5 + 3
    assert ranks.store.num_keys() <= 2 * 5


# -- what goes wrong ----------------------------------------------------------------------------------------


def all_refused(results: dict[int, Any], ranks: int) -> list[str]:
    assert len(results) == ranks
    assert [type(result) for result in results.values()] == [CommitError] * ranks, results
    return [str(result) for result in results.values()]


BASE = [40 * PAGE, 9000]
OTHERS = {
    "size": [40 * PAGE, 9001],
    "one-more": [*BASE, 0],
    "one-less": BASE[:1],
    "much-larger": [400 * PAGE, 9000],
    "tiny": [10],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_replicas_that_are_none_are_refused_and_named(tmp_path: Path, odd: int, other: list[int]) -> None:
    """Whoever of them owns the file, and however much each thinks is its to write: the parts do not fit together."""
    writers = (0, 1, 2)
    usual = writing(tmp_path, request_of(BASE, writers))
    parts = dict.fromkeys(writers, usual) | {odd: writing(tmp_path, request_of(other, writers))}
    for message in all_refused(Ranks(3)(parts), 3):
        assert PATH in message
        assert f"rank {odd}" in message or odd == 0


@pytest.mark.parametrize("sharing", [0, 1], ids=["only the owner shares", "only the other shares"])
def test_replicas_of_which_one_does_not_share_are_refused(tmp_path: Path, sharing: int) -> None:
    """One takes the file for its own and the other writes into it: a committed file must not hold both."""
    own, shared = request_of(BASE), request_of(BASE, (0, 1))
    parts = {0: writing(tmp_path, shared), 1: nothing} if sharing == 0 else {}
    if sharing == 1:
        other = request_of([size + 1 for size in BASE], (0, 1))
        parts = {0: writing(tmp_path, own), 1: writing(tmp_path, other)}
    all_refused(Ranks(2)(parts), 2)


def failing(agreement: Agreement) -> Record:
    raise OSError(5, "the disk is gone")


def test_a_writer_that_fails_is_everybodys_error_at_once(tmp_path: Path) -> None:
    """The owner has the deadline to wait in, and need not."""
    part = writing(tmp_path, request_of(BASE, (0, 1, 2)))
    started = time.monotonic()
    messages = all_refused(Ranks(3)({0: part, 1: failing, 2: part}), 3)
    assert time.monotonic() - started < LONG_S / 2
    # Rank 1's word reaches the owner, who fails of it too.
    for message in messages:
        assert "the disk is gone" in message
        assert "rank 1: OSError" in message


@pytest.mark.parametrize("owner", [0, 1])
def test_a_silent_writer_is_named_by_the_deadline(tmp_path: Path, owner: int) -> None:
    writers = (owner, 2, 1 - owner)
    part = writing(tmp_path, request_of(BASE, writers))
    started = time.monotonic()
    messages = all_refused(Ranks(3, SHORT_S)({0: part, 1: part}), 2)
    # The owner's deadline, and then rank 0's for what the others say.
    assert time.monotonic() - started < 2 * SHORT_S + SLACK_S
    for message in messages:
        # Rank 0 may hear nothing from rank 1 either, which waits as long as it does.
        assert re.search(r"rank (1, )?2 ", message), message


def test_a_silent_owner_is_named_by_the_deadline(tmp_path: Path) -> None:
    part = writing(tmp_path, request_of(BASE, (2, 0, 1)))
    started = time.monotonic()
    messages = all_refused(Ranks(3, SHORT_S)({0: part, 1: part}), 2)
    assert time.monotonic() - started < 2 * SHORT_S + SLACK_S
    for message in messages:
        assert "rank 2" in message


def test_a_round_after_one_that_failed(tmp_path: Path) -> None:
    """What was given in vain is not taken for a part of the next save."""
    ranks = Ranks(3)
    good = [request_of([40 * PAGE], (0, 1, 2), f"{number}/a.pt") for number in range(2)]
    part = writing(tmp_path, good[0])
    all_refused(ranks({0: failing, 1: part, 2: part}), 3)
    results = ranks({rank: writing(tmp_path, good[1]) for rank in range(3)})
    assert all(isinstance(result, dict) for result in results.values()), results
    alone = write_alone(tmp_path, request_of([40 * PAGE], path="b/a.pt"))
    assert (tmp_path / "1/a.pt").stat().st_size == alone.size


# -- give, take and shorten ---------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_a_part_is_taken_whenever_it_was_given(early: bool) -> None:
    given = threading.Event()
    ranks = Ranks(2)
    ranks.agreements[0]._store = watching = Watching(ranks.store)

    def give(agreement: Agreement) -> Record:
        # The first question that is answered with no: the wait has begun.
        assert early or watching.waiting.wait(LONG_S)
        agreement.give("a/b.pt", {"crc32": [1, 2, 2**32 - 1]})
        given.set()
        return {}

    def take(agreement: Agreement) -> Record:
        assert not early or given.wait(LONG_S)
        return agreement.take("a/b.pt", 1)

    assert ranks({0: take, 1: give})[0] == {"all": [{"crc32": [1, 2, 2**32 - 1]}, {}]}


def test_a_rank_without_the_part_is_an_error_at_once() -> None:
    for message in all_refused(Ranks(2)({0: lambda agreement: agreement.take("a/b.pt", 1), 1: nothing}), 2):
        assert "a/b.pt: rank 1 has submitted without giving its part" in message


class Watching:
    """A store that says when somebody has asked it in vain: then a wait has begun."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.waiting = threading.Event()

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        if not found:
            self.waiting.set()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_shorten_ends_present_and_later_waits(rank: int) -> None:
    """Of rank 0, for the others' records, and of another, for rank 0's word. The deadline alone would be an hour."""
    store = Watching(dist.HashStore())  # type: ignore[attr-defined]
    agreement = Agreement(store, rank, 2, "test", 3600.0)
    errors: list[Exception] = []

    def wait() -> None:
        for _ in range(2):
            try:
                decide(agreement, TOPIC, dict, lambda records: {}, CommitError)
            except CommitError as error:
                errors.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert store.waiting.wait(LONG_S)
    agreement.limit_waits(0.1)
    thread.join(LONG_S)
    assert len(errors) == 2
    assert time.monotonic() - started < LONG_S / 2


def test_shorten_ends_the_taking_of_a_part() -> None:
    store = Watching(dist.HashStore())  # type: ignore[attr-defined]
    agreement = Agreement(store, 0, 2, "test", 3600.0)
    errors: list[Exception] = []

    def take() -> None:
        agreement.begin(TOPIC)
        try:
            agreement.take("a/b.pt", 1)
        except CommitError as error:
            errors.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert store.waiting.wait(LONG_S)
    agreement.limit_waits(0.0)
    thread.join(LONG_S)
    assert "no word from rank 1" in str(errors[0])
