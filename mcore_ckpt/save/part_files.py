"""Writes one rank's parts of a step as files of the checkpoint.

    trainer's thread    capture      calls the functions of the parts
    second thread       start        copies, syncs and hashes the files, while the save's thread writes the tensors
    save's thread       finish       waits for these files

A part's function runs on the trainer's thread, because the function reads what the training changes, and may use the
GPU. If the part's function returns another function, the second thread runs the returned function.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointCorruptError, CommitError, HungDiskError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.access import FILE_MODE, FOLDER_MODE, widen, would_widen_elsewhere
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.file_copies import Hashed, copy_hashed, hash_durably, link_file, share_blocks
from mcore_ckpt.io.files import make_folders, new_folder, write_file
from mcore_ckpt.io.folder_sizes import sizes_below
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.rounds import Runner, Started
from mcore_ckpt.save.part_sources import Listing, Source, list_part
from mcore_ckpt.state.attached_parts import Content, HandOver, check_content
from mcore_ckpt.state.thread_settings import settings_for_state
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.trainer_functions import call_of_trainer
from mcore_ckpt.steps.handed_over import LinkedFile, end_links, write_note
from mcore_ckpt.steps.transaction import Attempt, check_seen

logger = logging.getLogger(__name__)

# The size in bytes of each file that took disk space in the last save, by part and then by path. Links take no space.
PartSizes = MutableMapping[str, dict[str, int]]


class PartFiles:
    """The files of this rank's parts in one save. Call `capture`, `start`, `finish`, `committed` and `close`.

    The names of the files are not durable when `finish` returns: the caller syncs them together with the names of its
    other files.

    Args:
        trainer: has the parts.
        runner: runs work under the watch of the disk.
        sizes: see `PartSizes`. `committed` updates these sizes.
        notes: the paths of this rank's notes on handed-over files whose links may not have ended (`steps.handed_over`).

    Attributes:
        names: the names of the parts that this rank saves.
    """

    def __init__(self, trainer: Trainer, runner: Runner, sizes: PartSizes, notes: list[Path]) -> None:
        self._trainer, self._rank, self._runner, self._sizes = trainer, trainer.agreement.rank, runner, sizes
        self._notes = notes
        self._contents: dict[str, Content] = {part.name: part.save for part in trainer.parts if part.save is not None}
        self.names = trainer.parts.saved
        # The parts whose function was called with a folder.
        self._having_folder: frozenset[str] = frozenset()
        self._note: Path | None = None
        self._work: Started[list[_Written]] | None = None
        self._written: list[_Written] = []

    def sizes(self) -> dict[str, int]:
        """Returns the known sizes in bytes of the files to write, by path. The sum is a lower bound.

        The sizes come from the last save. Before the first save, sizes are known only for bytes, and for files that
        will be copied from another file system. A copy within one file system may take no space, because it may share
        the blocks of the original.
        """
        found: dict[str, int] = {}
        for name, content in self._contents.items():
            known = self._sizes.get(name)
            if known is None:
                known = self._first_sizes(file_names.part_dir(name, self._rank), content)
            found |= known
        return found

    def _first_sizes(self, path: str, content: Content) -> dict[str, int]:
        if _is_bytes(content):
            return {f"{path}/{file_names.PART_FILE}": memoryview(content).nbytes}
        if content is None or callable(content) or isinstance(content, HandOver):
            return {}
        with suppress(HungDiskError, OSError):  # the save itself will raise this error
            looking = self._runner.start(lambda: _sizes_elsewhere(Path(os.path.abspath(content)), self._trainer.root))
            if looking.wait(self._patience_s):
                return {f"{path}/{below}": size for below, size in looking.result().items()}
        return {}

    @property
    def _patience_s(self) -> float:
        return deadlines.DISK_PATIENCE_S if self._trainer.config.async_save else math.inf

    def capture(self, attempt: Attempt) -> bool:
        """Calls the function of each part, on the thread of the trainer. Returns whether there was a function to call.

        Raises:
            HungDiskError: the disk hangs, so the folders into which the functions write do not exist yet.
            CommitError: a function raised an exception.
            InvalidTypeError: a function returned something that a part cannot consist of.
        """
        functions = {name: save for name, save in self._contents.items() if callable(save)}
        self._having_folder = frozenset(functions)
        if not functions:
            return False
        hangs = HungDiskError(f"{attempt.staging}: the disk hangs, so that part {min(functions)!r} cannot be written")
        if attempt.is_late:
            raise hangs
        making = self._runner.start(lambda: _make_folders(attempt.staging, map(self._path, functions)))
        if not making.wait(self._patience_s):
            self._runner.leave(making)
            raise hangs
        making.result()
        for name, save in functions.items():
            folder = attempt.staging / self._path(name)
            with self._trainer.parts.calling(name):
                content = _content_of(name, lambda save=save, folder=folder: save(folder))  # type: ignore[misc]
            self._contents[name] = content
        return True

    def start(self, staging: Path) -> None:
        """Starts to write the files. `finish` and `stop` wait until the writing has ended. Raises HungDiskError."""
        if self._contents:
            self._work = self._runner.start(lambda: self._write(staging))

    def finish(self) -> list[WrittenFile]:
        """Waits until the files are on the disk, and returns them. Raises CheckpointError and OSError."""
        if self._work is not None:
            self._written = self._work.result()
        return [file for part in self._written for file in part.files]

    def stop(self) -> None:
        """Ends the writing. When `stop` returns, no thread writes any more, unless the disk or a function hangs."""
        if self._work is not None and not self._work.ended:
            self._work.give_up()
            with suppress(HungDiskError):
                self._work.wait(deadlines.DISK_PATIENCE_S, deadlines.DISK_PATIENCE_S)

    def committed(self) -> None:
        """Removes handed-over files, because the checkpoint has them now. Records the sizes for the next save."""
        for part in self._written:
            self._sizes[part.name] = part.sizes
        if any(part.source is not None and part.source.is_handed_over for part in self._written):
            try:
                self._runner.run(self._remove)
            except (HungDiskError, OSError) as error:
                logger.warning("what was handed over to a checkpoint could not be removed: %s", error)

    def _remove(self) -> None:
        sources = [(part.source, part.folders) for part in self._written if part.source is not None]
        are_gone = [source.remove(folders) for source, folders in sources if source.is_handed_over]
        if all(are_gone) and self._note is not None:
            self._note.unlink(missing_ok=True)
            self._forget(self._note)

    def close(self) -> None:
        """Stops the writing, and drops the references to the trainer's objects."""
        self.stop()
        if self._note in self._notes:  # the save has failed on this rank, but may be committed, so end its links
            with suppress(HungDiskError):
                self._runner.start(self._end_links).wait(deadlines.DISK_PATIENCE_S, deadlines.DISK_PATIENCE_S)
        self._contents, self._written, self._work = {}, [], None

    def _end_links(self) -> None:
        for note in list(self._notes):
            with suppress(OSError, CheckpointCorruptError):  # the next save tries again
                end_links(note, alone=False)
                if not note.exists():
                    self._forget(note)

    def _forget(self, note: Path) -> None:
        with suppress(ValueError):  # a thread that hung at a disk may have removed this note already
            self._notes.remove(note)

    def _path(self, name: str) -> str:
        return file_names.part_dir(name, self._rank)

    def _write(self, staging: Path) -> list[_Written]:
        check_seen(staging)
        self._end_links()
        # The parts that are ready go first, so that a slow function does not hold them up.
        ready = [name for name, content in self._contents.items() if not callable(content)]
        later = [name for name, content in self._contents.items() if callable(content)]
        written = [self._write_part(name, staging) for name in (*ready, *later)]
        links = [LinkedFile.of(file, staging, target) for part in written for file, target in part.links]
        if links:
            folders = [folder for part in written for folder in part.folders_to_remove]
            self._note = write_note(staging, self._rank, links, folders)
            self._notes.append(self._note)
        return written

    def _call(self, name: str, function: Callable[[], Content]) -> Content:
        """Calls a function that a part's function has returned. Raises CommitError also if the call takes too long."""
        timeout_s = self._trainer.config.timeout_s

        def call() -> Content:
            with settings_for_state(self._trainer.gpu, timeout_s), self._trainer.parts.calling(name):
                return _content_of(name, partial(_without_exits, name, function))

        calling = self._runner.start(call)
        # Wait a little longer than the watch of the disk, so that the watch is the first to notice a hung disk.
        if not calling.wait(total_s=timeout_s + deadlines.EXTRA_WAIT_S):
            calling.give_up()
            raise CommitError(
                f"part {name!r}: its function has not returned for {timeout_s:g} s, so the other ranks wait no longer: "
                "let it do less, or raise CheckpointConfig.timeout_s"
            )
        content = calling.result()
        if callable(content):
            raise CommitError(f"part {name!r}: the function that it returned has returned a function, too")
        return content

    def _write_part(self, name: str, staging: Path) -> _Written:
        content = self._contents[name]
        if callable(content):
            content = self._call(name, content)
        folder = staging / self._path(name)
        if content is None and name in self._having_folder and not os.path.lexists(folder):
            raise CommitError(
                f"part {name!r}: its function has removed or moved the folder that it has got: write into that folder, "
                "or return the path of another one"
            )
        _make_folders(staging, [self._path(name)])
        hashed: dict[Path, Hashed] = {}
        source, listing, links = None, Listing((), ()), list[tuple[Path, Path]]()
        if _is_bytes(content):
            hashed[folder / file_names.PART_FILE] = _write_bytes(folder / file_names.PART_FILE, memoryview(content))
        elif content is not None:
            path, is_handed_over = (content.path, True) if isinstance(content, HandOver) else (content, False)
            source = Source.of(name, path, is_handed_over)
            source.check(staging, self._trainer.root)
            listing = _take(source, folder, hashed, links)
        # The part's function may have written more files into the folder. These files belong to the part, too.
        found = list_part(name, folder)
        for made in found.folders:
            widen(made, folder, FOLDER_MODE)
        _each([file for file in found.files if file not in hashed], partial(_hash_made, folder), hashed)
        paths = {file: file.relative_to(staging).as_posix() for file in found.files}
        files = [WrittenFile(path, "part", hashed[file].size, hashed[file].crc32) for file, path in paths.items()]
        sizes = {path: hashed[file].size for file, path in paths.items() if hashed[file].takes_space}
        return _Written(name, files, sizes, source, listing.folders, links)


