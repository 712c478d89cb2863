"""Builds the report that each rank sends to rank 0 when the rank's files are on the disk.

The names of tensors, and the members of each param group, are sent once, as short lists (`sharding.name_lists`). Later
reports have only the digests of these lists. Every rank lists its groups by key, because other ranks may have the
groups in another order (ms-swift), and with other members.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property
from types import MappingProxyType

import msgspec

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.errors import CommitError
from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.io import typed_json
from mcore_ckpt.io.typed_json import Natural
from mcore_ckpt.ranks.key_value_store import unzip
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.save.replica_check import ReplicaReport
from mcore_ckpt.save.save_times import TimesRecord
from mcore_ckpt.sharding.name_lists import OrderedNames, fold, join
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import group_keys
from mcore_ckpt.state.shards import ParameterState
from mcore_ckpt.state.trainer import Trainer

# A long list is refused if its entries have fewer characters than this on average.
_LEAST_ENTRY = 8
# Lists of more than this many characters are compressed. Shorter lists stay plain, because rank 0 reads the lists of
# thousands of ranks, and decompressing a short list takes longer than reading a plain list.
_LONG_LIST = 1024
_PLAIN, _COMPRESSED = "-", "z"
# This character begins the line of a group. No entry of names begins with this character.
_GROUP = "\t"
_NO_NAMES = "a rank has sent a list of names that cannot be names of tensors"
# The number of a chained optimizer, and the key of one of its param groups.
GroupId = tuple[int, str]


@dataclass(frozen=True)
class GroupList:
    """This rank's groups and their members, in the form that is sent to rank 0.

    Attributes:
        names: the lines. Each group has one line with its optimizer and key, then the entries of its members.
    """

    names: tuple[str, ...] = ()

    @cached_property
    def holds(self) -> str:
        """A digest of the lines; empty if there are none."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:32] if self.names else ""


NO_GROUPS = GroupList()


@dataclass(frozen=True, eq=False)
class GroupMembers:
    """The names of the parameters in each group on this rank, by optimizer and number of the group."""

    names: tuple[Mapping[int, Sequence[str]], ...]

    @staticmethod
    def of(by_optimizer: Sequence[Sequence[ParameterState]]) -> GroupMembers:
        """Takes the names from the states of each chained optimizer's parameters."""
        found: list[dict[int, list[str]]] = []
        for states in by_optimizer:
            members: dict[int, list[str]] = {}
            for state in states:
                if state.group is not None:
                    members.setdefault(state.group, []).append(state.name)
            found.append(members)
        return GroupMembers(tuple(found))

    @cached_property
    def _folded(self) -> list[dict[int, list[str]]]:
        return [{number: fold(names) for number, names in members.items()} for members in self.names]

    def listed(self, keys: Sequence[Sequence[str]]) -> GroupList:
        """Returns the list for rank 0. `keys` has the key of each group, by optimizer."""
        lines: list[str] = []
        for optimizer, (members, of_optimizer) in enumerate(zip(self._folded, keys, strict=True)):
            for number, entries in sorted(members.items()):
                lines += [f"{_GROUP}{optimizer}{_GROUP}{of_optimizer[number]}", *entries]
        return GroupList(tuple(lines))


def keys_to_save(trainer: Trainer) -> tuple[tuple[str, ...], ...]:
    """Returns the keys of each chained optimizer's groups; none if the optimizer is not saved."""
    if "optimizer" not in trainer.config.save_contents:
        return ()
    return group_keys(optimizer_parts(trainer.optimizer), trainer.group_keys)


def join_groups(lists: Iterable[str]) -> dict[GroupId, list[str]]:
    """Joins the lines of all ranks. Returns the entries of each group's members. Raises ValueError, see `join`."""
    found: dict[str, set[str]] = {}
    for text in lists:
        for group in text.removeprefix(_GROUP).split(f"\n{_GROUP}"):
            group_id, *entries = group.split("\n")
            found.setdefault(group_id, set()).update(entries)
    return {_group_id(text): join([entries]) for text, entries in found.items()}


