"""Reads what recorder.c has recorded, as the smallest changes of a disk that can be lost one by one when power is lost.

The model is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014), for a disk that promises no
more than POSIX: `fsync` of a file makes its bytes and its length durable, and `fsync` of a folder the names in it.
Nothing else is durable, and what is not may be on the disk or not, in any order.
"""

import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

PAGE = 4096

Node = int
"""A file, folder or link. Unlike an inode's number, no later one has the same."""

ROOT: Node = 0


class Call(IntEnum):
    """As in recorder.c."""

    MARK = 0
    MAKE_FILE = 1
    MAKE_FOLDER = 2
    WRITE = 3
    LENGTH = 4
    SYNC = 5
    RENAME = 6
    EXCHANGE = 7
    LINK = 8
    SYMLINK = 9
    UNLINK = 10
    REMOVE_FOLDER = 11


@dataclass(frozen=True)
class Names:
    """Names that change together: the folder of each, the name, and the node that it stands for afterwards, or None."""

    number: int
    changes: tuple[tuple[Node, str, Node | None], ...]


@dataclass(frozen=True)
class Bytes:
    """Bytes of one page of a file."""

    number: int
    node: Node
    start: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Length:
    """A file's new length."""

    number: int
    node: Node
    nbytes: int


Change = Names | Bytes | Length


@dataclass(frozen=True)
class Sync:
    """`site` is the code that asked for it; `path` is what the node was called."""

    number: int
    node: Node
    site: str
    path: str


@dataclass(frozen=True)
class Mark:
    """A text of the program that was recorded."""

    number: int
    text: str


Event = Change | Sync | Mark


