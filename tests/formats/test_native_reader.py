"""What a checkpoint holds, by the indexes of the files that are asked for and no others."""

from pathlib import Path

import pytest

from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import OPAQUE, ShardKey
from mcore_ckpt.sharding.regions import Region
from tests.support.checkpoints import ROLE
from tests.support.sparse import shard, write

WHOLE = Region.whole((4, 3))
HALVES = (WHOLE.with_flat(0, 5), WHOLE.with_flat(5, 12))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Tensor `a` in all files, its main parameter the model's; `b` in the model's and the second optimizer file."""
    ranks = [RankCoordinates(dp=rank) for rank in range(2)]
    alias = Alias(ShardKey("a", "param"), "model", WHOLE, "float32")
    model = [shard("a", "model", WHOLE), shard("b", "model", WHOLE), shard("b", OPAQUE, WHOLE, "uint8")]
    first = [alias, *(shard("a", kind, HALVES[0]) for kind in ("exp_avg", "exp_avg_sq"))]
    second = [alias, shard("a", "exp_avg", HALVES[1]), *(shard("b", kind, WHOLE) for kind in ("param", "exp_avg"))]
    files = {
        "m": ("model", ranks[0], model),
        "o0": ("optimizer", ranks[0], first),
        "o1": ("optimizer", ranks[1], second),
    }
    return write(tmp_path / ROLE, Topology(world_size=2, dp=2), files)


@pytest.mark.parametrize(
    ("name", "kind", "paths"),
    [
        ("a", "model", ["m"]),
        ("a", "exp_avg", ["o0", "o1"]),
        ("b", OPAQUE, ["m"]),
        ("b", "param", ["o1"]),
        ("c", "model", []),
        ("c", "param", []),
    ],
)
def test_files_that_may_hold_a_tensor(
    tmp_path: Path, manifest: Manifest, name: str, kind: str, paths: list[str]
) -> None:
    files = NativeReader(LocalFolder(tmp_path / ROLE), manifest).files(ShardKey(name, kind))
    assert [file.path for file in files] == paths


def test_an_index_is_read_once_and_only_if_it_is_asked_for(
    tmp_path: Path, manifest: Manifest, opened: list[str]
) -> None:
    reader = NativeReader(LocalFolder(tmp_path / ROLE), manifest)
    key = ShardKey("a", "exp_avg")
    files = reader.files(key)
    assert opened == [], "a manifest says which files"
    assert [shard.region for shard in reader.shards(key, files[1:])] == [HALVES[1]]
    assert opened == ["o1"]
    for _ in range(2):
        assert [(shard.file, shard.region) for shard in reader.shards(key, files)] == [
            ("o0", HALVES[0]),
            ("o1", HALVES[1]),
        ]
        reader.kinds_in("a", files), reader.is_alias(key)
    assert opened == ["o1", "o0"]


def test_kinds_and_aliases(tmp_path: Path, manifest: Manifest) -> None:
    reader = NativeReader(LocalFolder(tmp_path / ROLE), manifest)
    main = ShardKey("a", "param")
    files = reader.files(main)
    assert reader.kinds_in("a", files) == ("exp_avg", "exp_avg_sq")
    assert reader.kinds_in("a", files[1:]) == ("exp_avg",)
    assert reader.kinds_in("b", files) == ("param", "exp_avg")
    assert reader.kinds_in("c", files) == ()
    assert reader.is_alias(main)
    assert reader.shards(main, files) == []
    assert not reader.is_alias(ShardKey("b", "param"))


def test_a_damaged_index_is_told_when_it_is_asked_for(tmp_path: Path, manifest: Manifest) -> None:
    place = manifest.files[1].index
    assert place is not None
    path = tmp_path / ROLE / "o0"
    data = bytearray(path.read_bytes())
    data[place.offset + 9] ^= 1
    path.write_bytes(data)
    reader = NativeReader(LocalFolder(tmp_path / ROLE), manifest)
    key = ShardKey("a", "exp_avg")
    first, second = reader.files(key)
    assert reader.shards(key, [second])
    for ask in (
        lambda: reader.shards(key, [first]),
        lambda: reader.kinds_in("a", [first]),
    ):
        with pytest.raises(CheckpointCorruptError, match=r"o0: the index .* has a wrong CRC"):
            ask()