def _group_id(text: str) -> GroupId:
    optimizer, key = text.split(_GROUP)
    return int(optimizer), key


class TensorNames:
    """The names of the tensors in each rank's files, by digest. Each rank sends its names to rank 0 only once.

    With thousands of ranks and tensors, the names would otherwise be nearly all of the bytes that a commit sends.
    """

    def __init__(self) -> None:
        self._sent: set[str] = set()
        # The lines of each list, joined to one text. One text takes less memory than the many lines that thousands of
        # ranks send.
        self._received: dict[str, str] = {}
        self._groups: tuple[frozenset[str], dict[GroupId, list[str]]] = (frozenset(), {})
        self._order: tuple[frozenset[str], tuple[str, ...], dict[str, Holds]] | None = None

    def to_send(self, plans: Iterable[FilePlan], rank: int, groups: GroupList = NO_GROUPS) -> dict[str, str]:
        """Returns, by digest, the names that rank 0 has not yet received from this rank, as `_packed` text.

        If several ranks write a file, only its owner sends the names. `groups` are this rank's param groups.
        """
        own = {plan.holds: plan for plan in plans if plan.share.owner == rank and plan.holds not in self._sent}
        found = {digest: _packed(fold(plan.names)) for digest, plan in own.items()}
        if groups.names and groups.holds not in self._sent:
            found[groups.holds] = _packed(groups.names)
        return found

    def mark_sent(self, lists: Iterable[FilePlan | GroupList]) -> None:
        """Records that rank 0 has received the names of these lists.

        Call this when the save that sent these lists is committed.
        """
        self._sent.update(each.holds for each in lists)

    def receive(self, names: Mapping[str, str]) -> None:
        """Adds names that a rank has sent. Only rank 0 calls this method."""
        for digest, text in names.items():
            # Unpack each list only once, because tensor-parallel ranks send the same names.
            if digest not in self._received:
                self._received[digest] = _unpacked(text)

    def groups(self, digests: Iterable[str]) -> dict[GroupId, list[str]]:
        """Returns the members of each param group on all ranks. `digests` has one digest per rank, "" without groups.

        Raises:
            CommitError: rank 0 has not received the list of a digest, or has received a list that cannot be right.
        """
        wanted = frozenset(digests) - {""}
        if self._groups[0] != wanted:
            self._refuse_missing(wanted)
            with _names_refused():
                self._groups = (wanted, join_groups(self._received[digest] for digest in wanted))
        return self._groups[1]

    def in_order(self, digests: Iterable[str]) -> tuple[tuple[str, ...], dict[str, Holds]]:
        """Returns all names in the manifest's order and, for each digest, the positions of its names as runs.

        Raises:
            CommitError: rank 0 has not received the names of a digest, or has received names that cannot be names of
                tensors.
        """
        wanted = frozenset(digests)
        if self._order is None or self._order[0] != wanted:
            self._refuse_missing(wanted)
            lists = {digest: _lines(self._received[digest]) for digest in wanted}
            with _names_refused():
                ordered = OrderedNames(lists.values())
            holds = {digest: Holds.of(ordered.positions_of(entries)) for digest, entries in lists.items()}
            self._order = (wanted, ordered.names, holds)
        return self._order[1], self._order[2]

    def _refuse_missing(self, wanted: frozenset[str]) -> None:
        if missing := wanted - self._received.keys():
            raise CommitError(
                f"rank 0 has not received the names of the tensors in {len(missing)} files: make a new "
                "CheckpointManager on all ranks"
            )


def _packed(lines: Sequence[str]) -> str:
    """Returns lines as one short text.

    Compressed text is in base 64. Base 85 would be 6 % shorter, but Python decodes base 85 byte by byte, which takes a
    quarter of a second for the names of 4,096 ranks.
    """
    text = "\n".join(lines)
    if len(text) <= _LONG_LIST:
        return _PLAIN + text
    return _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def _unpacked(packed: str) -> str:
    how, text = packed[:1], packed[1:]
    if how == _COMPRESSED:
        text = unzip(base64.b64decode(text)).decode()
    if text.count("\n") * _LEAST_ENTRY > max(len(text), json_bounds.SMALL_BYTES):
        raise CommitError(_NO_NAMES)
    return text


