"""Where the parts of a wanted tensor are found, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.locate import Located, Locator, Wanted, same_bytes
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import OPAQUE, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region
from tests.support.sparse import rows, shard, write

NORM = "decoder.layers.0.input_layernorm.weight"
WEIGHT = "decoder.layers.0.self_attention.linear_qkv.weight"
ROUTED = "decoder.layers.0.mlp.experts.linear_fc1.weight3"
EMBEDDING = "embedding.word_embeddings.weight"
SHAPE = (24, 6)
Held = list[StoredShard | Alias]


class Saved:
    """A checkpoint of tensor-parallel ranks; notes whose indexes are read."""

    def __init__(self, role_dir: Path, tp: int, of_rank: list[Held], kind: str = "model") -> None:
        files = {}
        for rank, held in enumerate(of_rank):
            at = RankCoordinates(tp=rank % tp, dp=rank // tp, etp=rank % tp, edp=rank // tp)
            path = file_names.model_file(rank, 0) if kind == "model" else file_names.optimizer_file(*at.place)
            files[path] = (kind, at, held)
        topology = Topology(world_size=len(of_rank), tp=tp, dp=len(of_rank) // tp, etp=tp)
        self.role_dir, self.manifest = role_dir, write(role_dir, topology, files)
        self.paths = list(files)

    def locator(self, tp: int = 1, rank: int = 0, vocab_size: int | None = None) -> Locator:
        wanted = Topology(world_size=tp, tp=tp, etp=tp)
        at = RankCoordinates(tp=rank, etp=rank)
        reader = NativeReader(LocalFolder(self.role_dir), self.manifest)
        return Locator(reader, RankPosition(wanted, at), vocab_size)


def wanted(name: str, region: Region, kind: str = "model") -> Wanted:
    return Wanted(ShardKey(name, kind), region, "mine.pt")


def files_of(located: Located | None) -> list[str]:
    assert located is not None
    return [read.stored.file for read in located.reads]


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize(
    ("saved", "mine", "rank", "near"), [(4, 2, 0, [0, 1]), (4, 2, 1, [2, 3]), (2, 4, 3, [1]), (3, 2, 1, [1, 2])]
)
def test_ranks_that_have_the_part_are_asked_alone(
    tmp_path: Path, opened: list[str], saved: int, mine: int, rank: int, near: list[int], expert: bool
) -> None:
    name = ROUTED if expert else WEIGHT
    there = Saved(tmp_path, saved, [[shard(name, "model", rows(SHAPE, r, saved))] for r in range(saved)])
    located = there.locator(mine, rank).find(wanted(name, rows(SHAPE, rank, mine)))
    assert files_of(located) == [there.paths[r] for r in near]
    assert sorted(opened) == [there.paths[r] for r in near]


def test_all_ranks_are_asked_for_what_is_cut_unlike_the_rest(tmp_path: Path, opened: list[str]) -> None:
    there = Saved(tmp_path, 4, [[shard(WEIGHT, "model", rows(SHAPE, 3 - r, 4))] for r in range(4)])
    assert files_of(there.locator(4, 0).find(wanted(WEIGHT, rows(SHAPE, 0, 4)))) == [there.paths[3]]
    assert opened == there.paths


def test_every_part_of_a_replicated_tensor_is_of_one_rank(tmp_path: Path) -> None:
    """Replicas may have drifted apart. Cut flat over data parallelism, each part is there twice."""
    norm = Region.whole((6,))
    halves = [norm.with_flat(0, 3), norm.with_flat(3, 6)]
    there = Saved(tmp_path, 2, [[shard(NORM, "exp_avg", halves[r // 2])] for r in range(4)], "optimizer")
    *others, last = there.manifest.files
    there.manifest = replace(there.manifest, files=(last, *others))
    located = there.locator().find(wanted(NORM, norm, "exp_avg"))
    assert files_of(located) == [file_names.optimizer_file(0, 0, 0, 0), file_names.optimizer_file(0, 0, 0, 1)]
    (own,) = set(files_of(there.locator(2, 1).find(wanted(NORM, halves[1], "exp_avg"))))
    assert own == file_names.optimizer_file(0, 1, 0, 1)


def test_an_alias_is_read_from_the_models_tensor(tmp_path: Path) -> None:
    whole = Region.whole(SHAPE)
    alias = Alias(ShardKey(WEIGHT, "param"), "model", whole, "float32")
    at = RankCoordinates()
    optimizer = file_names.optimizer_file(0, 0, 0, 0)
    files: dict[str, tuple[str, RankCoordinates, Held]] = {
        file_names.model_file(0, 0): ("model", at, [shard(WEIGHT, "model", whole)]),
        optimizer: ("optimizer", at, [alias, shard(WEIGHT, "exp_avg", whole), shard(NORM, "exp_avg", whole)]),
    }
    manifest = write(tmp_path, Topology(), files)
    locator = Locator(NativeReader(LocalFolder(tmp_path), manifest), RankPosition(Topology(), at))
    assert files_of(locator.find(wanted(WEIGHT, whole.with_flat(7, 30), "param"))) == [file_names.model_file(0, 0)]
    assert locator.find(wanted(NORM, whole, "param")) is None
    assert locator.moments(WEIGHT) == locator.moments(NORM) == ("exp_avg",)
    assert locator.moments("another") == ()


def test_other_names_of_the_tensor_are_found(tmp_path: Path) -> None:
    fused = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    there = Saved(tmp_path, 1, [[shard(fused, "model", Region.whole((6,)))]])
    locator = there.locator()
    assert files_of(locator.find(wanted(NORM, Region.whole((6,))))) == there.paths
    assert locator.stored_key(ShardKey(NORM, "model")) == ShardKey(fused, "model")
    assert locator.find(wanted(WEIGHT, Region.whole((6,)))) is None


@pytest.mark.parametrize(("mine", "vocab_size", "outside"), [(32, None, 48), (28, 23, 24), (20, 19, 0), (24, 99, 0)])
def test_padding_of_a_vocabulary_may_differ(tmp_path: Path, mine: int, vocab_size: int | None, outside: int) -> None:
    there = Saved(tmp_path, 1, [[shard(EMBEDDING, "model", Region.whole(SHAPE))]])
    whole = Region.whole((mine, 6))
    located = there.locator(4, 0, vocab_size).find(wanted(EMBEDDING, whole))
    assert located is not None
    assert located.outside == outside
    assert sum(read.rows.numel for read in located.reads) == min(mine, 24) * 6


SAME_SIZES = ": build the model that was saved, with the same sizes"


@pytest.mark.parametrize(
    ("name", "shape", "tp", "vocab_size", "reason"),
    [
        (EMBEDDING, (28, 6), 1, None, "differ by more than padding. If"),
        (EMBEDDING, (20, 6), 4, 21, "differ by more than padding (vocab_size is 21). If"),
        (EMBEDDING, (24, 7), 4, 3, SAME_SIZES),
        (EMBEDDING, (24,), 4, 3, SAME_SIZES),
        (WEIGHT, (28, 6), 4, 3, SAME_SIZES),
    ],
)
def test_another_shape_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], tp: int, vocab_size: int | None, reason: str
) -> None:
    there = Saved(tmp_path, 1, [[shard(name, "model", Region.whole(SHAPE))]])
    with pytest.raises(CheckpointMismatchError) as raised:
        there.locator(tp, 0, vocab_size).find(wanted(name, Region.whole(shape)))
    start = f"{there.paths[0]}: tensor {name}: wanted global shape {list(shape)}, found global shape [24, 6]"
    assert re.fullmatch(re.escape(start) + ".*" + re.escape(reason) + ".*", str(raised.value))


def test_several_dtypes_of_one_tensor_are_damage(tmp_path: Path) -> None:
    halves = [shard(WEIGHT, "model", rows(SHAPE, r, 2), dtype) for r, dtype in enumerate(("float32", "bfloat16"))]
    there = Saved(tmp_path, 2, [[half] for half in halves])
    with pytest.raises(CheckpointCorruptError, match=f"{re.escape(WEIGHT)} is stored with .* bfloat16, float32"):
        there.locator().find(wanted(WEIGHT, Region.whole(SHAPE)))


def test_elements_in_no_file_are_damage(tmp_path: Path) -> None:
    there = Saved(
        tmp_path, 2, [[shard(WEIGHT, "model", rows(SHAPE, 0, 2))], [shard(NORM, "model", Region.whole((6,)))]]
    )
    with pytest.raises(CheckpointCorruptError, match=rf"{there.paths[0]}: tensor {re.escape(WEIGHT)}: 72 elements of"):
        there.locator().find(wanted(WEIGHT, Region.whole(SHAPE)))


def test_opaque_bytes_are_the_own_ranks_or_the_first_there_are(tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc1._extra_state"
    state = shard(name, OPAQUE, Region.whole((5,)), "uint8")
    there = Saved(tmp_path, 2, [[state], [replace(state, nbytes=3, region=Region.whole((3,)))]])
    found = [there.locator(2, rank).opaque(ShardKey(name, OPAQUE)) for rank in (0, 1)]
    assert [shard and shard.file for shard in found] == there.paths
    assert there.locator().opaque(ShardKey("another", OPAQUE)) is None


@pytest.mark.parametrize(
    "other", [shard(NORM, "model", Region.whole((24, 5))), shard(NORM, "model", Region.whole(SHAPE), "bfloat16")]
)
def test_tensors_of_another_shape_or_dtype_have_other_bytes(tmp_path: Path, other: StoredShard) -> None:
    there = Saved(tmp_path, 1, [[shard(WEIGHT, "model", Region.whole(SHAPE)), other]])
    reader = NativeReader(LocalFolder(there.role_dir), there.manifest)
    assert not same_bytes(reader, WEIGHT, NORM)
    assert not same_bytes(reader, "another", WEIGHT)
