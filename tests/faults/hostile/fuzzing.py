"""Damages files of checkpoints at random, and looks at what their readers make of it.

Only errors of the package's own may come out. What has a checksum is either refused or read bit for bit as it was; what
was forged together with its checksum, or has none, may be read as something else, in bounded time and memory.
"""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.contract import RegionRead, weights_of
from mcore_ckpt.formats.foreign_pickles import load_safely
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents
from mcore_ckpt.formats.huggingface.safetensors_files import encode_header, read_folder, read_weight_map
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.reader import open_torch_dist
from mcore_ckpt.formats.torch_save_files import read_pt
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.owner import Life, read_owner, write_owner
from tests.support.checkpoints import ROLE, make, tensors
from tests.support.torch_dist_folder import make_torch_dist

SLOWEST_S = 10.0

Rng = random.Random


class Escaped(AssertionError):
    """Something that a reader must not do."""


# -- damage ------------------------------------------------------------------------------------------------

_NUMBERS = [b"\xff" * 4, b"\xff" * 8, bytes(8), *(struct.pack("<Q", 2**n) for n in (31, 50, 63))]


def damage(data: bytes, rng: Rng) -> bytes:
    """Some bytes changed, cut out, put in, or moved."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 16, 100))
        match rng.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = rng.randbytes(length)
            case 4:
                number = rng.choice(_NUMBERS)
                changed[at : at + len(number)] = number
            case 5:
                source = rng.randrange(len(changed) + 1)
                changed[at : at + length] = changed[source : source + length]
            case _:
                if rng.random() < 0.2:
                    del changed[at:]
    return bytes(changed)


_DEEP: Any = []
for _ in range(200):
    _DEEP = [_DEEP]
_VALUES = [None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**30, 0.5, 1e308, "", "..", "../x", "/etc/passwd", "a" * 5000]
_VALUES += ["\x1b[31m", "\0", [], {}, [[]], [-1], [2**62] * 70, {"a": 1}, "bfloat16", [0, 2**62], _DEEP]


def forge(value: Any, rng: Rng) -> Any:
    """A JSON value with some places in it changed to what nobody would write."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, key = value, None
        holder: Any = None
        while isinstance(at, (dict, list)) and at and (holder is None or rng.random() < 0.85):
            holder = at
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            at = at[key]
        if holder is None:
            continue
        match rng.randrange(4):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(holder)))
            case 2 if isinstance(at, int):
                holder[key] = at + rng.choice((-1, 1, 7, 4096, -at))
            case _:
                holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return value


# -- what is read ------------------------------------------------------------------------------------------

Case = Callable[[Rng], Callable[[], None]]
"""Damages files, and says how to read them."""


