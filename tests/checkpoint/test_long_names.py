"""Names of tensors are not names of files: whatever can be printed will do."""

from pathlib import Path

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord
from mcore_ckpt.checkpoint.reading import read_index
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.checkpoints import write_alone

NAMES = ("decoder." + "a" * 255, "b" * 4096, "../../up/and/away", "Weight", "weight", "ä ß 層 🙂")


def test_names_no_file_system_would_take(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3, 5) for name in NAMES}
    writes = tuple(TensorWrite((n,), ShardKey(n, "model"), Region.whole((3, 5)), t, (3, 5)) for n, t in tensors.items())
    written = write_alone(tmp_path, WriteRequest(file_names.model_file(0, 0), "model", writes))
    loaded = torch.load(tmp_path / written.path, weights_only=True)
    assert list(loaded) == list(NAMES)
    record = FileRecord(written.path, written.kind, 0, written.size, written.crc32, written.index, ())
    shards = {shard.key.name: shard for shard in read_index(tmp_path, record).shards}
    found = {name: torch.zeros(3, 5) for name in NAMES}
    reads = [(ReadRange(shards[name], Rows(0, 0, 15)), tensor) for name, tensor in found.items()]
    read_ranges(tmp_path, {record.path: record}, reads)
    for name in NAMES:
        assert torch.equal(found[name], tensors[name])
        assert torch.equal(loaded[name], tensors[name])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model_states.pt"]


@pytest.mark.parametrize("name", ["b" * 4097, "nul\0", "line\n", "\x1b[31m"])
def test_names_that_could_not_be_read_back_are_not_written(name: str, tmp_path: Path) -> None:
    write = TensorWrite((name,), ShardKey(name, "model"), Region.whole((3,)), torch.ones(3), (3,))
    with pytest.raises(UnsupportedError, match="printable characters"):
        write_alone(tmp_path, WriteRequest(file_names.model_file(0, 0), "model", (write,)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
