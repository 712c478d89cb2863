"""Computes from the config alone which layers a (virtual) pipeline stage holds.

Tools use this module to plan another layout without a model, and tests compare the results with megatron's. A save does
not need the module, because a live model knows the numbers of its layers (`layer.layer_number`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORDS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
# The symbols of Mamba, gated delta net, attention, DeepSeek's sparse attention, latent attention, MLP, experts
# (`Symbols`, 0.19).
_LAYER_SYMBOLS = "MG*D+-E"
_REPEATED = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


@dataclass(frozen=True)
class StageLayers:
    """The global numbers, counted from 0, of the layers of one virtual stage."""

    decoder: tuple[int, ...]
    mtp: tuple[int, ...]


@dataclass(frozen=True)
class PipelineSplit:
    """The fields of megatron's TransformerConfig that place the layers on the stages.

    `layout` is `pipeline_model_parallel_layout` or `hybrid_layer_pattern` as tuples of words (embedding, decoder, mtp,
    loss), one tuple per virtual stage. The tuples of virtual stage 0 of all ranks precede the tuples of virtual stage
    1, and so on (`PipelineParallelLayerLayout`, megatron-core 0.16.1; `select_pipeline_segment`, 0.19).
    """

    num_layers: int
    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: tuple[tuple[str, ...], ...] | None = None
    mtp_num_layers: int = 0

    def stage(self, pp_rank: int, vp_stage: int = 0) -> StageLayers:
        """Returns the layers of one virtual stage.

        Layers fill the stages in the order (virtual stage, pipeline rank), so a stage starts where the stage before it
        ends.

        Raises ValueError if the layers cannot be divided as megatron requires, or the stage does not exist.
        """
        if not (0 <= pp_rank < self.pp and 0 <= vp_stage < self.vpp):
            raise ValueError(f"there is no stage pp {pp_rank}, vp {vp_stage} in {self}")
        before = [(v, p) for v in range(vp_stage + 1) for p in range(self.pp if v < vp_stage else pp_rank)]
        return StageLayers(
            *(
                _run(sum(count(p, v) for v, p in before), count(pp_rank, vp_stage))
                for count in (self._decoder_count, self._mtp_count)
            )
        )

    def _decoder_count(self, pp_rank: int, vp_stage: int) -> int:
        if self.layout is not None:
            return self._layout_row(pp_rank, vp_stage).count("decoder")
        count = _divide(self._layers_of_rank(pp_rank), self.vpp, "layers of a pipeline rank", "virtual stages")
        if self.account_for_embedding and (pp_rank, vp_stage) == (0, 0):
            count -= 1
        if self.account_for_loss and (pp_rank, vp_stage) == (self.pp - 1, self.vpp - 1):
            count -= 1
        return count

    def _layers_of_rank(self, pp_rank: int) -> int:
        if self.first is not None and pp_rank == 0:
            return self.first
        if self.last is not None and pp_rank == self.pp - 1:
            return self.last
        ends = [n for n in (self.first, self.last) if n is not None]
        layers = self.num_layers - sum(ends) + self.account_for_embedding + self.account_for_loss
        return _divide(layers, self.pp - len(ends), "layers", "pipeline ranks")

    def _mtp_count(self, pp_rank: int, vp_stage: int) -> int:
        if self.layout is not None:
            return self._layout_row(pp_rank, vp_stage).count("mtp")
        return self.mtp_num_layers if (pp_rank, vp_stage) == (self.pp - 1, self.vpp - 1) else 0

    def _layout_row(self, pp_rank: int, vp_stage: int) -> tuple[str, ...]:
        assert self.layout is not None
        if len(self.layout) != self.pp * self.vpp:
            raise ValueError(f"the pipeline layout has {len(self.layout)} stages, not {self.pp} x {self.vpp}")
        return self.layout[vp_stage * self.pp + pp_rank]


def parse_layout(text: str) -> tuple[tuple[str, ...], ...]:
    """Parses a pipeline layout in the syntax of megatron's command line (`parse_str_to_list`, 0.16.1).

    Raises ValueError if the text has an unknown character, or does not begin with its only embedding and end with its
    only loss.

    Example:
        >>> parse_layout("Et|t*2|(t|)*1L")
        (('embedding', 'decoder'), ('decoder', 'decoder'), ('decoder',), ('loss',))
    """
    written = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATED:
        written = pattern.sub(lambda match: match[1] * int(match[2]), written)
    unknown = sorted(set(written) - {*_WORDS, "|"})
    if unknown:
        raise ValueError(
            f"pipeline layout {text!r} has {', '.join(map(repr, unknown))}: use only E, t, m, L, |, *, ( and )"
        )
    if written[:1] != "E" or written[-1:] != "L" or written.count("E") != 1 or written.count("L") != 1:
        raise ValueError(
            f"pipeline layout {text!r} must begin with its one E (embedding) and end with its one L (loss)"
        )
    return tuple(tuple(_WORDS[letter] for letter in stage) for stage in written.split("|"))


def parse_pattern(text: str) -> tuple[tuple[str, ...], ...]:
    """Parses a `hybrid_layer_pattern` (`parse_hybrid_pattern`, 0.19) into the form that `parse_layout` returns.

    Each character is a layer, `|` ends a stage, and `/` begins a depth of multi-token prediction. All depths are on the
    last stage. Raises ValueError for a layer that megatron does not know, and for a pattern without layers.

    Example:
        >>> parse_pattern("M*|-E/*-")
        (('decoder', 'decoder'), ('decoder', 'decoder', 'mtp'))
    """
    main, *depths = text.split("/")
    unknown = sorted(set("".join((main.replace("|", ""), *depths))) - set(_LAYER_SYMBOLS))
    if unknown or not main.replace("|", "") or not all(depths) or len(set(depths)) > 1:
        wrong = f"has {', '.join(map(repr, unknown))}" if unknown else "has no layers, or depths that differ"
        raise ValueError(f"hybrid layer pattern {text!r} {wrong}: use only {' '.join(_LAYER_SYMBOLS)}, | and /")
    *stages, last = [("decoder",) * len(segment) for segment in main.split("|")]
    return (*stages, (*last, *("mtp" for _ in depths)))


def _divide(total: int, parts: int, what: str, among: str) -> int:
    if parts <= 0 or total % parts:
        raise ValueError(f"{total} {what} cannot be divided among {parts} {among}")
    return total // parts


def _run(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))
