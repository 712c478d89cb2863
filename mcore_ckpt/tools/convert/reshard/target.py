"""Resolves the layout to write from the wanted sizes and the saved layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from mcore_ckpt.checkpoint.manifest import StageRecord
from mcore_ckpt.errors import CheckpointMismatchError, InvalidArgumentError
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.assignment import Stages
from mcore_ckpt.sharding.pipeline import PipelineSplit, StageLayers, parse_layout, parse_pattern


@dataclass(frozen=True)
class WantedLayout:
    """The wanted sizes of the new layout. See `resolve` for sizes that are None.

    Attributes:
        vpp: the number of virtual stages per pipeline rank; 1 for none.
        etp: the tensor-parallel size of the experts.
        world: the number of all ranks; it can be given instead of `dp`.
        pipeline_layout: megatron's pipeline_model_parallel_layout, as text: "Et|t*2|t|tL".
        hybrid_layer_pattern: a HybridModel's pattern, with a segment for each stage: "M*-|ME".
        first_stage_layers, last_stage_layers: megatron's num_layers_in_first_pipeline_stage and
            num_layers_in_last_pipeline_stage.
        account_for_embedding, account_for_loss: megatron's account_for_embedding_in_pipeline_split and
            account_for_loss_in_pipeline_split.
        vocab_size: the number of tokens without padding.
        vocab_divisor: megatron's make_vocab_size_divisible_by.
    """

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None
    world: int | None = None
    pipeline_layout: str | None = None
    hybrid_layer_pattern: str | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    vocab_size: int | None = None
    vocab_divisor: int | None = None

    @property
    def splits_layers(self) -> bool:
        """True if a field says how the layers are divided among the stages."""
        ends = (self.first_stage_layers, self.last_stage_layers)
        counted = self.account_for_embedding or self.account_for_loss
        return any(end is not None for end in ends) or counted or self.stages is not None

    @property
    def stages(self) -> tuple[tuple[str, ...], ...] | None:
        """The contents of each stage, as words (`parse_layout`). None if neither a layout nor a pattern is given.

        Raises:
            InvalidArgumentError: the layout or the pattern cannot be parsed, or both are given.
        """
        if self.pipeline_layout is not None and self.hybrid_layer_pattern is not None:
            raise InvalidArgumentError(
                "pipeline_layout and hybrid_layer_pattern both divide the layers: give only one of them"
            )
        try:
            if self.hybrid_layer_pattern is not None:
                stages = parse_pattern(self.hybrid_layer_pattern)
                # A pattern of one segment does not say where stages end. As in megatron, its layers are then divided
                # evenly, or by first_stage_layers and last_stage_layers.
                return stages if len(stages) > 1 else None
            return None if self.pipeline_layout is None else parse_layout(self.pipeline_layout)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None


@dataclass(frozen=True)
class SavedLayout:
    """The layout of a checkpoint: its sizes, and the layers of each virtual stage."""

    topology: Topology
    stages: tuple[StageRecord, ...]


@dataclass(frozen=True)
class Target:
    """The layout to write: its sizes, and the layers of each virtual stage by (pp, vp)."""

    topology: Topology
    stages: Stages


def resolve(wanted: WantedLayout, saved: SavedLayout, has_experts: bool) -> Target:
    """Resolves the layout to write.

    A size that is not given stays as saved, with these exceptions:

    - The number of ranks stays as saved if tp x pp x cp and etp x ep x pp divide it. Otherwise the smallest number that
      both products divide is taken. `dp` follows from the number of ranks.
    - `etp` equals `tp` if the two were equal in the saved layout, or if `ep` becomes 1.
    - `vpp` is 1 if there is one pipeline rank. If a pipeline layout or a pattern is given, `vpp` follows from the
      number of stages in it.

    Raises:
        InvalidArgumentError: the sizes contradict each other.
        CheckpointMismatchError: the model's layers cannot be divided in the wanted way.
    """
    _check_positive(wanted)
    ends = (wanted.first_stage_layers, wanted.last_stage_layers)
    if wanted.hybrid_layer_pattern is not None and wanted.stages is not None and ends != (None, None):
        raise InvalidArgumentError(
            "a hybrid_layer_pattern with | divides the layers: leave out first_stage_layers and last_stage_layers"
        )
    topology = _topology(wanted, saved.topology, has_experts)
    return Target(topology, _stages(wanted, saved, topology))


def _check_positive(wanted: WantedLayout) -> None:
    names = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "world", "first_stage_layers", "last_stage_layers")
    for name in (*names, "vocab_size", "vocab_divisor"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} is {value}: it must be at least 1")


def _topology(wanted: WantedLayout, saved: Topology, has_experts: bool) -> Topology:
    tp, pp, cp = wanted.tp or saved.tp, wanted.pp or saved.pp, wanted.cp or saved.cp
    if not has_experts and (wanted.ep or 1) > 1:
        raise InvalidArgumentError(f"ep is {wanted.ep}, but the checkpoint has no experts: leave out ep")
    ep = (wanted.ep or saved.ep) if has_experts else 1
    etp = (wanted.etp or _expert_tp(saved, tp, ep)) if has_experts else tp
    dense, experts = tp * pp * cp, etp * ep * pp
    world = _world(wanted, saved.world_size, dense, experts)
    return Topology(
        world_size=world,
        tp=tp,
        pp=pp,
        vpp=_virtual_stages(wanted, saved, pp),
        cp=cp,
        dp=world // dense,
        ep=ep,
        etp=etp,
        edp=world // experts,
    )


def _expert_tp(saved: Topology, tp: int, ep: int) -> int:
    # megatron-core before 0.19 cannot train with ep = 1 and etp different from tp (`state/unsupported.py`), so such a
    # layout is written only if `etp` is given, or if the checkpoint has such a layout already.
    return tp if saved.etp == saved.tp or (ep == 1 and saved.ep > 1) else saved.etp


def _world(wanted: WantedLayout, saved: int, dense: int, experts: int) -> int:
    least = lcm(dense, experts)
    if wanted.dp is None and wanted.world is None:
        return least if saved % least else saved
    world = wanted.world if wanted.dp is None else wanted.dp * dense
    assert world is not None
    if wanted.world not in (None, world):
        raise InvalidArgumentError(
            f"dp is {wanted.dp}, so there are {world} ranks (tp x pp x cp is {dense}), not {wanted.world}: give dp or "
            "world, not both"
        )
    if world % least:
        raise InvalidArgumentError(
            f"{world} ranks cannot be divided by tp x pp x cp = {dense} and etp x ep x pp = {experts}: take a multiple "
            f"of {least}"
        )
    return world


def _virtual_stages(wanted: WantedLayout, saved: Topology, pp: int) -> int:
    if wanted.stages is not None:
        stages = len(wanted.stages)
        if stages % pp or wanted.vpp not in (None, stages // pp) or (pp == 1 and stages > 1):
            vpp = "" if wanted.vpp is None else f" x vpp = {wanted.vpp}"
            raise InvalidArgumentError(
                f"{wanted.pipeline_layout or wanted.hybrid_layer_pattern!r} has {stages} stages, not pp = {pp}{vpp}: "
                "change one of them"
            )
        return stages // pp
    if pp == 1:
        if (wanted.vpp or 1) > 1:
            raise InvalidArgumentError(
                f"vpp is {wanted.vpp}, but virtual stages need pp above 1: leave out vpp, or choose a larger pp"
            )
        return 1
    return wanted.vpp or saved.vpp


def _stages(wanted: WantedLayout, layout: SavedLayout, topology: Topology) -> Stages:
    saved = {(stage.pp, stage.vp): StageLayers(stage.decoder, stage.mtp) for stage in layout.stages}
    as_saved = (topology.pp, topology.vpp) == (layout.topology.pp, layout.topology.vpp)
    if as_saved and not wanted.splits_layers:
        return saved
    layers = sorted(layer for stage in saved.values() for layer in stage.decoder)
    mtp = sorted(layer for stage in saved.values() for layer in stage.mtp)
    split = PipelineSplit(
        num_layers=len(layers),
        pp=topology.pp,
        vpp=topology.vpp,
        first=wanted.first_stage_layers,
        last=wanted.last_stage_layers,
        account_for_embedding=wanted.account_for_embedding,
        account_for_loss=wanted.account_for_loss,
        layout=wanted.stages,
        mtp_num_layers=len(mtp),
    )
    return _divided(split, layers, mtp)


def _divided(split: PipelineSplit, layers: Sequence[int], mtp: Sequence[int]) -> Stages:
    how = f"{len(layers)} layers on pp = {split.pp}, vpp = {split.vpp}"
    places = [(pp, vp) for vp in range(split.vpp) for pp in range(split.pp)]
    try:
        stages = {place: split.stage(*place) for place in places}
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{how}: {error}. Choose how to divide the layers with --vpp, --first-stage-layers, --last-stage-layers, "
            "--pipeline-layout or --hybrid-layer-pattern"
        ) from None
    for what, wanted, found in (
        ("decoder", layers, [layer for place in places for layer in stages[place].decoder]),
        ("mtp", mtp, [layer for place in places for layer in stages[place].mtp]),
    ):
        if list(wanted) != found:
            raise CheckpointMismatchError(
                f"{how}: the wanted stages hold {len(found)} {what} layers, but the checkpoint has {len(wanted)}: "
                "change the pipeline layout, or the pattern"
            )
    return stages