@dataclass(frozen=True, eq=False)
class _Written:
    """One part that is on the disk.

    Attributes:
        name: the part's name.
        files: its files.
        sizes: the sizes in bytes of the files that take disk space, by path. Links to files of the trainer take no
            space.
        source: the file or folder that the trainer has named; None if the trainer has named no file or folder.
        folders: the folders in the source.
        links: the files of the source that have a second name in the checkpoint, each with that name.
    """

    name: str
    files: Sequence[WrittenFile]
    sizes: dict[str, int]
    source: Source | None
    folders: Sequence[Path]
    links: Sequence[tuple[Path, Path]]

    @property
    def folders_to_remove(self) -> Sequence[Path]:
        """The folders that are handed over, each before the folders in it."""
        if self.source is None or not self.source.is_handed_over:
            return ()
        return (self.source.path, *self.folders)


def _sizes_elsewhere(source: Path, root: Path) -> dict[str, int]:
    """Returns the sizes in bytes of a source's files, by path; none if the source is on the root's file system.

    Raises OSError.
    """
    above = next(folder for folder in (root, *root.parents) if folder.exists())
    if source.stat().st_dev == above.stat().st_dev:
        return {}
    return {source.name: source.stat().st_size} if source.is_file() else sizes_below(source)


def _is_bytes(content: Content) -> bool:
    return isinstance(content, (bytes, bytearray, memoryview))


