"""Files and messages that are small, and would be large as Python objects: each reader refuses them before that.

`tracemalloc` counts what Python takes. The data of a bomb are read by the reader itself where it reads a file, and
count, too.
"""

import json
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint import file_names, index, manifest, manifest_text
from mcore_ckpt.checkpoint import zip_format as zf
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.checkpoint.timeline import SaveTimeline
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.fast.peer_store import PeerStore
from mcore_ckpt.formats import companions
from mcore_ckpt.formats.foreign_pickles import load_metadata, load_safely
from mcore_ckpt.formats.huggingface.safetensors_files import encode_header, encode_index, read_file, read_weight_map
from mcore_ckpt.formats.huggingface.tokenizer_size import tokens_in
from mcore_ckpt.formats.torch_save_files import read_pt
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import parse_json
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.ranks import key_value_store
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.save import rank_reports
from mcore_ckpt.sharding.plan import ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Piece, Region
from mcore_ckpt.steps import listing as steps

NBYTES = 1 << 19
Read = Callable[[], Any]
# How many times its own size a file may take before it is refused.
MOST = 4


def peak(work: Callable[[], Any]) -> int:
    """Returns how many bytes Python has taken at most while `work` ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def of(unit: bytes, nbytes: int = NBYTES) -> bytes:
    return unit * (nbytes // len(unit))


def members(nbytes: int = NBYTES) -> bytes:
    return b"".join(b'"%x":0,' % number for number in range(nbytes // 9))


# The values of a list, without the brackets.
VALUES: dict[str, Callable[[], bytes]] = {
    "lists": lambda: of(b"[],"),
    "lists-of-lists": lambda: of(b"[[[]]],"),
    "deep": lambda: b"[" * 400_000 + b"]" * 400_000 + of(b",", 8) + b"0,",
    "objects": lambda: of(b"{},"),
    "objects-of-objects": lambda: of(b'{"a":{"b":0}},'),
    "names": lambda: of(b'"\\u00e9",'),
    "texts": lambda: of(b'"ab",'),
    "texts-of-nothing": lambda: of(b'"",'),
    "digits": lambda: of(b"0,"),
    "numbers": lambda: of(b"1000,"),
    "floats": lambda: of(b"1e9,"),
    "words": lambda: of(b"null,"),
    "members": lambda: b"{" + members()[:-1] + b"},",
    "quotes": lambda: of(b'"\\"",'),
    "wide-text": lambda: b'"' + of(b"x" * 2000) + "\U0001f600".encode() + b'",',
}


def text(values: bytes) -> bytes:
    return b'{"a":[' + values + b"0]}"


def sealed(body: bytes) -> bytes:
    """A manifest that begins and ends as ours, whose checksum is right."""
    head, tail = b'{"attempt":"a"', b',"files":[' + body + b'0],"format":"mcore_ckpt"}'
    return head + b',"crc32":%d' % zlib.crc32(tail, zlib.crc32(head)) + tail + b"\n"


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def listed(root: Path, data: bytes) -> Read:
    written(root / "global_steps_1" / "actor" / file_names.MANIFEST_FILE, data)

    def read() -> None:
        (status,) = steps.list_steps(root)
        assert not status.is_complete
        raise CheckpointError(status.reason)

    return read


def opened(folder: Path, data: bytes) -> Read:
    path = written(folder / file_names.MANIFEST_FILE, data)
    return lambda: read_manifest(path.parent)


def holds(count: int) -> bytes:
    return b'{"holds":[' + b"[0,0]," * count + b"[0,0]]},"


def header(path: Path, data: bytes) -> Read:
    written(path, struct.pack("<Q", len(data)) + data)
    return lambda: read_file(path)


def weight_map(path: Path, data: bytes) -> Read:
    written(path, data)
    return lambda: read_weight_map(path)


def config(folder: Path, data: bytes) -> Read:
    written(folder / "config.json", data)
    return lambda: read_config(folder)


def index_of(data: bytes) -> Read:
    return lambda: IndexEntries(data, "file", 0, "file")


def peer_listing(data: bytes) -> Read:
    store = PeerStore("localhost:1", b"secret", "node", 1)
    store._ask = lambda *_: data  # type: ignore[method-assign]
    return lambda: store.sizes("folder")


EMPTY_INDEX = index.encode_index(index.FileIndex((), ()))

# Each reader of JSON, prepared for the values of a list.
JSON: dict[str, Callable[[Path, bytes], Read]] = {
    "manifest": lambda folder, values: opened(folder, text(values)),
    "manifest-with-checksum": lambda folder, values: opened(folder, sealed(values)),
    "manifest-in-a-listing": lambda folder, values: listed(folder, text(values)),
    "manifest-with-checksum-in-a-listing": lambda folder, values: listed(folder, sealed(values)),
    "index": lambda folder, values: index_of(text(values)),
    "index-that-begins-as-ours": lambda folder, values: index_of(
        EMPTY_INDEX.replace(b'"tensors":[]', b'"tensors":[' + values + b"0]")
    ),
    "safetensors-header": lambda folder, values: header(folder / "model.safetensors", text(values)),
    "weight-map": lambda folder, values: weight_map(folder / "index.json", text(values)),
    "config": lambda folder, values: config(folder, text(values)),
    "file-of-a-framework": lambda folder, values: partial(parse_json, text(values), folder),
    "peer-listing": lambda folder, values: peer_listing(text(values)),
    "message": lambda folder, values: partial(key_value_store.unpack, text(values)),
}
REFUSALS = (CheckpointError, ValueError, OSError)
# What ranks send each other may be denser: `[0,5],`. It is small.
READ = {("message", kind) for kind in ("names", "numbers", "floats", "words", "members")}


def pairs(kinds: Iterable[str], readers: Iterable[str], few: Collection[str], first: str) -> Iterator[Any]:
    """All readers with a few kinds of bombs, and all kinds with one reader; the others only with `--full`."""
    for kind, reader in product(kinds, readers):
        yield pytest.param(kind, reader, marks=() if kind in few or reader == first else pytest.mark.full)


@pytest.mark.parametrize(("kind", "reader"), pairs(VALUES, JSON, ("lists", "texts"), "manifest-with-checksum"))
def test_json_is_refused_before_it_takes_memory(kind: str, reader: str, tmp_path: Path) -> None:
    if (reader, kind) in READ:
        pytest.skip("such messages are read")
    values = VALUES[kind]()
    with suppress(*REFUSALS):
        JSON[reader](tmp_path / "small", b"")()  # imports what it needs
    read = JSON[reader](tmp_path / "bomb", values)
    assert peak(lambda: refused(read)) < MOST * len(values)


def test_runs_of_tensors_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    data = sealed(holds(NBYTES // 6))
    read = opened(tmp_path, data)
    assert peak(lambda: refused(read)) < MOST * len(data)


def test_ranks_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    """The list of ranks may be denser than other text, if all ranks have the same members."""
    for ranks in (of(b"{},"), of(b'{"a":0},'), VALUES["members"](), of(b'{"a":[0]},'), of(b"0,"), of(b"[],")):
        body = b'{"attempt":"a"', b',"files":[],"ranks":[' + ranks[:-1] + b'],"role":"actor"}'
        data = body[0] + b',"crc32":%d' % zlib.crc32(body[1], zlib.crc32(body[0])) + body[1] + b"\n"
        taken = peak(partial(refused, opened(tmp_path, data)))
        assert taken < MOST * len(data), ranks[:20]


def test_sizes_of_files_take_no_memory() -> None:
    """`worth` needs only the sizes, which it finds without decoding the rest."""
    data = sealed(of(b'{"path":"","rank":0,"size":0},'))
    assert peak(lambda: manifest_text.decode_sizes(data)) < MOST * len(data)


def refused(read: Callable[[], Any]) -> str:
    with pytest.raises(REFUSALS) as caught:
        read()
    return str(caught.value)


def test_a_large_file_of_a_framework_takes_little_memory_or_is_refused(tmp_path: Path) -> None:
    """The settings of each layer take ten times their size, which does no harm in a file of a few MB."""
    for count, is_read in ((40_000, True), (80_000, False)):
        data = json.dumps({f"model.layers.{n}.mlp": {"bits": 4, "group": 128} for n in range(count)}).encode()
        assert (len(data) < json_bounds.LARGE_BYTES) == is_read
        if is_read:
            assert len(parse_json(data, tmp_path)) == count
        else:
            assert peak(lambda data=data: refused(lambda: parse_json(data, tmp_path))) < MOST * len(data)  # type: ignore[misc]
    names = json.dumps({"skipped": [f"{n:080}" for n in range(60_000)]}).encode()
    assert len(names) > json_bounds.LARGE_BYTES
    assert peak(lambda: parse_json(names, tmp_path)) < MOST * len(names)


# -- pickles -----------------------------------------------------------------------------------------------

# Lists of numbers or of None, and dicts of numbers, are as dense as sound pickles: they take 5 to 20 times their size.
PICKLES: dict[str, bytes] = {
    "lists": of(b"]"),
    "dicts": of(b"}"),
    "lists-in-the-memo": of(b"]\x94"),
    "tuples": of(b"N\x85"),
    "tuples-of-tuples": b"N" + of(b"\x85"),
    "marks": of(b"("),
    "memo": b"N" + of(b"\x94"),
    "memo-out-of-order": b"N" + b"".join(b"r" + struct.pack("<I", 2**31 - n) for n in range(NBYTES // 5)),
    "sets": of(b"\x8f"),
}


def archive_of(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    return path


def plain(path: Path, data: bytes) -> Read:
    file = archive_of(path, data).read_bytes()
    record = FileRecord(path.name, "rng", 0, len(file), zlib.crc32(file))
    return lambda: read_plain(path.parent, record)


PICKLE_READERS: dict[str, Callable[[Path, bytes], Read]] = {
    "metadata": lambda path, data: partial(load_metadata, written(path, data)),
    "common.pt": lambda path, data: partial(load_safely, archive_of(path, data), "file"),
    "shard": lambda path, data: partial(read_pt, archive_of(path, data)),
    "small file": plain,
}


@pytest.mark.parametrize(("kind", "reader"), pairs(PICKLES, PICKLE_READERS, ("lists", "memo"), "metadata"))
def test_a_pickle_is_refused_before_it_takes_memory(kind: str, reader: str, tmp_path: Path) -> None:
    data = b"\x80\x04" + PICKLES[kind]
    refused(PICKLE_READERS[reader](tmp_path / "small", b"\x80\x04"))
    read = PICKLE_READERS[reader](tmp_path / "bomb", data)
    assert peak(lambda: refused(read)) < MOST * len(data)


def test_a_zip_directory_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """Its entries all name the same record, so they take less of the file than records would."""
    entry = zf.DIRECTORY_ENTRY.pack(zf.DIRECTORY_SIGNATURE, *[0] * 8, 0, 1, 0, 0, 0, 0, 0, 0)[:46] + b"a"
    count = NBYTES // len(entry)
    directory = entry * count
    end = zf.END_64.pack(zf.END_64_SIGNATURE, zf.END_64_LENGTH, 0, 0, 0, 0, count, count, len(directory), 0)
    end += zf.LOCATOR_64.pack(zf.LOCATOR_64_SIGNATURE, 0, len(directory), 1)
    end += zf.END.pack(zf.END_SIGNATURE, 0, 0, zf.MAX_16, zf.MAX_16, zf.MAX_32, zf.MAX_32, 0)
    path = written(tmp_path / "bomb.pt", directory + end)
    refused(lambda: read_pt(tmp_path / "nothing.pt"))
    taken = peak(lambda: refused(lambda: read_pt(path)))
    assert taken < MOST * len(directory)


# -- what is compressed ------------------------------------------------------------------------------------


def zipped(data: bytes) -> bytes:
    return zlib.compress(data, 9)


def test_a_message_is_not_decompressed_to_any_size() -> None:
    packed = b"z" + zipped(bytes(64 << 20))
    taken = peak(lambda: refused(lambda: key_value_store.unpack(packed)))
    assert taken < 2 * key_value_store._ANY_UNPACKED


def test_names_are_not_decompressed_to_any_size() -> None:
    sent = rank_reports._COMPRESSED + b64encode(zipped(bytes(64 << 20))).decode()
    taken = peak(lambda: refused(lambda: rank_reports._unpacked(sent)))
    assert taken < 2 * key_value_store._ANY_UNPACKED


def test_names_of_one_character_are_refused() -> None:
    digits = "\n".join(f"{number % 7919:x}" for number in range(NBYTES // 4))
    sent = rank_reports._packed(digits.split("\n"))
    taken = peak(lambda: refused(lambda: rank_reports._unpacked(sent)))
    assert taken < MOST * len(digits)


@pytest.mark.parametrize("entry", ["w[0-999999999]", "w[0-9999].[0-9999]", "w[0-]", "[0-99999999].w[1-999999999]"])
def test_ranges_are_not_expanded_to_any_number_of_names(entry: str) -> None:
    names = rank_reports.TensorNames()
    names.receive({"file": rank_reports._packed([entry]), "groups": rank_reports._packed(["\t0\tkey", entry])})
    for ask in (lambda: names.in_order(["file"]), lambda: names.groups(["groups"])):
        taken = peak(lambda ask=ask: refused(ask))
        assert taken < MOST * NBYTES


@pytest.mark.parametrize("value", ["[]", "{}", '""', "0", "[0]", '{"":0}'])
def test_a_report_of_many_small_values_is_refused(value: str) -> None:
    """In the message it is one string, of which the check of the message counts nothing."""
    report = f"[[{','.join([value] * (NBYTES // len(value)))}]]"
    record = key_value_store.unpack(key_value_store.pack({"report": report}))
    taken = peak(lambda: refused(lambda: rank_reports.RankReport.of(record)))
    assert taken < MOST * len(report)


@pytest.mark.parametrize("data", [b"", b"z", b"zz", b"{", b"z" + zipped(b"{}")[:-3]])
def test_a_message_that_makes_no_sense(data: bytes) -> None:
    refused(lambda: key_value_store.unpack(data))


def test_a_message_that_is_all_the_same_is_sent_as_it_is() -> None:
    """Compressed it would look like a bomb."""
    message = {"names": " " * (4 << 20)}
    assert key_value_store.unpack(key_value_store.pack(message)) == message


# -- files of frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VALUES)
def test_a_file_of_the_trainer_takes_no_memory(kind: str, tmp_path: Path) -> None:
    """It is the trainer's, so it is not refused. Whether it was cut is all that counts."""
    data = text(VALUES[kind]())
    for path, is_whole in ((tmp_path / "whole.json", True), (tmp_path / "cut.json", False)):
        written(path, data if is_whole else data[: len(data) // 2])
        taken = peak(lambda path=path: companions.first_cut(path.parent, ()))  # type: ignore[misc]
        assert companions._is_json(path) == is_whole
        assert taken < MOST * len(data)


def test_a_tokenizer_with_lists_in_place_of_merges_takes_no_memory(tmp_path: Path) -> None:
    data = b'{"model":{"vocab":{"a":5},"merges":[' + VALUES["lists"]() + b"0]}}"
    written(tmp_path / "tokenizer.json", data)
    assert peak(lambda: tokens_in(tmp_path)) < MOST * len(data)
    assert tokens_in(tmp_path) == 6


# -- sound files take no more ----------------------------------------------------------------------------


def layer_names(count: int) -> list[str]:
    return [f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in range(count)]


def dense_manifest(folder: Path) -> tuple[bytes, Read]:
    data = manifest.encode_manifest(manifest_of(2000, tensors=500))
    return data, opened(folder, data)


def dense_header(folder: Path) -> tuple[bytes, Read]:
    names = layer_names(10_000)
    data = encode_header((name, torch.float32, (2, 3)) for name in names)
    path = written(folder / "model.safetensors", data + bytes(24 * len(names)))
    return data, lambda: read_file(path)


def dense_weight_map(folder: Path) -> tuple[bytes, Read]:
    data = encode_index(dict.fromkeys(layer_names(10_000), "model-00001-of-00002.safetensors"), 5)
    path = written(folder / "index.json", data)
    return data, lambda: read_weight_map(path)


def dense_index(region: Region, nbytes: int, crcs: int) -> bytes:
    names = layer_names(8_000 if crcs == 1 else 60_000 // crcs)
    keys = (ShardKey(name, "param") for name in names)
    of_each = [tuple(2**31 + n + crc for crc in range(crcs)) for n in range(len(names))]
    shards = (StoredShard(key, region, "float32", "file", nbytes * n, nbytes, of_each[n]) for n, key in enumerate(keys))
    return index.encode_index(index.FileIndex(tuple(shards), ()))


MANY_PIECES = Region((12, 8), (6, 8), tuple(Piece((row, 0), (1, 8), (2 * row, 0)) for row in range(6)), (0, 48))
INDEXES = {
    "of-pieces": dense_index(MANY_PIECES, 192, 1),
    "of-few-numbers": dense_index(Region.whole((3,)), 12, 1),
    "of-crcs": dense_index(Region.whole((250 << 18,)), 250 << 20, 250),
}


def whole_index(name: str) -> tuple[bytes, Read]:
    return INDEXES[name], lambda: index.decode_index(bytes(bytearray(INDEXES[name])), "file", 1 << 60)


def index_entries(name: str) -> tuple[bytes, Read]:
    return INDEXES[name], lambda: IndexEntries(bytes(bytearray(INDEXES[name])), "file", 1 << 60, "file")


def dense_tokenizer(folder: Path) -> tuple[bytes, Read]:
    tokens = {f"\u0120{number:x}": number for number in range(30_000)}
    merges = [[f"\u0120{number:x}", "a"] for number in range(30_000)]
    data = json.dumps({"model": {"vocab": tokens, "merges": merges}}, ensure_ascii=False, indent=1).encode()
    written(folder / "tokenizer.json", data)
    return data, lambda: tokens_in(folder)


SOUND: dict[str, Callable[[Path], tuple[bytes, Read]]] = {
    "manifest": dense_manifest,
    "safetensors-header": dense_header,
    "weight-map": dense_weight_map,
    "tokenizer": dense_tokenizer,
    **{f"index-{name}": lambda folder, name=name: whole_index(name) for name in INDEXES},  # type: ignore[misc]
    **{f"index-{name}-one-by-one": lambda folder, name=name: index_entries(name) for name in INDEXES},  # type: ignore[misc]
}


@pytest.mark.parametrize("of", SOUND)
def test_sound_files_take_little_memory(of: str, tmp_path: Path) -> None:
    """Even if all of the file is read. So a forged one, which looks the same up to its end, takes no more."""
    data, read = SOUND[of](tmp_path)
    assert len(data) > 8 * json_bounds.SMALL_BYTES
    read()  # imports what it needs
    assert peak(read) < MOST * len(data)


# -- large files that are sound ----------------------------------------------------------------------------


def manifest_of(world: int, tensors: int) -> manifest.Manifest:
    random = Random(1)

    def number() -> int:
        return random.randrange(10**8, 2**32)

    def numbers() -> tuple[int, ...]:
        return tuple(random.randrange(10**6, 10**7) for _ in range(world))

    files = []
    for rank in range(world):
        run = sorted(random.sample(range(tensors), 8))
        place = manifest.IndexPlace(number(), 50_000, number())
        holds = Holds(zip(run[::2], run[1::2], strict=True))
        files.append(manifest.FileRecord(f"rng/rank_{rank:05d}.pt", "rng", rank, 20480, number()))
        path = f"optimizer/rank_{rank:05d}.pt"
        files.append(manifest.FileRecord(path, "optimizer", rank, 2**33, number(), place, holds))
    return manifest.Manifest(
        step=1,
        role="actor",
        roles=("actor",),
        attempt="a",
        created="2026",
        versions={"torch": "2"},
        contents=("optimizer",),
        topology=Topology(**{**dict.fromkeys(Topology.__dataclass_fields__, 1), "world_size": world, "dp": world}),
        ranks=tuple(
            RankCoordinates(**{**dict.fromkeys(RankCoordinates.__dataclass_fields__, 0), "dp": rank})
            for rank in range(world)
        ),
        stages=(manifest.StageRecord(0, 0, (0,), ()),),
        tensors=tuple(f"layers.{number}.weight" for number in range(tensors)),
        files=tuple(files),
        save_timeline=SaveTimeline(numbers(), *((numbers(), numbers()) for _ in range(3)), (1, 2)),
    )


def resealed(record: dict[str, Any]) -> bytes:
    """The manifest of a record, written in lines."""
    del record["crc32"]
    return json.dumps(record | {"crc32": zlib.crc32(fields.encode(record))}, indent=1, ensure_ascii=False).encode()


def test_a_large_manifest_is_read(tmp_path: Path) -> None:
    """As dense as one becomes: of many ranks and few tensors, with a timeline. benchmarks/scale.py makes others."""
    large = manifest_of(2000, tensors=500)
    data = manifest.encode_manifest(large)
    assert len(data) > 8 * json_bounds.SMALL_BYTES
    assert manifest.decode_manifest(data) == large
    assert manifest.decode_summary(data) == large.head
    # Only what all ranks share was saved: then most of it are the ranks.
    few = replace(large, files=large.files[:10])
    assert manifest.decode_manifest(manifest.encode_manifest(few)) == few
    # As another program would write it, and with names that are not ASCII.
    record = json.loads(data) | {"created": "\U0001f600"}
    assert manifest.decode_manifest(resealed(record)).files == large.files


def test_a_large_vocabulary_is_read(tmp_path: Path) -> None:
    tokens = {f"\u0120{number:x}": number for number in range(30_000)} | {"\U0001f600": 30_000, "[[{": 30_001}
    merges = [[f"\u0120{number:x}", "a"] for number in range(30_000)]
    found = {"model": {"vocab": tokens, "merges": merges}, "added_tokens": [{"id": 30_002}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found, separators=(",", ":"), ensure_ascii=False))
    assert tokens_in(tmp_path) == 30_003


def test_long_texts_are_read() -> None:
    """Brackets, commas and quotes inside of them count for nothing."""
    found = {"texts": ['[[{,:"' * 2000 + "\\", "\u00e9" * 1000, "\U0001f600"] * 20 + ["{" * 99_000]}
    for data in (json.dumps(found).encode(), json.dumps(found, ensure_ascii=False).encode()):
        assert parse_json(data, Path("file")) == found


def test_large_headers_and_indexes_are_read(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(5000)]
    head = encode_header((name, torch.float32, (2, 3)) for name in names)
    written(tmp_path / "model.safetensors", head + bytes(24 * len(names)))
    assert {tensor.name for tensor in read_file(tmp_path / "model.safetensors")} == set(names)
    where = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    (tmp_path / "index.json").write_bytes(encode_index(where, 5))
    assert read_weight_map(tmp_path / "index.json") == where


def test_a_large_index_of_many_pieces_is_read() -> None:
    """The densest: each tensor is one of many pieces of short axes."""
    pieces = tuple(Piece((row, 0), (1, 8), (2 * row, 0)) for row in range(6))
    region = Region((12, 8), (6, 8), pieces, (0, 48))
    shards = tuple(
        StoredShard(ShardKey(f"layers.{n}.weight", "model"), region, "float32", "file", 192 * n, 192, (2**31 + n,))
        for n in range(500)
    )
    data = index.encode_index(index.FileIndex(shards, ()))
    assert index.decode_index(data, "file", 192 * 500).shards == shards
    assert IndexEntries(data, "file", 192 * 500, "file").of("layers.7.weight").shards == shards[7:8]


def test_large_pickles_are_read(tmp_path: Path) -> None:
    """The densest: numbers by numbers, pairs, and metadata whose tensors have many chunks."""
    values = {"numbers": {number: number for number in range(40_000)}, "pairs": [(n, n) for n in range(40_000)]}
    torch.save(values, tmp_path / "common.pt")
    assert load_safely(tmp_path / "common.pt", "file") == values
    offsets = [torch.Size((4 * number, 0)) for number in range(16)]
    chunks = [ChunkStorageMetadata(offset, torch.Size((4, 8))) for offset in offsets]
    properties, names = TensorProperties(torch.bfloat16), [f"layers.{number}.weight" for number in range(500)]
    tensors: dict[str, Any] = {name: TensorStorageMetadata(properties, torch.Size((64, 8)), chunks) for name in names}
    place = _StorageInfo("__0_0.distcp", 3, 5)
    places = {MetadataIndex(name, offset): place for name in names for offset in offsets}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    assert load_metadata(tmp_path / ".metadata").storage_data == places
