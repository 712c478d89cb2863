"""Computes how many bytes the ranks of a layout save and load, from a model's `config.json` or number of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_ckpt.checkpoint.manifest import StageRecord
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.assignment import PipelineAssignment, Stages
from mcore_ckpt.sharding.names import is_expert
from mcore_ckpt.state.optimizers.optimizer_kinds import KINDS
from mcore_ckpt.tools.convert.reshard.target import SavedLayout, WantedLayout, resolve

MODEL_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""The bytes of a model parameter, by the dtype of the training."""

# The size of one element of a main parameter or of a moment, in bytes.
_OPTIMIZER_BYTES = 4
# The number of moments, for optimizers that keep the same moments for every parameter.
_MOMENTS = {kind.name.lower(): len(kind.moments) for kind in KINDS if kind.name in ("Adam", "SGD", "Lion", "Muon")}
# The number of files without tensors that each rank writes: one, with random states.
_SMALL_FILES = 1


@dataclass(frozen=True)
class Training:
    """The settings of a training that determine the size of its checkpoints.

    Attributes:
        dtype: the dtype of the model, one of `MODEL_BYTES`. With "fp32" the main parameters are the model parameters
            themselves.
        optimizer: "adam", "sgd", "lion" or "muon", all sharded over the data-parallel ranks, with moments in fp32.
        contents: which of "model" and "optimizer" are saved.
        ranks_per_node: how many ranks share the memory and the disk of a node; None for 8, or for all ranks if there
            are fewer than 8.
    """

    layout: WantedLayout = field(default_factory=WantedLayout)
    dtype: str = "bf16"
    optimizer: str = "adam"
    contents: tuple[str, ...] = ("model", "optimizer")
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in MODEL_BYTES:
            raise InvalidArgumentError(f"dtype is {self.dtype!r}: use one of {', '.join(MODEL_BYTES)}")
        if self.optimizer not in _MOMENTS:
            known = ", ".join(sorted(_MOMENTS))
            raise InvalidArgumentError(
                f"optimizer is {self.optimizer!r}: use an optimizer of known size, one of {known}"
            )
        unknown = sorted(set(self.contents) - {"model", "optimizer"})
        if unknown or not self.contents:
            raise InvalidArgumentError(f"contents are {self.contents}: use 'model', 'optimizer', or both")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise InvalidArgumentError(f"ranks_per_node is {self.ranks_per_node}: use 1 or more")

    @property
    def model_bytes(self) -> int:
        """How many bytes one parameter takes in the model's files."""
        return MODEL_BYTES[self.dtype] if "model" in self.contents else 0

    @property
    def optimizer_tensors(self) -> int:
        """The number of tensors in the optimizer's files for each parameter tensor."""
        if "optimizer" not in self.contents:
            return 0
        has_main = self.dtype != "fp32" or "model" not in self.contents
        return has_main + _MOMENTS[self.optimizer]

    @property
    def optimizer_bytes(self) -> int:
        """How many bytes the state of one parameter takes in the optimizer's files."""
        return self.optimizer_tensors * _OPTIMIZER_BYTES