def _without_exits(name: str, function: Callable[[], Content]) -> Content:
    """Calls a function that a part's function has returned. SystemExit and KeyboardInterrupt become CommitError.

    Only the function itself can raise these exceptions, because no signal interrupts this thread. Left unchanged, the
    exceptions would end this thread, but not the process.
    """
    try:
        return function()
    except (SystemExit, KeyboardInterrupt) as error:
        raised = f"{type(error).__name__}: {error}"
    # Raise CommitError outside the `except` block. Otherwise the caught exception would be the cause of CommitError,
    # and `interrupts_as_themselves` would raise that cause instead.
    raise CommitError(f"part {name!r} could not be saved: {raised}")


def _content_of(name: str, save: Callable[[], Content]) -> Content:
    content = call_of_trainer(save, f"part {name!r} could not be saved", CommitError)
    if not callable(content):
        check_content(name, content)
    return content


def _make_folders(staging: Path, paths: Iterable[str]) -> None:
    for path in paths:
        make_folders(staging, f"{path}/{file_names.PART_FILE}")


def _write_bytes(path: Path, data: memoryview) -> Hashed:
    plain = data.cast("B") if data.c_contiguous else memoryview(data.tobytes())
    write_file(path, [plain])
    return Hashed(plain.nbytes, crc32(plain))


