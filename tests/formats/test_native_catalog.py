"""What a checkpoint holds, by the indexes of the files that are asked for and no others."""

from pathlib import Path

import pytest
from checkpoints import ROLE
from mcore_ckpt.formats.native.catalog import Catalog
from sparse import shard, write

from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import OPAQUE, ShardKey
from mcore_ckpt.sharding.regions import Region

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
    files = Catalog(tmp_path / ROLE, manifest).files(ShardKey(name, kind))
    assert [file.path for file in files] == paths


def test_an_index_is_read_once_and_only_if_it_is_asked_for(
    tmp_path: Path, manifest: Manifest, opened: list[str]
) -> None:
    there = Catalog(tmp_path / ROLE, manifest)
    key = ShardKey("a", "exp_avg")
    files = there.files(key)
    assert opened == [], "a manifest says which files"
    assert [shard.region for shard in there.shards(key, files[1:])] == [HALVES[1]]
    assert opened == ["o1"]
    for _ in range(2):
        assert [(shard.file, shard.region) for shard in there.shards(key, files)] == [
            ("o0", HALVES[0]),
            ("o1", HALVES[1]),
        ]
        there.kinds("a", files), there.alias(key, files)
    assert opened == ["o1", "o0"]


def test_kinds_and_aliases(tmp_path: Path, manifest: Manifest) -> None:
    there = Catalog(tmp_path / ROLE, manifest)
    main = ShardKey("a", "param")
    files = there.files(main)
    assert there.kinds("a", files) == ("exp_avg", "exp_avg_sq")
    assert there.kinds("a", files[1:]) == ("exp_avg",)
    assert there.kinds("b", files) == ("param", "exp_avg")
    assert there.kinds("c", files) == ()
    assert there.alias(main, files) == ShardKey("a", "model")
    assert there.shards(main, files) == []
    assert there.alias(ShardKey("b", "param"), files) is None


def test_a_damaged_index_is_told_when_it_is_asked_for(tmp_path: Path, manifest: Manifest) -> None:
    place = manifest.files[1].index
    assert place is not None
    path = tmp_path / ROLE / "o0"
    data = bytearray(path.read_bytes())
    data[place.offset + 9] ^= 1
    path.write_bytes(data)
    there = Catalog(tmp_path / ROLE, manifest)
    key = ShardKey("a", "exp_avg")
    first, second = there.files(key)
    assert there.shards(key, [second])
    for ask in (
        lambda: there.shards(key, [first]),
        lambda: there.alias(key, [first]),
        lambda: there.kinds("a", [first]),
    ):
        with pytest.raises(CheckpointCorruptError, match=r"o0: its index .* has a wrong CRC"):
            ask()