def is_same(left: Any, right: Any) -> bool:
    """Bit for bit, tensors among it too."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        same_kind = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.dtype == right.dtype
        return same_kind and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


@dataclass(frozen=True)
class Sample:
    """A small checkpoint, and what its files hold before anything happens to them."""

    root: Path
    role_dir: Path
    manifest: Manifest
    files: dict[str, bytes]

    @staticmethod
    def make(root: Path) -> Sample:
        role_dir = file_names.step_dir(root, 7) / ROLE
        make(role_dir, 3)
        manifest = read_manifest(role_dir)
        paths = [file_names.MANIFEST_FILE, *(file.path for file in manifest.files)]
        return Sample(root, role_dir, manifest, {path: (role_dir / path).read_bytes() for path in paths})

    def record(self, kind: str) -> FileRecord:
        return self.manifest.files_of(kind)[0]

    def put(self, path: str, data: bytes) -> None:
        (self.role_dir / path).write_bytes(data)

    def restore(self) -> None:
        for path, data in self.files.items():
            self.put(path, data)


def _expect(found: Any, wanted: Any, what: str) -> None:
    if not is_same(found, wanted):
        raise Escaped(f"{what} was damaged, and read as something else: {str(found)[:300]}")


def _read_all(role_dir: Path) -> None:
    """Everything that a manifest speaks of."""
    manifest = read_manifest(role_dir)
    reader = NativeReader.open(role_dir)
    str(manifest.topology), manifest.nbytes
    for file in manifest.files:
        if file.index is None:
            read_plain(role_dir, file)
            continue
        for shard in read_index(role_dir, file).shards:
            _read_shard(role_dir, file, shard)
    for name in manifest.tensors:
        for kind in ("model", "param", "exp_avg"):
            key = ShardKey(name, kind)
            reader.shards(key, reader.files(key))


def _read_shard(role_dir: Path, file: FileRecord, shard: Any) -> torch.Tensor:
    memory = torch.zeros(shard.region.numel, dtype=torch_dtype(shard.dtype))
    list(shard.region.boxes())
    read_ranges(role_dir, {file.path: file}, [(ReadRange(shard, Rows(0, 0, shard.region.numel)), memory)])
    return memory


def manifest_bytes(sample: Sample) -> Case:
    def case(rng: Rng) -> Callable[[], None]:
        sample.put(file_names.MANIFEST_FILE, damage(sample.files[file_names.MANIFEST_FILE], rng))

        def read() -> None:
            _expect(read_manifest(sample.role_dir), sample.manifest, "the manifest")

        return read

    return case


def manifest_forged(sample: Sample) -> Case:
    def case(rng: Rng) -> Callable[[], None]:
        record = json.loads(sample.files[file_names.MANIFEST_FILE])
        del record["crc32"]
        record = forge(record, rng)
        try:
            sealed = fields.encode(record | {"crc32": zlib.crc32(fields.encode(record))})
        except ValueError:
            sealed = json.dumps(record).encode()
        sample.put(file_names.MANIFEST_FILE, sealed)

        def read() -> None:
            steps.step_status(sample.role_dir.parent)
            _read_all(sample.role_dir)

        return read

    return case


def index_forged(sample: Sample) -> Case:
    record = sample.record("optimizer")
    data = sample.files[record.path]
    assert record.index is not None
    start, stop = record.index.offset, record.index.offset + record.index.size

    def case(rng: Rng) -> Callable[[], None]:
        index = forge(json.loads(data[start:stop]), rng)
        encoded = json.dumps(index).encode() if rng.random() < 0.7 else damage(data[start:stop], rng)
        whole = data[:start] + encoded + data[stop:]
        assert record.index is not None
        place = structs.replace(record.index, size=len(encoded), crc32=zlib.crc32(encoded))
        forged = structs.replace(record, index=place, size=len(whole))
        sample.put(record.path, whole)

        def read() -> None:
            for shard in read_index(sample.role_dir, forged).shards:
                if shard.region.numel * 4 < 1 << 28:
                    _read_shard(sample.role_dir, forged, shard)

        return read

    return case


def payload(sample: Sample) -> Case:
    """The size must stay, or it is seen at once."""
    record = sample.record("optimizer")
    data = sample.files[record.path]
    wanted = tensors(3, 0)

    def case(rng: Rng) -> Callable[[], None]:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        sample.put(record.path, bytes(changed))

        def read() -> None:
            for shard in read_index(sample.role_dir, record).shards:
                found = _read_shard(sample.role_dir, record, shard)
                _expect(found, wanted[shard.key.name].view(-1), str(shard.key))

        return read

    return case


def _forged_record(sample: Sample, data: bytes) -> FileRecord:
    record = structs.replace(sample.record("rng"), size=len(data), crc32=zlib.crc32(data))
    sample.put(record.path, data)
    return record


def small_file(sample: Sample) -> Case:
    stored = pt_of(PLAIN)

    def case(rng: Rng) -> Callable[[], None]:
        forged = _forged_record(sample, damage(stored, rng))
        return lambda: walk(read_plain(sample.role_dir, forged))

    return case


def small_pickle(sample: Sample) -> Case:
    """The pickle alone, in an archive that is sound."""
    stored = pickle_of(pt_of(PLAIN))

    def case(rng: Rng) -> Callable[[], None]:
        forged = _forged_record(sample, archive_of(damage(stored, rng)))
        return lambda: walk(read_plain(sample.role_dir, forged))

    return case


def foreign_pickle(sample: Sample) -> Case:
    import argparse

    import numpy

    value = {"args": argparse.Namespace(lr=0.1), "np": numpy.random.RandomState(0).get_state(), **PLAIN}
    whole = pt_of(value)
    stored, file = pickle_of(whole), sample.root / "foreign.pt"

    def case(rng: Rng) -> Callable[[], None]:
        file.write_bytes(archive_of(damage(stored, rng)) if rng.random() < 0.5 else damage(whole, rng))

        def read() -> None:
            for reader in (
                lambda: walk(load_safely(file, str(file))),
                lambda: walk(load_safely(file, str(file), mmap=True)),
                lambda: read_pt(file),
            ):
                refused(reader)

        return read

    return case


def damaged_tracker(sample: Sample) -> Case:
    def case(rng: Rng) -> Callable[[], None]:
        (sample.root / file_names.TRACKER_FILE).write_bytes(damage(rng.choice((b"7", b"123456", b"7\n")), rng))

        def read() -> None:
            tracker.read_tracker(sample.root)
            tracker.update_tracker(sample.root)

        return read

    return case


def owner(sample: Sample) -> Case:
    folder = sample.root / "work"
    folder.mkdir()
    write_owner(folder)
    stored = (folder / file_names.OWNER_FILE).read_bytes()

    def case(rng: Rng) -> Callable[[], None]:
        data = damage(stored, rng) if rng.random() < 0.5 else json.dumps(forge(json.loads(stored), rng)).encode()
        (folder / file_names.OWNER_FILE).write_bytes(data)

        def read() -> None:
            found = read_owner(folder)
            if found is not None:
                assert found.life in Life

        return read

    return case


CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def hf_config(sample: Sample) -> Case:
    folder = sample.root / "hf_config"
    folder.mkdir()
    text = json.dumps(CONFIG).encode()

    def case(rng: Rng) -> Callable[[], None]:
        data = json.dumps(forge(CONFIG, rng)).encode() if rng.random() < 0.7 else damage(text, rng)
        (folder / "config.json").write_bytes(data)

        def read() -> None:
            list(hf_tensors(model_from_config(read_config(folder))))

        return read

    return case


def safetensors(sample: Sample) -> Case:
    folder = sample.root / "safetensors"
    folder.mkdir()
    named = [(tensor.name, torch.float32, tuple(tensor.shape)) for tensor in hf_tensors(model_from_config(CONFIG))]
    header = encode_header(named)
    body = bytes(4 * sum(torch.Size(shape).numel() for _, _, shape in named))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {}, "weight_map": {name: "model.safetensors" for name, _, _ in named}}

    def case(rng: Rng) -> Callable[[], None]:
        if rng.random() < 0.5:
            changed = json.dumps(forge(json.loads(header[8:]), rng)).encode()
            data = struct.pack("<Q", len(changed)) + changed + body
        else:
            data = damage(header, rng) + body
        (folder / "model.safetensors").write_bytes(data)
        (folder / "index.json").write_bytes(json.dumps(forge(index, rng)).encode())

        def read() -> None:
            refused(lambda: read_weight_map(folder / "index.json"))
            read_folder(folder)
            HuggingFaceReader(read_contents(folder))

        return read

    return case


def torch_dist(sample: Sample) -> Case:
    folder = sample.root / "torch_dist"
    make_torch_dist(folder)
    files = {name: (folder / name).read_bytes() for name in (".metadata", "common.pt", "__0_0.distcp", "metadata.json")}

    def case(rng: Rng) -> Callable[[], None]:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        name = rng.choice((".metadata", ".metadata", *files))
        (folder / name).write_bytes(damage(files[name], rng))
        if rng.random() < 0.5:
            (folder / "common.pt").unlink()

        def read() -> None:
            refused(lambda: _read_regions_of(folder))
            opened = TorchDistFiles(folder, [folder])
            wanted = WantedPart("decoder.layers.mlp.linear_fc2.weight", (2, 4, 3), (0, 0, 0), torch.zeros(1, 4, 3))
            refused(lambda: opened.read(wanted))
            refused(lambda: opened.read_object("rng"))

        return read

    return case


def _read_regions_of(folder: Path) -> None:
    reader = open_torch_dist(folder)
    for name, info in weights_of(reader).items():
        if torch.Size(info.shape).numel() < 10_000:
            memory = torch.empty(info.shape, dtype=info.dtype).view(-1)
            read_regions(reader, [RegionRead(name, Region.whole(info.shape), memory)])


PLAIN: dict[str, Any] = {
    "step": 12,
    "big": 2**70,
    "floats": [0.5, -1.0],
    "text": "x",
    "bytes": b"\xff\x00",
    "tuple": (1, (2, 3)),
    "set": {1, 2},
    "none": None,
    "ordered": OrderedDict(a=1),
    "tensor": torch.arange(6).reshape(2, 3),
    "part": torch.arange(9)[3:5],
    "half": torch.ones(3, dtype=torch.bfloat16),
    "words": torch.ones(2, dtype=torch.uint16),
    (1, "key"): True,
}


def pt_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def pickle_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def archive_of(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of `torch.save` with this pickle, and the records of `PLAIN`'s tensors."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pt_of(PLAIN))) as source, zipfile.ZipFile(stream, "w", compression) as archive:
        for name in source.namelist():
            archive.writestr(name, pickled if name.endswith("data.pkl") else source.read(name))
    return stream.getvalue()


def walk(value: Any) -> None:
    """What anybody does with what was read."""
    repr(value)


def refused(read: Callable[[], Any]) -> None:
    """Reads, or is refused."""
    try:
        read()
    except CheckpointError as error:
        if not str(error).isprintable() and not all(c.isprintable() or c == "\n" for c in str(error)):
            raise Escaped(f"a message that a terminal would obey: {str(error)!r}") from error


TARGETS: dict[str, Callable[[Sample], Case]] = {
    "manifest": manifest_bytes,
    "manifest forged": manifest_forged,
    "index forged": index_forged,
    "payload": payload,
    "small file": small_file,
    "small pickle": small_pickle,
    "foreign pickle": foreign_pickle,
    "tracker": damaged_tracker,
    "owner": owner,
    "config.json": hf_config,
    "safetensors": safetensors,
    "torch_dist": torch_dist,
}


def fuzz(sample: Sample, name: str, seed: int, more: Iterator[Any]) -> int:
    """Damages and reads as long as `more` goes on. Returns how often. Raises Escaped, naming seed and case."""
    case = TARGETS[name](sample)
    count = 0
    for count, _ in enumerate(more, 1):
        read = case(Rng(f"{seed} {name} {count}"))
        started = time.monotonic()
        try:
            refused(read)
        except BaseException as error:
            raise Escaped(f"{name}: seed {seed}, case {count}: {type(error).__name__}: {str(error)[:300]}") from error
        if time.monotonic() - started > SLOWEST_S:
            raise Escaped(f"{name}: seed {seed}, case {count}: took {time.monotonic() - started:.1f} s")
    sample.restore()
    return count