def _take(source: Source, folder: Path, hashed: dict[Path, Hashed], links: list[tuple[Path, Path]]) -> Listing:
    """Copies or links all files of a source into a folder. Returns the listing of the source.

    Adds the sizes and CRCs of the files to `hashed`, and the links to `links`.
    """
    can_share_blocks = True
    listing = source.listed()
    source.check_files(listing)
    for made in listing.folders:
        new_folder(folder / source.place_of(made), exist_ok=True)

    def take(target: Path) -> Hashed:
        nonlocal can_share_blocks
        original = originals[target]
        if not source.is_handed_over:
            return copy_hashed(original, target)
        source.note_taken(original)
        # Within one file system, no bytes are copied if the file system can share blocks or has links. Shared blocks
        # are better: with a link, a trainer that opens its file again could change the checkpoint.
        is_elsewhere = original.stat().st_dev != folder.stat().st_dev
        if is_elsewhere or would_widen_elsewhere(original, folder, FILE_MODE):
            return copy_hashed(original, target)
        can_share_blocks = can_share_blocks and share_blocks(original, target)
        if can_share_blocks:
            return hash_durably(target)._replace(takes_space=False)
        link_file(original, target)
        if original.samefile(target):
            links.append((original, target))
        return _hash_open_to_all(folder, target)._replace(takes_space=target.stat().st_nlink == 1)

    originals = {folder / source.place_of(file): file for file in listing.files}
    _each(list(originals), take, hashed)
    if source.listed() != listing:
        raise CommitError(f"part {source.part!r}: {source.path} has changed while it was saved: leave it as it is")
    return listing


def _hash_made(folder: Path, file: Path) -> Hashed:
    """Hashes a file that the trainer has made in a part's folder, perhaps as a link to another file of the trainer."""
    if would_widen_elsewhere(file, folder, FILE_MODE):
        linked = file.rename(folder.with_name(f".linked-{uuid.uuid4().hex}"))
        copied = copy_hashed(linked, file)
        linked.unlink()
        return copied
    return _hash_open_to_all(folder, file)


def _hash_open_to_all(folder: Path, file: Path) -> Hashed:
    """Hashes a file, after making it readable for everybody who may enter the part's folder."""
    widen(file, folder, FILE_MODE)
    return hash_durably(file)


def _each(files: Sequence[Path], work: Callable[[Path], Hashed], hashed: dict[Path, Hashed]) -> None:
    def run(file: Path) -> None:
        hashed[file] = work(file)

    for_each(files, run, min(tuning.PEER_THREADS, len(files)))
