"""Checkpoints of a small GPT, made and read back without megatron."""

import zlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.index import Alias
from mcore_ckpt.checkpoint.manifest import AdapterSettings, FileRecord, Manifest, StageRecord, WrittenFile
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.checkpoint.model_facts import Facts
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.formats.native.file_plan import StructureCache, plan_file
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.io.files import make_folders, write_file
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.save.capture import FileTensors, capture_in_place
from mcore_ckpt.sharding.cuts import Cut, axes_of
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, runs
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select

STEP = 5
HIDDEN = 8
VOCABULARY = 20
LAYERS = 4
EXPERTS = 4

Tensors = dict[str, torch.Tensor]


class Alone:
    """The exchange of a rank that shares no file."""

    rank = 0

    def give(self, key: str, record: object) -> None:
        raise AssertionError(f"nobody takes {key}")

    def take(self, key: str, rank: int) -> dict[str, object]:
        raise AssertionError(f"there is no rank {rank}")


def shapes(experts: bool = False) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}"
        found |= {
            f"{at}.self_attention.linear_qkv.weight": (2 * HIDDEN, HIDDEN),
            f"{at}.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
            f"{at}.self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        }
        if experts:
            for number in range(EXPERTS):
                found[f"{at}.mlp.experts.linear_fc1.weight{number}"] = (2 * HIDDEN, HIDDEN)
                found[f"{at}.mlp.experts.linear_fc2.weight{number}"] = (HIDDEN, HIDDEN)
        else:
            found[f"{at}.mlp.linear_fc1.weight"] = (4 * HIDDEN, HIDDEN)
            found[f"{at}.mlp.linear_fc2.weight"] = (HIDDEN, 2 * HIDDEN)
    found["decoder.final_layernorm.weight"] = (HIDDEN,)
    found["output_layer.weight"] = (VOCABULARY, HIDDEN)
    return found


def tensors_of(experts: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(experts).items()}


def cut_of(name: str) -> Cut:
    return Cut(axes_of(name)[0], (1, 1) if "linear_fc1" in name else (1,))


def make(
    root: Path,
    tensors: Tensors,
    *,
    tp: int = 1,
    cuts: dict[str, Cut] | None = None,
    role: str = "actor",
    roles: tuple[str, ...] | None = None,
    aliased: bool = False,
    config: bytes | None = None,
    scheduler: dict[str, float] | None = None,
    adapters: AdapterSettings | None = None,
    stepped: Collection[str] | None = None,
    facts: Facts | None = None,
    opaque: Tensors | None = None,
) -> Path:
    """A committed checkpoint of `tp` ranks; `cuts` of tensors that are not cut as their names say.

    `stepped` names the tensors that the optimizer has a state of: all, unless it is given. Each model file has all of
    `opaque`, the states of modules.
    """
    role_dir = file_names.step_dir(root, STEP) / role
    attempt = commit.new_attempt()
    staging = commit.open_staging(role_dir, attempt)
    names, states = tuple(sorted(tensors, key=natural_order)), opaque or {}
    everything = tuple(sorted({*names, *states}, key=natural_order))
    files: list[tuple[int, WrittenFile, bool]] = []
    for rank in range(tp):
        regions = {
            name: (cuts or {}).get(name, cut_of(name)).region(tuple(tensors[name].shape), rank, tp) for name in names
        }
        local = {name: part(tensors[name], regions[name]) for name in names}
        model = WriteRequest(
            file_names.model_file(rank, 0),
            "model",
            (
                *(_write((n,), n, "model", local[n], regions[n]) for n in names),
                *(_write((n,), n, "opaque", state, Region.whole(tuple(state.shape))) for n, state in states.items()),
            ),
        )
        kinds = ("exp_avg",) if aliased else ("param", "exp_avg")
        optimizer = WriteRequest(
            file_names.optimizer_file(0, rank, 0, 0),
            "optimizer",
            tuple(
                _write(("state", n, kind), n, kind, local[n].reshape(-1) + (kind == "exp_avg"), regions[n])
                for n in names
                for kind in kinds
                if stepped is None or n in stepped
            ),
            tuple(_alias(n, regions[n]) for n in names) if aliased else (),
            tree=("state",),
        )
        files += [(rank, _write_file(staging, request), True) for request in (model, optimizer)]
        rng = pickle_plain({"torch": torch.full((16,), 7, dtype=torch.uint8), "rank": rank})
        files.append((rank, write_plain(staging, file_names.rng_file(0, rank, 0, 0), "rng", rng), False))
        extra = pickle_plain({"rank": rank})
        files.append((rank, write_plain(staging, file_names.extra_file(0, rank, 0, 0), "extra", extra), False))
    common = pickle_plain({"optimizers": [], "lr_scheduler": scheduler})
    files.append((0, write_plain(staging, file_names.COMMON_FILE, "common", common), False))
    if config is not None:
        path = f"{file_names.HUGGINGFACE_DIR}/config.json"
        make_folders(staging, path)
        write_file(staging / path, [config])
        files.append((0, WrittenFile(path, "huggingface", len(config), zlib.crc32(config)), False))
    manifest = Manifest(
        step=STEP,
        role=role,
        roles=roles or (role,),
        attempt=attempt,
        created="2025-01-01T00:00:00+00:00",
        versions={"megatron_core": "0.16.1"},
        contents=("model", "optimizer", "extra"),
        adapters=adapters,
        model=facts,
        topology=Topology(world_size=tp, tp=tp, etp=tp),
        ranks=tuple(RankCoordinates(tp=rank, etp=rank) for rank in range(tp)),
        stages=(StageRecord(0, 0, tuple(range(LAYERS)), ()),),
        tensors=everything,
        files=tuple(
            FileRecord(
                *(f.path, f.kind, rank, f.size, f.crc32, f.index), Holds(runs(range(len(everything))) if held else ())
            )
            for rank, f, held in files
        ),
    )
    commit.write_manifest(staging, manifest)
    commit.publish(staging, role_dir, attempt)
    tracker.update_tracker(root)
    return role_dir


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """What a region without a flat range has of a global tensor."""
    local = torch.empty(region.local_shape, dtype=tensor.dtype)
    for piece in region.pieces:
        to = tuple(slice(at, at + n) for at, n in zip(piece.local_offset, piece.shape, strict=True))
        local[to] = tensor[tuple(slice(at, at + n) for at, n in zip(piece.global_offset, piece.shape, strict=True))]
    return local


def _write(where: tuple[str, ...], name: str, kind: str, tensor: torch.Tensor, region: Region) -> TensorWrite:
    return TensorWrite(where, ShardKey(name, kind), region, tensor, tuple(tensor.shape))


def _alias(name: str, region: Region) -> Alias:
    return Alias(ShardKey(name, "param"), "model", region, "float32")


def _write_file(staging: Path, request: WriteRequest) -> WrittenFile:
    plan = plan_file(request, 0, StructureCache())
    capture = capture_in_place([plan], [FileTensors.of([write.tensor for write in request.tensors])])
    with FileWriter(staging, capture.writes, Alone()) as writer:
        writer.start()
        (written,) = writer.finish()
    return written


def stored(role_dir: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Each global tensor put together from all files, NaN where no file has an element; by name and kind."""
    manifest = read_manifest(role_dir)
    found: dict[tuple[str, str], torch.Tensor] = {}
    for file in manifest.files:
        for shard in read_index(role_dir, file).shards if file.index else ():
            region = shard.region
            whole = found.setdefault((shard.key.name, shard.key.kind), torch.full(region.global_shape, float("nan")))
            flat = torch.full((replace(region, flat=(0, region.local_shape and _numel(region))).numel,), float("nan"))
            memory = torch.empty(region.numel, dtype=torch_dtype(shard.dtype))
            read_ranges(role_dir, {file.path: file}, [(ReadRange(shard, Rows(0, 0, region.numel)), memory)])
            flat[region.flat[0] : region.flat[1]] = memory
            local = flat.reshape(region.local_shape)
            for piece in region.pieces:
                of = tuple(slice(at, at + n) for at, n in zip(piece.local_offset, piece.shape, strict=True))
                to = tuple(slice(at, at + n) for at, n in zip(piece.global_offset, piece.shape, strict=True))
                whole[to] = torch.where(local[of].isnan(), whole[to], local[of])
    return found


def _numel(region: Region) -> int:
    return int(torch.Size(region.local_shape).numel())


def resharded(source: Path, root: Path, force: bool = False, **sizes: int) -> Path:
    """The one role's folder under another layout."""
    report = reshard(select(source), root, WantedLayout(**sizes), force=force)
    return report.roles[0].path