@dataclass
class Disk:
    """A tree of files, by node: the names in each folder, the bytes of each file, the target of each link."""

    folders: dict[Node, dict[str, Node]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[Node, bytes] = field(default_factory=dict)
    links: dict[Node, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """What was on the disk at the beginning, durably, and all that was done to it. An event's number is its index."""

    before: Disk
    events: tuple[Event, ...]
    folders: frozenset[Node]
    links: Mapping[Node, str]
    calls: int


class _Parser:
    """Follows the records with the disk as every process saw it, to know which node each path and inode means."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._by_inode: dict[int, Node] = {}
        self._lengths: dict[Node, int] = {}
        self._sites: dict[int, str] = {}
        self._next = ROOT + 1
        self.now = Disk()
        self.events: list[Event] = []
        self.folders = {ROOT}
        self.links: dict[Node, str] = {}
        self.calls = 0

    def take_snapshot(self) -> Disk:
        """Reads what is on the disk before anything is recorded."""
        self._by_inode[os.stat(self._folder).st_ino] = ROOT
        for base, folders, files in os.walk(self._folder):
            for name in [*folders, *files]:
                path = Path(base, name)
                status = path.lstat()
                at = self.now.folders[self._by_inode[os.stat(base).st_ino]]
                if status.st_ino in self._by_inode:
                    at[name] = self._by_inode[status.st_ino]
                    continue
                node = at[name] = self._new(status.st_ino)
                if stat.S_ISDIR(status.st_mode):
                    self.now.folders[node] = {}
                    self.folders.add(node)
                elif stat.S_ISLNK(status.st_mode):
                    self.now.links[node] = self.links[node] = os.readlink(path)
                else:
                    self.now.files[node] = path.read_bytes()
                    self._lengths[node] = len(self.now.files[node])
        return Disk(
            {node: dict(names) for node, names in self.now.folders.items()}, dict(self.now.files), dict(self.now.links)
        )

    def _new(self, inode: int) -> Node:
        node = self._by_inode[inode] = self._next
        self._next += 1
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        at: Node = ROOT
        *parents, name = os.path.relpath(path, self._folder).split("/")
        for parent in parents:
            at = self.now.folders[at][parent]
        return at, name

    def _name(self, *changes: tuple[Node, str, Node | None]) -> None:
        self.events.append(Names(len(self.events), changes))
        for folder, name, node in changes:
            if node is None:
                del self.now.folders[folder][name]
            else:
                self.now.folders[folder][name] = node

    def add(self, call: Call, path: str, other: str, thread: int, inode: int, offset: int, data: bytes) -> None:
        """Takes one record."""
        self.calls += call is not Call.MARK
        match call:
            case Call.MARK:
                text = data.decode()
                if text.startswith("sync "):
                    self._sites[thread] = text.removeprefix("sync ")
                else:
                    self.events.append(Mark(len(self.events), text))
            case Call.MAKE_FILE | Call.MAKE_FOLDER | Call.SYMLINK:
                node = self._new(inode)
                if call is Call.MAKE_FOLDER:
                    self.now.folders[node] = {}
                    self.folders.add(node)
                elif call is Call.MAKE_FILE:
                    self._lengths[node] = 0
                else:
                    self.links[node] = other
                self._name((*self._place(path), node))
            case Call.WRITE:
                self._write(self._by_inode[inode], offset, data)
            case Call.LENGTH:
                self._set_length(self._by_inode[inode], offset)
            case Call.SYNC:
                node = self._by_inode[inode]
                site = self._sites.pop(thread, "csrc/file.cpp")
                self.events.append(Sync(len(self.events), node, site, self._path_of(node)))
            case Call.RENAME:
                (folder, name), (to, new) = self._place(path), self._place(other)
                self._name((folder, name, None), (to, new, self.now.folders[folder][name]))
            case Call.EXCHANGE:
                (folder, name), (to, new) = self._place(path), self._place(other)
                first, second = self.now.folders[folder][name], self.now.folders[to][new]
                self._name((folder, name, second), (to, new, first))
            case Call.LINK:
                (folder, name), (to, new) = self._place(other), self._place(path)
                self._name((to, new, self.now.folders[folder][name]))
            case Call.UNLINK | Call.REMOVE_FOLDER:
                self._name((*self._place(path), None))

    def _write(self, node: Node, offset: int, data: bytes) -> None:
        end = offset + len(data)
        at = offset
        while at < end:
            stop = min(end, at // PAGE * PAGE + PAGE)
            self.events.append(Bytes(len(self.events), node, at, data[at - offset : stop - offset]))
            at = stop
        if end > self._lengths[node]:
            self._set_length(node, end)

    def _set_length(self, node: Node, nbytes: int) -> None:
        self._lengths[node] = nbytes
        self.events.append(Length(len(self.events), node, nbytes))

    def _path_of(self, node: Node) -> str:
        for folder, names in self.now.folders.items():
            for name, found in names.items():
                if found == node:
                    return f"{self._path_of(folder)}/{name}" if folder != ROOT else name
        return "."


_HEAD = struct.Struct("<4I3q")


def _records(log: bytes) -> Iterator[tuple[Call, str, str, int, int, int, bytes]]:
    at = 0
    while at < len(log):
        kind, path_bytes, other_bytes, thread, inode, offset, nbytes = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        path = log[at : at + path_bytes].decode()
        at += path_bytes
        other = log[at : at + other_bytes].decode()
        at += other_bytes
        call = Call(kind)
        count = nbytes if call in (Call.MARK, Call.WRITE) else 0
        yield call, path, other, thread, inode, offset, log[at : at + count]
        at += count


@dataclass(frozen=True)
class Recording:
    """A folder whose changes are being recorded. Make it before the program starts, and `end` it when it has ended."""

    folder: Path
    log: Path
    _parser: _Parser
    _before: Disk

    @staticmethod
    def of(folder: Path, log: Path) -> "Recording":
        """Begins a recording of a folder, whose path has no links."""
        parser = _Parser(folder)
        return Recording(folder, log, parser, parser.take_snapshot())

    def env(self, library: Path) -> dict[str, str]:
        """The variables of the program that is recorded; `library` is recorder.c, compiled."""
        return {"LD_PRELOAD": str(library), "RECORD_FOLDER": str(self.folder), "RECORD_LOG": str(self.log)}

    def end(self) -> Trace:
        """Reads the log."""
        parser = self._parser
        for record in _records(self.log.read_bytes()):
            parser.add(*record)
        return Trace(self._before, tuple(parser.events), frozenset(parser.folders), dict(parser.links), parser.calls)


def nodes_of(change: Change) -> Iterable[Node]:
    """The nodes whose sync makes a change durable. A rename is atomic, so the sync of either folder will do."""
    return {folder for folder, _, _ in change.changes} if isinstance(change, Names) else {change.node}
