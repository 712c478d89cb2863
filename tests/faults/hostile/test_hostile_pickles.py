"""Pickles and archives that would run something, or take all memory or time: refused by every reader of `.pt` files."""

import io
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.checkpoint.damage import Damage
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.pt_values import decode_pt
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.foreign_pickles import load_metadata, load_safely
from mcore_ckpt.formats.torch_save_files import read_pt
from mcore_ckpt.tools.examine.verify_deep import as_torch_sees_it
from tests.faults.hostile.fuzzing import PLAIN, archive_of, is_same, pt_of

READERS: dict[str, Callable[[Path], Any]] = {
    "ours": lambda path: read_plain(path.parent, record_of(path)),
    "megatron's": lambda path: load_safely(path, str(path)),
    "megatron's, mapped": lambda path: load_safely(path, str(path), mmap=True),
    "a sharded object": lambda path: load_safely(path.read_bytes(), str(path)),
    "in place": read_pt,
    "as torch sees it": lambda path: raise_first(as_torch_sees_it(path.parent, record_of(path, IndexPlace(0, 1, 0)))),
}
READERS_AND_METADATA = {**READERS, ".metadata": load_metadata}

HEAD = b"\x80\x02"
DOUBLE = b"\x86" + b"q\x00" + b"h\x00"  # TUPLE2 of the two before, and the same again


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def storage(nbytes: int) -> bytes:
    """A reference to record data/0 of the archive, which has 48 bytes of int64."""
    return (
        b"(X\x07\x00\x00\x00storage"
        + named("torch", "LongStorage")
        + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + b"J"
        + struct.pack("<i", nbytes // 8)
        + b"tQ"
    )


def tensor(lengths: bytes, strides: bytes, start: bytes = b"K\x00") -> bytes:
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    return (
        rebuild
        + b"("
        + storage(48)
        + start
        + lengths
        + strides
        + b"\x89"
        + named("collections", "OrderedDict")
        + b")RtR"
    )


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


# Each call copies all that it is handed, which is two bytes in the pickle.
ENCODE = named("_codecs", "encode") + b"q\x01" + text(b"x" * 200_000) + b"q\x02" + text(b"latin1") + b"q\x03"
FILL = named("_io", "BytesIO") + b"q\x01B" + struct.pack("<I", 200_000) + b"x" * 200_000 + b"K\x00N\x87q\x02"
SET = named("builtins", "set") + b"q\x01](" + b"".join(b"M" + struct.pack("<H", n) for n in range(9000)) + b"eq\x02"
INDEX = named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")R}("
INDEX += text(b"fqn") + b"h\x00" + text(b"offset") + b"h\x00" + text(b"index") + b"Nubq\x00"

HUGE = b"\x8a\x08" + struct.pack("<q", 2**61)
PICKLES: dict[str, bytes] = {
    "code": pickle.dumps({"a": 1})[:-1] + named("os", "system") + b"X\x04\x00\x00\x00true\x85R.",
    "code-by-newobj": HEAD + named("subprocess", "Popen") + b"X\x04\x00\x00\x00true\x85\x81.",
    "builtins-eval": HEAD + named("builtins", "eval") + b"X\x01\x00\x00\x001\x85R.",
    "bytearray": HEAD + named("builtins", "bytearray") + b"J\x00\x00\x00\x7f\x85R.",
    "storage-that-allocates": HEAD + named("torch", "FloatStorage") + b"J\x00\x00\x00\x7f\x85R.",
    "tensor-that-allocates": HEAD + named("torch", "FloatTensor") + b"J\x00\x00\x00\x7f\x85R.",
    "torch-set-state": HEAD
    + named("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + named("os", "system")
    + named("torch", "Tensor")
    + b"X\x04\x00\x00\x00true\x85}tR.",
    "another-codec": HEAD + named("_codecs", "encode") + b"X\x01\x00\x00\x00xX\x0b\x00\x00\x00bz2_codec  \x86R.",
    "memo-far-out": HEAD + b"K\x01r\xff\xff\xff\xffj\xff\xff\xff\xfe.",
    "key-of-tuples-of-tuples": HEAD + b"}K\x01K\x01" + DOUBLE * 70 + b"\x86K\x01s.",
    "key-deep": HEAD + b"}" + b"K\x01" + b"\x85" * 30_000 + b"K\x01s.",
    "set-of-tuples-of-tuples": HEAD + named("builtins", "set") + b"]K\x01K\x01" + DOUBLE * 70 + b"\x86a\x85R.",
    "lists-of-lists": HEAD + b"K\x01K\x01" + DOUBLE * 70 + b"\x86.",
    "deep": HEAD + b"]" * 30_000 + b"a" * 29_999 + b".",
    "in-itself": HEAD + b"]q\x00h\x00a.",
    "shape-huge": HEAD + tensor(HUGE + HUGE + b"\x86", b"K\x01K\x01\x86") + b".",
    "shape-empty-and-huge": HEAD + tensor(b"K\x00" + HUGE + HUGE + b"\x87", b"K\x01K\x01K\x01\x87") + b".",
    "strides-of-0": HEAD + tensor(HUGE + b"\x85", b"K\x00\x85") + b".",
    "strides-huge": HEAD + tensor(b"K\x02\x85", HUGE + b"\x85") + b".",
    "start-negative": HEAD + tensor(b"K\x01\x85", b"K\x01\x85", b"J\xff\xff\xff\xff") + b".",
    "axes-many": HEAD + tensor(b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t") + b".",
    "storage-of-another-size": HEAD + storage(4800) + b".",
    "numpy-reconstruct": HEAD
    + named("numpy.core.multiarray", "_reconstruct")
    + b"("
    + named("numpy", "ndarray")
    + b"J\x00\x00\x00\x7f\x85X\x01\x00\x00\x00btR.",
    "numpy-objects": HEAD + named("numpy", "dtype") + b"X\x02\x00\x00\x00O8\x85R.",
    "text-copied-again-and-again": HEAD + ENCODE + b"]" + b"h\x01h\x02h\x03\x86Ra" * 4000 + b".",
    "text-copied-and-forgotten": HEAD + ENCODE + b"}" + b"K\x01h\x01h\x02h\x03\x86Rs" * 40_000 + b".",
    "files-filled-again-and-again": HEAD + FILL + b"]" + b"h\x01)Rh\x02ba" * 4000 + b".",
    "sets-made-again-and-again": HEAD + SET + b"]" + b"h\x01h\x02\x85Ra" * 4000 + b".",
    "sets-many": HEAD + b"](" + b"\x8f" * 1_000_000 + b"e.",
    "key-of-indexes-of-indexes": HEAD + b"}" + text(b"x") + b"q\x00" + INDEX * 60 + b"K\x01s.",
    "terminal": HEAD + named("os\x1b[31m", "system") + b".",
    "stack-empty": HEAD + b"\x85.",
    "no-end": HEAD + b"K\x01",
    "text-beyond-the-end": HEAD + b"X\xff\xff\xff\xff.",
}


def record_of(path: Path, index: IndexPlace | None = None) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(path.name, "rng", 0, len(data), zlib.crc32(data), index)


def raise_first(damages: Sequence[Damage]) -> None:
    raise CheckpointCorruptError(damages[0].problem)


def refused(read: Callable[[], Any]) -> str:
    """The message. In little time, and with little memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CheckpointCorruptError) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 20
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_the_pickles_are_hostile_by_one_thing_only(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(archive_of(HEAD + b"}K\x05" + tensor(b"K\x06\x85", b"K\x01\x85") + b"s."))
    assert is_same(READERS["ours"](tmp_path / "file.pt"), {5: PLAIN["tensor"].view(-1)})
    (tmp_path / "file.pt").write_bytes(archive_of(HEAD + b"}K\x01K\x01" + DOUBLE * 3 + b"\x86K\x01s."))
    assert len(READERS["ours"](tmp_path / "file.pt")) == 1


# All readers have one unpickler: what takes seconds runs in CI with one of them, and with `.metadata`.
@pytest.mark.parametrize(
    ("name", "reader"),
    [
        pytest.param(name, reader, marks=pytest.mark.full if name == "sets-many" and reader != "ours" else ())
        for name in PICKLES
        for reader in READERS
    ],
)
def test_a_hostile_pickle(name: str, reader: str, tmp_path: Path) -> None:
    if name == "strides-of-0" and reader == "in place":
        pytest.skip("nothing is allocated for its elements, and who reads them wants them dense")
    (tmp_path / "file.pt").write_bytes(archive_of(PICKLES[name]))
    assert "file.pt" in refused(lambda: READERS[reader](tmp_path / "file.pt"))


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_metadata(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PICKLES[name])
    assert ".metadata" in refused(lambda: load_metadata(tmp_path / ".metadata"))


@pytest.mark.parametrize("opcodes", [b"K\x010", b"(K\x011", b"\x8d" + b"\0" * 8, b"\x8e" + b"\0" * 8])
def test_what_python_writes_for_no_value_of_ours_is_refused(opcodes: bytes, tmp_path: Path) -> None:
    """POP and POP_MARK are for values that contain themselves, BINUNICODE8 and BINBYTES8 for more than 4 GiB."""
    (tmp_path / "file.pt").write_bytes(archive_of(HEAD + b"}" + opcodes + b"."))
    assert "is not allowed" in refused(lambda: READERS["ours"](tmp_path / "file.pt"))


class Hostile:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("reader", READERS_AND_METADATA)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_nothing_is_run(protocol: int, reader: str, tmp_path: Path) -> None:
    trace, path = tmp_path / "it_ran", tmp_path / "file.pt"
    pickled = pickle.dumps({"a": Hostile(trace)}, protocol)
    path.write_bytes(pickled if reader == ".metadata" else archive_of(pickled))
    refused(lambda: READERS_AND_METADATA[reader](path))
    assert not trace.exists()
    pickle.loads(pickled)
    assert trace.exists(), "the payload is not hostile: this test tests nothing"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_plain_is_read(protocol: int, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(PLAIN, stream, pickle_protocol=protocol)
    assert is_same(decode_pt(stream.getvalue()), PLAIN)
    (tmp_path / "file.pt").write_bytes(stream.getvalue())
    for mmap in (False, True):
        assert is_same(load_safely(tmp_path / "file.pt", "file.pt", mmap=mmap), PLAIN)


# -- archives ----------------------------------------------------------------------------------------------


def rewritten(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray(pt_of({"a": torch.arange(100), "b": torch.arange(100)}))
    change(data)
    return bytes(data)


def at_entry(name: bytes, offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    """Writes a number into the directory's entry of a record."""

    def change(data: bytearray) -> None:
        start = data.rindex(name) - 46
        assert data[start : start + 4] == b"PK\x01\x02"
        struct.pack_into(form, data, start + offset, value)

    return change


def at_end(offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, len(data) - 22 + offset, value)


def renamed(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    assert len(old) == len(new)

    def change(data: bytearray) -> None:
        data[:] = data.replace(old, new)

    return change


ARCHIVES: dict[str, Callable[[bytearray], None]] = {
    "compressed": at_entry(b"archive/data/0", 10, "<H", 8),
    "encrypted": at_entry(b"archive/data/0", 8, "<H", 1),
    "larger-than-stored": at_entry(b"archive/data/0", 24, "<I", 10**9),
    "larger-than-the-file": lambda data: [at_entry(b"archive/data/0", o, "<I", 10**9)(data) for o in (20, 24)] and None,
    "overlapping": at_entry(b"archive/data/0", 42, "<I", 0),
    "at-another-record": at_entry(b"archive/data.pkl", 42, "<I", 64),
    "beyond-the-end": at_entry(b"archive/data/0", 42, "<I", 2**31),
    "zip64-without-a-field": at_entry(b"archive/data/0", 42, "<I", 2**32 - 1),
    "name-with-dots": renamed(b"archive/data/0", b"archive/../a/0"),
    "name-absolute": renamed(b"archive/data/0", b"/rchive/data/0"),
    "name-that-a-terminal-obeys": renamed(b"archive/data/0", b"archive/data/\x1b"),
    "twice": renamed(b"archive/data/1", b"archive/data/0"),
    "more-entries": lambda data: [at_end(o, "<H", 60000)(data) for o in (8, 10)] and None,
    "directory-huge": at_end(12, "<I", 2**31),
    "directory-elsewhere": at_end(16, "<I", 0),
    "several-disks": at_end(4, "<H", 1),
    "cut": lambda data: data.__delitem__(slice(-1, None)),
    "longer": lambda data: data.extend(b"x"),
    "empty": lambda data: data.clear(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_lies(name: str, reader: str, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(rewritten(ARCHIVES[name]))
    refused(lambda: READERS[reader](tmp_path / "file.pt"))


@pytest.mark.parametrize("reader", READERS)
def test_a_zip_bomb(reader: str, tmp_path: Path) -> None:
    """A gigabyte of zeros in a megabyte; torch.load would take it."""
    pickled = HEAD + b"X" + struct.pack("<I", 64 << 20) + bytes(64 << 20) + b"."
    (tmp_path / "file.pt").write_bytes(archive_of(pickled, zipfile.ZIP_DEFLATED))
    assert (tmp_path / "file.pt").stat().st_size < 1 << 20
    assert "compressed" in refused(lambda: READERS[reader](tmp_path / "file.pt"))