@dataclass(frozen=True)
class SaveSize:
    """The sizes of a training's saves and loads, in bytes, without headers and small files.

    Attributes:
        parameters: the number of parameters of the whole model.
        total_bytes: the size of the checkpoint.
        node_bytes: how many bytes the ranks of one node write together, on the node that writes most.
        rank_bytes: the largest number of bytes that one rank writes.
        node_load_bytes: how many bytes the ranks of one node read together, on the node that reads most.
        tensors: how many tensors the rank with the most tensors plans in a save.
        files: how many files all ranks together write.
    """

    topology: Topology
    ranks_per_node: int
    parameters: int
    total_bytes: int
    node_bytes: int
    rank_bytes: int
    node_load_bytes: int
    tensors: int
    files: int

    @property
    def ranks(self) -> int:
        return self.topology.world_size

    @property
    def ranks_on_a_node(self) -> int:
        """How many ranks a full node has."""
        return min(self.ranks_per_node, self.ranks)

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @staticmethod
    def of_bytes(nbytes: int, ranks: int, tensors: int = 0) -> SaveSize:
        """Returns the SaveSize of a save of `nbytes` bytes by the ranks of a single node."""
        topology = Topology(world_size=ranks, tp=ranks, etp=ranks)
        return SaveSize(topology, ranks, 0, nbytes, nbytes, nbytes // ranks, nbytes, tensors, 3 * ranks)


@dataclass(frozen=True)
class _Stage:
    """The number of parameters (`dense`, `experts`) and of `tensors` that one pipeline rank holds."""

    dense: int
    experts: int
    tensors: int


def size_of_model(folder: Path, training: Training) -> SaveSize:
    """Returns the SaveSize for the model that a folder's `config.json` describes. Reads no weights.

    Raises CheckpointNotFoundError if there is no `config.json`, UnsupportedError if the architecture is not known or
    the file cannot be read, and InvalidArgumentError if the sizes of the layout contradict each other, or do not fit
    the model.
    """
    model = model_from_config(read_config(folder))
    numels: dict[str, int] = {}
    for tensor in hf_tensors(model):
        if not tensor.is_copy:
            for slab in tensor.slabs:
                numels[slab.mcore] = numels.get(slab.mcore, 0) + slab.numel
    numels.pop("", None)  # zeros that the mapping adds, and that no mcore tensor has
    topology, stages = _resolved(training.layout, len(model.layers), model.mtp_depths, any(map(is_expert, numels)))
    placement = PipelineAssignment(stages)
    held: list[list[tuple[str, int]]] = [[] for _ in range(topology.pp)]
    for name, numel in numels.items():
        held[placement.rank_of(name) or 0].append((name, numel))
    return _size(training, topology, [_stage(tensors) for tensors in held])


def size_of_parameters(parameters: int, training: Training) -> SaveSize:
    """Returns the SaveSize for a model without experts. The parameters are divided evenly among the stages.

    Raises InvalidArgumentError: the sizes of the layout contradict each other.
    """
    if parameters < 1:
        raise InvalidArgumentError(f"a model of {parameters} parameters: use 1 or more")
    virtual = (training.layout.pp or 1) * (training.layout.vpp or 1)
    topology, _ = _resolved(training.layout, virtual, 0, has_experts=False)
    share, rest = divmod(parameters, topology.pp)
    stages = [_Stage(share + (number < rest), 0, 0) for number in range(topology.pp)]
    return _size(training, topology, stages)


def _resolved(wanted: WantedLayout, decoder: int, mtp: int, has_experts: bool) -> tuple[Topology, Stages]:
    saved = SavedLayout(Topology(), (StageRecord(0, 0, tuple(range(decoder)), tuple(range(mtp))),))
    try:
        target = resolve(wanted, saved, has_experts)
    except InvalidArgumentError:
        raise
    except CheckpointError as error:
        raise InvalidArgumentError(str(error)) from None
    return target.topology, target.stages


def _stage(tensors: Sequence[tuple[str, int]]) -> _Stage:
    experts = sum(numel for name, numel in tensors if is_expert(name))
    return _Stage(sum(numel for _, numel in tensors) - experts, experts, len(tensors))


def _size(training: Training, topology: Topology, stages: Sequence[_Stage]) -> SaveSize:
    """Adds up the bytes that ranks save.

    Every byte is written once: replicas divide files and shards among themselves.
    """
    per_node = training.ranks_per_node or min(8, topology.world_size)
    in_stage = topology.world_size // topology.pp
    parameter = training.model_bytes + training.optimizer_bytes
    written = [(stage.dense + stage.experts) * parameter // in_stage for stage in stages]
    loaded = [_load_bytes(training, topology, stage) for stage in stages]
    replicas = topology.dp * topology.cp
    return SaveSize(
        topology=topology,
        ranks_per_node=per_node,
        parameters=sum(stage.dense + stage.experts for stage in stages),
        total_bytes=sum((stage.dense + stage.experts) * parameter for stage in stages),
        node_bytes=_most_of_a_node(written, in_stage, per_node),
        rank_bytes=max(written),
        node_load_bytes=_most_of_a_node(loaded, in_stage, per_node),
        tensors=max(_planned_tensors(training, stage, replicas) for stage in stages),
        files=_files(training, topology, any(stage.experts for stage in stages)),
    )


def _load_bytes(training: Training, topology: Topology, stage: _Stage) -> int:
    model = stage.dense / topology.tp + stage.experts / (topology.etp * topology.ep)
    shard = (stage.dense + stage.experts) * topology.pp / topology.world_size
    return round(model * training.model_bytes + shard * training.optimizer_bytes)


def _planned_tensors(training: Training, stage: _Stage, replicas: int) -> int:
    in_model = stage.tensors if training.model_bytes else 0
    return in_model + training.optimizer_tensors * -(-stage.tensors // replicas)


def _most_of_a_node(by_stage: Sequence[int], in_stage: int, per_node: int) -> int:
    """Returns the largest sum of bytes over the ranks of one node. `by_stage` has the bytes of one rank of each stage.

    The ranks of a node are consecutive, and Megatron numbers ranks stage by stage.
    """
    ranks = in_stage * len(by_stage)
    nodes = (range(first, min(first + per_node, ranks)) for first in range(0, ranks, per_node))
    return max(sum(by_stage[rank // in_stage] for rank in node) for node in nodes)


def _files(training: Training, topology: Topology, has_experts: bool) -> int:
    files = topology.world_size * _SMALL_FILES
    if training.model_bytes:
        files += topology.tp * topology.pp
        if has_experts and topology.experts_apart:
            files += topology.etp * topology.pp * topology.ep
    if training.optimizer_bytes:
        files += topology.world_size + 1
    return files
