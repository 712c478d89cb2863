"""Writes a committed checkpoint of a given size with the tensors of a Qwen3 and random bytes, without megatron."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.checkpoint.manifest_text import Holds
from mcore_ckpt.formats.native.file_plan import StructureCache, plan_file
from mcore_ckpt.formats.native.write_requests import TensorWrite, WriteRequest
from mcore_ckpt.formats.native.writer import FileWriter
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.ranks.topology import Topology, coordinates_of
from mcore_ckpt.save.capture import FileTensors, capture_in_place
from mcore_ckpt.sharding.cuts import Cut, axes_of
from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.steps import commit

TP = PP = 2


def qwen3_of_size(gigabytes: float) -> dict[str, Any]:
    """Returns a `config.json` with as many layers as give the size, in bfloat16."""
    hidden = 4096 if gigabytes >= 4 else 1024
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "dtype": "bfloat16",
    }
    # The query and output projections; keys and values, a quarter of that size; gate, up and down.
    per_layer = (2 + 2 / 4 + 3 * 3) * hidden**2
    layers = (gigabytes * 1e9 / 2 - 2 * 151936 * hidden) / per_layer
    return config | {"num_hidden_layers": max(PP, round(layers / PP) * PP)}


def write_checkpoint(root: Path, config: Mapping[str, Any]) -> Path:
    """Writes the model's weights with this package's writers, commits them, and returns the role's folder."""
    role_dir = file_names.step_dir(root, 1) / "actor"
    attempt = commit.new_attempt()
    staging = commit.open_staging(role_dir, attempt)
    model = model_from_config(config)
    shapes = {slab.mcore: slab.region.global_shape for tensor in hf_tensors(model) for slab in tensor.slabs}
    names = tuple(sorted(shapes, key=natural_order))
    bits = torch.empty(max(map(_numel, shapes.values())), dtype=torch.bfloat16).normal_(0, 0.02)
    records = []
    for pp in range(PP):
        held = [name for name in names if _stage_of(name, len(model.layers)) == pp]
        for tp in range(TP):
            written = _write_file(staging, pp, tp, {name: shapes[name] for name in held}, bits)
            holds = Holds.of(names.index(name) for name in held)
            records.append(
                FileRecord(written.path, written.kind, pp * TP + tp, written.size, written.crc32, written.index, holds)
            )
    huggingface = staging / file_names.HUGGINGFACE_DIR
    huggingface.mkdir()
    (huggingface / "config.json").write_text(json.dumps(config))
    commit.write_manifest(staging, _manifest(attempt, names, records))
    commit.publish(staging, role_dir, attempt)
    return role_dir


def _numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _stage_of(name: str, layers: int) -> int:
    if name.startswith("embedding."):
        return 0
    if not name.startswith("decoder.layers."):
        return PP - 1
    return int(name.split(".")[2]) * PP // layers


def _write_file(staging: Path, pp: int, tp: int, shapes: Mapping[str, Shape], bits: torch.Tensor) -> WrittenFile:
    writes = []
    for number, (name, shape) in enumerate(shapes.items()):
        region = Cut(axes_of(name)[0], (1, 1) if "linear_fc1" in name else (1,)).region(shape, tp, TP)
        # Each tensor is a view of another range of the same random elements, so none needs memory of its own.
        start = (number * 1_234_567) % (len(bits) - region.numel + 1)
        tensor = bits[start : start + region.numel].view(region.local_shape)
        writes.append(TensorWrite((name,), ShardKey(name, MODEL), region, tensor, region.local_shape))
    plan = plan_file(WriteRequest(file_names.model_file(tp, pp), "model", tuple(writes)), 0, StructureCache())
    capture = capture_in_place([plan], [FileTensors.of([write.tensor for write in writes])])
    with FileWriter(staging, capture.writes, _Alone()) as writer:
        writer.start()
        (written,) = writer.finish()
    return written


class _Alone:
    """Stands in for the exchange between ranks that share files: this rank shares none."""

    rank = 0

    def give(self, key: str, record: dict[str, Any]) -> None:
        raise AssertionError(f"no rank waits for {key}")

    def take(self, key: str, rank: int) -> dict[str, Any]:
        raise AssertionError(f"there is no rank {rank}")


def _manifest(attempt: str, names: tuple[str, ...], records: list[FileRecord]) -> Manifest:
    topology = Topology(world_size=TP * PP, tp=TP, pp=PP, etp=TP)
    return Manifest(
        step=1,
        role="actor",
        roles=("actor",),
        attempt=attempt,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        contents=("model",),
        topology=topology,
        ranks=tuple(coordinates_of(rank, topology) for rank in range(topology.world_size)),
        stages=(),
        tensors=names,
        files=tuple(records),
    )
