"""Reads a checkpoint from several places: this node's folder, other nodes, and the root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcore_ckpt.checkpoint.damage import Damage
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, RemoteError
from mcore_ckpt.fast.transport import PeerError
from mcore_ckpt.formats.native.folder import Folder
from mcore_ckpt.sharding.plan import ReadRange

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Reads = list[tuple[ReadRange, torch.Tensor]]
# The errors of a source that does not have the bytes, or has wrong bytes. After one of these errors, the next source is
# asked.
_FAILURES = (CheckpointCorruptError, CheckpointNotFoundError, RemoteError, OSError)


@dataclass(frozen=True, eq=False)
class Source:
    """A folder that has files of the checkpoint.

    `has` lists the positions of these files in the manifest, as ranges that include their last position. None stands
    for all files.
    """

    folder: Folder
    has: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, eq=False)
class SpreadFolder:
    """The folders that together have a checkpoint. The class implements `formats.native.folder.Folder`.

    A file is read from the first source that has the file. If this source fails, or sends bytes with a wrong CRC, the
    file is read from the next source that has the file, and a warning says so.

    Attributes:
        place: the checkpoint's folder in this node's folder.
        attempt: the id of the save. A folder with the manifest of another save is not a source.
        sources: the sources, the nearest first.
    """

    place: Path
    attempt: str
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        return str(self.place)

    def manifest(self) -> Manifest:
        return self._manifest

    @cached_property
    def _manifest(self) -> Manifest:
        def read(source: Source) -> Manifest:
            manifest = source.folder.manifest()
            if manifest.attempt != self.attempt:
                raise CheckpointCorruptError(
                    f"{source.folder}: belongs to another save: the checkpoint was replaced meanwhile"
                )
            return manifest

        return self._first(self.sources, "its manifest", read)

    @cached_property
    def _by_path(self) -> dict[str, list[Source]]:
        """The sources of each file."""
        files = self._manifest.files
        found: dict[str, list[Source]] = {file.path: [] for file in files}
        for source in self.sources:
            for first, last in ((0, len(files) - 1),) if source.has is None else source.has:
                for file in files[first : last + 1]:
                    found[file.path].append(source)
        return found

    def check(self, records: Sequence[FileRecord]) -> None:
        # Each source is asked once, for all files of which it is the first source. After a failure, each of these files
        # is asked for by itself, from one source after another.
        for source, mine in _grouped(records, lambda record: self._sources(record.path)[0]):
            try:
                source.folder.check(mine)
            except _FAILURES as failure:
                self._note(source, failure)
                for record in mine:
                    self._of_file(record.path, lambda other, record=record: other.folder.check([record]))  # type: ignore[misc]

    def index(self, record: FileRecord) -> IndexEntries:
        return self._of_file(record.path, lambda source: source.folder.index(record))

    def plain(self, record: FileRecord) -> dict[str, Any]:
        return self._of_file(record.path, lambda source: source.folder.plain(record))

    def fill(
        self, files: Mapping[str, FileRecord], reads: Sequence[tuple[ReadRange, torch.Tensor]], check: bool = True
    ) -> int:
        nbytes = 0
        for source, mine in _grouped(reads, lambda part: self._sources(part[0].stored.file)[0]):
            try:
                nbytes += source.folder.fill(files, mine, check)
            except _FAILURES as failure:
                self._note(source, failure)
                for path in dict.fromkeys(read.stored.file for read, _ in mine):
                    parts = [part for part in mine if part[0].stored.file == path]
                    nbytes += self._of_file(path, lambda other, parts=parts: other.folder.fill(files, parts, check))  # type: ignore[misc]
        return nbytes

    def fetch(self, record: FileRecord, target: Path) -> None:
        def fetch(source: Source) -> None:
            target.unlink(missing_ok=True)  # remove the bytes that another source has sent
            source.folder.fetch(record, target)

        self._of_file(record.path, fetch)

    def verify(self, files: Sequence[FileRecord]) -> list[Damage]:
        found = []
        for file in files:
            of_sources: list[list[Damage]] = []
            for source in self._sources(file.path):
                try:
                    of_sources.append(source.folder.verify([file]))
                except _FAILURES as failure:
                    self._note(source, failure)
                    of_sources.append([Damage(str(failure), file.path, file.rank)])
                if not of_sources[-1]:
                    break
            else:
                found += of_sources[0]
        return found

    def _sources(self, path: str) -> list[Source]:
        found = self._by_path.get(path)
        if not found:
            raise CheckpointCorruptError(f"{self}/{path}: is on no node that is left")
        return sorted(found, key=lambda source: source in self._silent) if self._silent else found

    @cached_property
    def _silent(self) -> set[Source]:
        """Sources that did not answer. They are asked last, because each question to a lost node can take a minute."""
        return set()

    def _note(self, source: Source, failure: Exception) -> None:
        if isinstance(failure, PeerError):
            self._silent.add(source)

    def _of_file(self, path: str, work: Callable[[Source], Result]) -> Result:
        return self._first(self._sources(path), path, work)

    def _first(self, sources: Sequence[Source], what: str, work: Callable[[Source], Result]) -> Result:
        """Calls `work` for one source after another. Returns the first result."""
        failures: list[Exception] = []
        for source in sources:
            try:
                result = work(source)
            except _FAILURES as failure:
                self._note(source, failure)
                failures.append(failure)
                continue
            if failures:
                logger.warning("%s: %s is read from %s, because %s", self, what, source.folder, failures[0])
            return result
        if len(failures) == 1 and isinstance(failures[0], CheckpointError):
            raise failures[0]
        reasons = "".join(f"\n  {failure}" for failure in failures)
        raise CheckpointCorruptError(f"{self}: {what} cannot be read from any of {len(sources)} places:{reasons}")


def _grouped(items: Sequence[Any], source_of: Callable[[Any], Source]) -> Iterator[tuple[Source, list[Any]]]:
    by_source: dict[int, tuple[Source, list[Any]]] = {}
    for item in items:
        source = source_of(item)
        by_source.setdefault(id(source), (source, []))[1].append(item)
    yield from by_source.values()