def _lines(text: str) -> list[str]:
    return text.split("\n") if text else []


@contextmanager
def _names_refused() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CommitError(f"{_NO_NAMES}: {error}") from None


class FileReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A file that a rank has written, as in `WrittenFile`. `index` has the fields of `IndexPlace` in order."""

    path: str
    kind: str
    size: Natural
    crc32: Natural
    index: tuple[Natural, Natural, Natural, Natural] | None
    holds: str

    @staticmethod
    def of(file: WrittenFile) -> FileReport:
        """Describes a file that this rank has written."""
        at = file.index
        index = None if at is None else (at.offset, at.size, at.crc32, at.version)
        return FileReport(file.path, file.kind, file.size, file.crc32, index, file.holds)


class RankReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's report. Rank 0 decodes each report into a few objects.

    In a message, a report is one text. So rank 0 holds thousands of texts instead of millions of lists and dicts.
    Millions of new objects would make Python's garbage collector look through all objects of the training several
    times.

    Attributes:
        files: the files that the rank has completed.
        structures: for each file to which the rank has written, the digest of its structure.
        names: the tensor names that rank 0 does not know yet, by digest.
        coordinates: the fields of `RankCoordinates` in order.
        stages: the fields of `StageRecord` in order, for each stage.
        steps: for each chained optimizer, how many steps it has done; None if the rank does not know the number.
        groups: the digest of the rank's param groups and their members.
        replicas: what rank 0 compares with the reports of other ranks.
        times: when the rank planned, copied and wrote (`SaveTimes.to_record`).
        positions: digests of the rank's data positions, by name.
        step_parts: the parts of the step that the rank has saved (`PartFiles`).
    """

    files: tuple[FileReport, ...]
    structures: dict[str, str]
    names: dict[str, str]
    coordinates: tuple[Natural, Natural, Natural, Natural, Natural, Natural, Natural]
    stages: tuple[tuple[Natural, Natural, tuple[Natural, ...], tuple[Natural, ...]], ...]
    steps: tuple[float | int | None, ...]
    groups: str
    replicas: ReplicaReport
    times: TimesRecord
    positions: dict[str, str] = {}
    step_parts: tuple[str, ...] = ()

    def to_record(self) -> Record:
        """Returns the report as JSON values."""
        return {_REPORT: typed_json.encode(self).decode()}

    @staticmethod
    def of(record: Record) -> RankReport:
        """Reads a record that a rank has made with `to_record`. Raises CommitError if the record is not a report."""
        try:
            text = str(record.get(_REPORT)).encode()
            json_bounds.check(text, json_bounds.MESSAGES)
            return typed_json.parse(text, _REPORTS)
        except ValueError as error:
            raise CommitError(f"a rank has sent a report that cannot be read: {error}") from None


_REPORT = "report"
_REPORTS: msgspec.json.Decoder[RankReport] = msgspec.json.Decoder(RankReport)


def rank_report(
    trainer: Trainer,
    written: Iterable[WrittenFile],
    plans: Iterable[FilePlan],
    names: Mapping[str, str],
    steps: Sequence[float | int | None],
    groups: str,
    replicas: ReplicaReport,
    times: TimesRecord,
    positions: Mapping[str, str] = MappingProxyType({}),
    step_parts: tuple[str, ...] = (),
) -> RankReport:
    """Returns this rank's report.

    Args:
        trainer: this rank's trainer, which has the rank's coordinates and stages.
        written: the files that this rank has completed.
        plans: the files to which this rank has written.
        names, steps, groups, replicas, times, positions, step_parts: see `RankReport`.
    """
    return RankReport(
        files=tuple(map(FileReport.of, written)),
        structures={plan.path: plan.structure for plan in plans},
        names=dict(names),
        coordinates=astuple(trainer.coordinates),
        stages=tuple(astuple(stage) for stage in trainer.stages),
        steps=tuple(steps),
        groups=groups,
        replicas=replicas,
        times=times,
        positions=dict(positions),
        step_parts=step_parts,
    )
