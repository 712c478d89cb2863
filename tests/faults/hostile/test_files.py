"""Links, pipes, sizes and names that lie, in the files of a checkpoint and of a HuggingFace model."""

import json
import os
import resource
import stat
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, IndexPlace, decode_manifest
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.reading import open_file, read_index, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, UnsupportedError
from mcore_ckpt.formats import kinds
from mcore_ckpt.formats.foreign_pickles import load_safely
from mcore_ckpt.formats.huggingface.safetensors_files import read_file
from mcore_ckpt.formats.huggingface.side_files import copy_side_files
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles
from mcore_ckpt.formats.torch_save_files import read_pt
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.store import Store
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import pins, retention, tracker, work_folders
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.upload_queue import UploadQueue
from tests.faults.hostile.fuzzing import CONFIG, Sample
from tests.support.torch_dist_folder import make_torch_dist


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample.make(tmp_path / "root")


def replaced(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "link-in-circles": lambda path: os.symlink(path, path),
    "link-to-nothing": lambda path: os.symlink("/nowhere", path),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file(kind: str, sample: Sample) -> None:
    """A pipe without a writer would be waited for, for ever."""
    for record in sample.manifest.files:
        replaced(sample.role_dir / record.path, NO_FILES[kind])
        with pytest.raises(CheckpointCorruptError, match=Path(record.path).name), open_file(sample.role_dir, record):
            pass
    replaced(sample.role_dir / file_names.MANIFEST_FILE, NO_FILES[kind])
    with pytest.raises(CheckpointError):
        read_manifest(sample.role_dir)
    assert not steps.step_status(sample.role_dir.parent).is_complete


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_of_others(kind: str, tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "dist")
    NO_FILES[kind](tmp_path / "file")
    for read in (read_pt, read_file, lambda path: load_safely(path, "file")):
        with pytest.raises(CheckpointCorruptError, match="file"):
            read(tmp_path / "file")
    for name in ("common.pt", ".metadata", "metadata.json"):
        replaced(tmp_path / "dist" / name, NO_FILES[kind])
        assert kinds.kind_of(tmp_path / "dist") in (None, "torch_dist")
        with pytest.raises(CheckpointCorruptError, match=name):
            TorchDistFiles(tmp_path / "dist", [tmp_path / "dist"])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_link_out_of_the_folder(depth: int, sample: Sample, tmp_path: Path) -> None:
    """Of a file, and of a folder above it. The bytes are the right ones, and are not read."""
    record = sample.record("optimizer" if depth == 1 else "model")
    path = sample.role_dir / record.path
    linked = path if depth == 1 else path.parents[depth - 2]
    elsewhere = tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    assert path.stat().st_size == record.size
    with pytest.raises(CheckpointCorruptError, match="leads out of"):
        read_index(sample.role_dir, record)


def test_a_link_inside_the_folder_is_followed(sample: Sample) -> None:
    record = sample.record("optimizer")
    path = sample.role_dir / record.path
    path.rename(path.with_name("moved.pt"))
    path.symlink_to("moved.pt")
    assert read_index(sample.role_dir, record).shards


def test_files_of_enormous_size(sample: Sample) -> None:
    """Sparse: they cost nothing, and would be read into memory."""
    path = sample.role_dir / "sparse.pt"
    size = 1 << 43
    with path.open("wb") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("the file system has no files of this size")
    with pytest.raises(CheckpointCorruptError, match=f"{size} bytes"):
        read_plain(sample.role_dir, FileRecord(path.name, "rng", 0, size, 0))
    with pytest.raises(CheckpointCorruptError, match="an index of"):
        read_index(sample.role_dir, FileRecord(path.name, "model", 0, size, 0, IndexPlace(0, size, 0)))
    for read in (
        read_pt,
        read_file,
        lambda path: load_safely(path, "sparse"),
        lambda p: load_safely(p, "sparse", True),
    ):
        with pytest.raises(CheckpointCorruptError):
            read(path)
    path.rename(sample.role_dir / file_names.MANIFEST_FILE)
    with pytest.raises(CheckpointCorruptError, match=str(size)):
        read_manifest(sample.role_dir)


# -- JSON --------------------------------------------------------------------------------------------------


def sealed(record: dict[str, Any]) -> bytes:
    record = {key: value for key, value in record.items() if key != "crc32"}
    return fields.encode(record | {"crc32": zlib.crc32(fields.encode(record))})


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "paths-that-differ-in-case": lambda r: r["files"].append(r["files"][0] | {"path": r["files"][0]["path"].upper()}),
    "name-of-256-bytes": lambda r: r["files"][0].update(path="optim/" + "ä" * 128),
    "escape-in-a-path": lambda r: r["files"][0].update(path="optim/\x1b[31m.pt"),
    "escape-in-a-tensor": lambda r: r["tensors"].append("\x1b]0;title\x07"),
    "escape-in-a-version": lambda r: r["versions"].update(torch="\r\n"),
    "tensor-twice": lambda r: r["tensors"].append(r["tensors"][0]),
    "no-ranks": lambda r: r["topology"].update(tp=0),
    "more-ranks-than-the-world": lambda r: r["topology"].update(tp=2),
    "rank-beyond-its-size": lambda r: r["ranks"][0].update(dp=1),
    "runs-that-overlap": lambda r: next(f for f in r["files"] if "index" in f)["holds"].append([0, 0]),
    "number-of-a-million-digits": lambda r: r.update(step=10**100),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest(name: str, sample: Sample) -> None:
    record = json.loads(sample.files[file_names.MANIFEST_FILE])
    assert decode_manifest(sealed(record)) == sample.manifest
    FORGED[name](record)
    with pytest.raises(fields.FieldError) as caught:
        decode_manifest(sealed(record))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_files_that_hold_more_than_memory(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANIFEST_HELD", 5)
    with pytest.raises(fields.FieldError, match="hold 6 tensors together"):
        decode_manifest(sample.files[file_names.MANIFEST_FILE])


@pytest.mark.parametrize(
    "text",
    [
        b'{"format": 1, "format": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": ' * 100_000,
        b"[" * 100_000,
        b'{"a": 1e999}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'\xff\xfe{\x00"\x00',
        b"\xef\xbb\xbf{}",
        b"",
        b"null",
    ],
)
def test_json_that_we_never_write(text: bytes) -> None:
    with pytest.raises(fields.FieldError):
        fields.decode(text)


# -- HuggingFace folders -----------------------------------------------------------------------------------


def written(path: Path, header: bytes, body: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    return path


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HEADERS = {
    "twice": f'{{"a":{ENTRY},"a":{ENTRY}}}',
    "overlapping": f'{{"a":{ENTRY},"b":{ENTRY}}}',
    "hole": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "beyond-the-end": '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "other-shape": '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "negative": '{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}',
    "offsets-swapped": '{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
    "empty-and-huge": '{"a":{"dtype":"F32","shape":[0,4611686018427387904,9],"data_offsets":[0,0]}}',
    "no-numbers": '{"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}}',
    "true-for-1": '{"a":{"dtype":"F64","shape":[true],"data_offsets":[0,8]}}',
    "dtype-a-list": '{"a":{"dtype":[],"shape":[2],"data_offsets":[0,8]}}',
    "deep": '{"a":' + "[" * 50_000,
    "escape": f'{{"\\u001b[31m":{ENTRY}}}',
    "no-end": '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',
    "another-end": '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}]',
    "a-brace": "{",
    "no-dtype": '{"a":{"shape":[2],"data_offsets":[0,8]}}',
    "no-shape": '{"a":{"dtype":"F32","data_offsets":[0,8]}}',
    "no-offsets": f'{{"a":{ENTRY},"b":{{"dtype":"F32","shape":[0]}}}}',
    "member-twice": '{"__metadata__":{},"a":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "axes-many": '{"a":{"dtype":"F32","shape":[' + "1," * 100 + '2],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_header_that_lies(name: str, tmp_path: Path) -> None:
    assert read_file(written(tmp_path / "good", f'{{"a":{ENTRY}}}'.encode(), bytes(8)))[0].nbytes == 8
    with pytest.raises(CheckpointCorruptError) as caught:
        read_file(written(tmp_path / "model.safetensors", HEADERS[name].encode(), bytes(8)))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("count", [1, 60_000], ids=["small", "large"])
@pytest.mark.parametrize(
    "spelling",
    [
        '{"dtype":"I8","shape":[1],"data_offsets":[%d,%d]}',
        '{"shape":[1],"data_offsets":[%d,%d],"dtype":"I8"}',
        '{"data_offsets": [%d, %d], "dtype": "I8", "shape": [1]}',
        '{\n"dtype" : "I8", "shape":[ 1 ], "data_offsets":[%d,\t%d]}',
        '{"dtype":"I8","shape":[1],"data_offsets":[%d,%d],"more":{"x":[1]}}',
    ],
)
def test_a_header_in_another_spelling(spelling: str, count: int, tmp_path: Path) -> None:
    metadata = json.dumps({"format": "pt", "shape": "wide", "odd": '"},"]},', "said": "a, b"})
    entries = [f'"layers.{n:060}":' + spelling % (n, n + 1) for n in range(count)]
    entries.insert(count // 2, f'"__metadata__":{metadata}')
    header = ("{" + ",".join(entries) + "}\n \n").encode()
    assert (len(header) > json_bounds.LARGE_BYTES) == (count > 1)
    tensors = read_file(written(tmp_path / "model.safetensors", header, bytes(count)))
    assert [tensor.offset for tensor in tensors] == list(range(8 + len(header), 8 + len(header) + count))


@pytest.mark.parametrize("length", [0, 3, 10**8 + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorruptError):
        read_file(written(tmp_path / "model.safetensors", b"{}", b"", length))


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: 10**12}
            for name in ("num_hidden_layers", "num_experts", "num_key_value_heads", "num_attention_heads")
        ),
        {"num_hidden_layers": 90_000, "num_experts": 90_000},
        *({"hidden_size": value} for value in (10**40, -1, True, "16", [16], None, 1.5)),
        *({"num_key_value_heads": value} for value in (8, -2, "2", [2])),
        *({"architectures": value} for value in (7, [7])),
        {"mlp_only_layers": 7},
        {"model_type": ["qwen3"]},
    ],
)
def test_a_config_that_no_model_has(change: dict[str, Any]) -> None:
    from mcore_ckpt.models.mapping import hf_tensors

    assert hf_tensors(model_from_config(CONFIG))
    with pytest.raises(UnsupportedError, match=r"config\.json"):
        hf_tensors(model_from_config(CONFIG | change))


@pytest.mark.parametrize("text", [b'{"a":' * 100_000, b"[]", b"\xff", b'{"a":1,"a":2}'])
def test_a_config_that_is_none(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UnsupportedError, match=r"config\.json"):
        read_config(tmp_path)


def test_nothing_from_elsewhere_becomes_part_of_a_model(tmp_path: Path) -> None:
    """Merging copies a tokenizer's files: not what a link calls one."""
    secret, folder, target = tmp_path / "secret", tmp_path / "model", tmp_path / "merged"
    secret.write_text("{}")
    folder.mkdir()
    target.mkdir()
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(OSError, match=r"tokenizer\.json.*leads out of"):
        copy_side_files(folder, target)
    (folder / "config.json").symlink_to(secret)
    with pytest.raises(UnsupportedError, match="leads out of"):
        read_config(folder)
    assert not list(target.iterdir())


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    blob, folder, target = tmp_path / "blobs" / "0badcafe", tmp_path / "snapshots" / "main", tmp_path / "merged"
    for made in (blob.parent, folder, target):
        made.mkdir(parents=True)
    blob.write_text(json.dumps(CONFIG))
    (folder / "config.json").symlink_to("../../blobs/0badcafe")
    assert read_config(folder) == CONFIG
    assert [path.name for path in copy_side_files(folder, target)] == ["config.json"]


# -- what we write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_root_is_its_owner_s_or_his_group_s(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        lock = TrainerLock(tmp_path / "deep" / "root", "actor")
        lock.take(0)  # as a save does first
        sample = Sample.make(tmp_path / "deep" / "root")
        tracker.update_tracker(sample.root)
        pins.pin(sample.root, steps.complete_steps(sample.root)[0].step)
        uploads = UploadQueue(
            RemoteSteps(Store(f"file://{tmp_path}/deep/remote")), sample.root, "actor", retention.PreservationPolicy()
        )
        assert uploads.committed(steps.complete_steps(sample.root)[0].step).wait(60)
        assert uploads.wait(60)
        with work_folders.kept_for_upload(sample.role_dir, "a" * 32):
            found = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
            modes = {path: path.stat().st_mode for path in found}
        lock.release()
    finally:
        os.umask(before)
    assert {path.suffix for path in found} >= {".pt", ".json", ".txt"}
    assert {path.name for path in found} >= {file_names.PINNED_FILE, ".actor.trainer.json", file_names.OWNER_FILE}
    for path, mode in modes.items():
        # Who lets his group write shares new roots with it, and nobody else may look into one.
        wanted = (0o775 if stat.S_ISDIR(mode) else 0o664) & ~umask & (0o770 if umask == 0 else 0o700)
        assert stat.S_IMODE(mode) == wanted, f"{path}: {mode:o}"


def test_no_secrets_in_a_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-of-the-cloud")
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3t")
    sample = Sample.make(tmp_path / "root")
    for path in sample.root.rglob("*"):
        assert path.is_dir() or b"s3cr3t" not in path.read_bytes()


def test_memory_is_not_taken_for_what_a_manifest_says(sample: Sample) -> None:
    """An index of 200 MiB that the file has not."""
    record = sample.record("optimizer")
    assert record.index is not None
    forged = structs.replace(record, size=1 << 40, index=structs.replace(record.index, offset=0, size=200 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointCorruptError, match="cut or replaced"):
        read_index(sample.role_dir, forged)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_a_name_that_is_there_twice_is_found_at_once() -> None:
    """As the last of many: to count each one would take hours for what a manifest may have in bytes."""
    names = ",".join(f'"name-{number}":1' for number in range(200_000))
    started = time.process_time()
    with pytest.raises(fields.FieldError, match="'name-7' occurs twice"):
        fields.decode(f'{{{names},"name-7":1}}'.encode())
    assert time.process_time() - started < 20
