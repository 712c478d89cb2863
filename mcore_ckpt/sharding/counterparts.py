"""Finds the layers of a stored model that hold the parts of another model's layers.

A layer of GPTModel has attention and an MLP. A layer of HybridModel (megatron-core 0.18) has only one part: attention,
an MLP or a Mamba mixer. So the same sequence of parts has different layer numbers in the two models. In multi-token
prediction, GPTModel has one layer per depth, and HybridModel a stack of layers (`MultiTokenPredictionLayer`).

When a manager is made, all ranks tell each other the parts of their layers. A load matches these parts in order, one by
one, with the parts in the stored names. The load matches each depth of multi-token prediction separately. Megatron's
own loader (`gpt_checkpoint_interop.py`, 0.19) matches the i-th attention with the i-th layer, whatever parts lie
between. This module refuses another order of parts, because the loaded model would compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_ckpt.sharding.names import natural_order
from mcore_ckpt.sharding.towers import split_language_model

# A tensor's layer, in the decoder or in one depth of multi-token prediction, and the rest of its name.
_NAME = re.compile(
    r"((?:language_model\.)?(?:decoder\.layers\.\d+"
    r"|mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer\.layers\.\d+)))\.(.+)"
)
# The modules of a layer, in the order in which the layer runs them, and the part that each belongs to.
_MODULES = {
    "input_layernorm": "attention",
    "self_attention": "attention",
    "pre_mlp_layernorm": "mlp",
    "mlp": "mlp",
    "norm": "mamba",
    "mixer": "mamba",
}
_ORDER = ("attention", "mamba", "mlp")
# Triples (part, beginning of a name, variant): if the name of a tensor in the part has this beginning, the part is this
# variant. Tensors of different variants do not fit each other.
_VARIANTS = (
    ("attention", "self_attention.in_proj.", "linear attention"),
    ("attention", "self_attention.linear_kv_down_proj.", "latent attention"),
    ("mlp", "mlp.router.", "experts"),
)
_DECODER = "decoder"
# Patterns of published hybrid models repeat after 8 layers or fewer, so `describe` looks for no longer periods.
_LONGEST_PERIOD = 8

# Maps the beginning of the names of a layer's tensors ("decoder.layers.3") to the layer's parts, in the order in which
# the layer runs them.
Layers = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Place:
    """The place of a tensor: its layer's name, its part of the layer, and its name in the layer."""

    layer: str
    part: str
    rest: str


def _place(name: str) -> _Place | None:
    """Returns the place of a tensor. None if the tensor belongs to no known part of a layer."""
    match = _NAME.fullmatch(name)
    part = None if match is None else _MODULES.get(match[2].partition(".")[0])
    return None if match is None or part is None else _Place(match[1], part, match[2])


def layers_of(names: Iterable[str]) -> Layers:
    """Returns the parts of all layers that the names belong to. Tensors of no known part are left out.

    Example:
        >>> layers_of(["decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.router.weight"])
        {'decoder.layers.0': ('attention', 'experts')}
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        place = _place(name)
        if place is None:
            continue
        parts = found.setdefault(place.layer, {})
        parts.setdefault(place.part, place.part)
        for kind, start, variant in _VARIANTS:
            if kind == place.part and place.rest.startswith(start):
                parts[kind] = variant
    ordered = sorted(found.items(), key=lambda item: natural_order(item[0]))
    return {layer: tuple(parts[part] for part in _ORDER if part in parts) for layer, parts in ordered}


def decoder_layers(layers: Layers) -> Layers:
    """Returns the layers of the decoder, without the layers of multi-token prediction."""
    return _by_stack(layers).get(_DECODER, {})


@dataclass(frozen=True)
class Counterparts:
    """For each part of a wanted model's layers, the stored model's layer that has this part.

    Attributes:
        stored: maps (wanted layer, part) to the stored layer that has the part. The part is attention, mlp or mamba.
            Empty if both models have the same layers, or cannot be matched.
        layer_mismatch: why the models cannot be matched, with the layers of both; None if they can be matched.
    """

    stored: Mapping[tuple[str, str], str]
    layer_mismatch: str | None = None

    def stored_name(self, name: str) -> str:
        """Returns the name that a tensor of the wanted model has in the stored model.

        Example:
            >>> hybrid = {"decoder.layers.0": ("attention",), "decoder.layers.1": ("mlp",)}
            >>> found = find_counterparts(hybrid, {"decoder.layers.0": ("attention", "mlp")})
            >>> found.stored_name("decoder.layers.1.mlp.linear_fc2.weight")
            'decoder.layers.0.mlp.linear_fc2.weight'
        """
        place = _place(name) if self.stored else None
        if place is None:
            return name
        return f"{self.stored.get((place.layer, place.part), place.layer)}.{place.rest}"


def find_counterparts(wanted: Layers, stored: Layers) -> Counterparts:
    """Matches the parts of two models one by one, in the order in which the models run them.

    The layers of multi-token prediction are matched separately for each depth. A depth that only one model has is left
    out. The decoder is left out if the stored model has no decoder layers.
    """
    found: dict[tuple[str, str], str] = {}
    ours, theirs = _by_stack(wanted), _by_stack(stored)
    for stack, layers in ours.items():
        others = theirs.get(stack, {})
        if layers == others or not others:
            continue
        matched = _match(layers, others)
        if matched is None:
            where = "" if stack == _DECODER else f" in {stack}"
            return Counterparts({}, f"wanted the layers {describe(layers)}{where}, found {describe(others)}")
        found |= matched
    return Counterparts(found)


def _by_stack(layers: Layers) -> dict[str, dict[str, tuple[str, ...]]]:
    """Groups layers by the stack that runs them: "decoder", "mtp.layers.0", ..."""
    stacks: dict[str, dict[str, tuple[str, ...]]] = {}
    for layer, parts in sorted(layers.items(), key=lambda item: natural_order(item[0])):
        rest = split_language_model(layer)[1]
        stack = _DECODER if rest.startswith(_DECODER) else ".".join(rest.split(".")[:3])
        stacks.setdefault(stack, {})[layer] = parts
    return stacks


def _match(wanted: Layers, stored: Layers) -> dict[tuple[str, str], str] | None:
    """Returns `Counterparts.stored` for one stack.

    Returns None if the two stacks do not run the same parts in the same order.
    """
    ours, theirs = ([(layer, part) for layer, parts in each.items() for part in parts] for each in (wanted, stored))
    if [part for _, part in ours] != [part for _, part in theirs]:
        return None
    return {(layer, _kind(part)): other for (layer, part), (other, _) in zip(ours, theirs, strict=True)}


def _kind(part: str) -> str:
    return next((kind for kind, _, variant in _VARIANTS if variant == part), part)


def describe(layers: Layers) -> str:
    """Returns the layers as text. Writes repeated layers, and repeated short sequences of layers, once, with a count.

    Example:
        >>> describe({"decoder.layers.0": ("attention", "mlp"), "decoder.layers.1": ("attention", "mlp")})
        '2 x (attention + mlp)'
    """
    texts = [" + ".join(parts) for parts in layers.values()]
    found: list[str] = []
    at = 0
    while at < len(texts):
        length, count = max(
            ((period, _repeats(texts, at, period)) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda each: (each[0] * each[1] if each[1] > 1 else 1, -each[0]),
        )
        if count == 1:
            length = 1
        block = ", ".join(texts[at : at + length])
        found.append(block if count == 1 else f"{count} x ({block})")
        at += length * count
    return ", ".join(found) or "none"


def _repeats(texts: Sequence[str], at: int, period: int) -> int:
    """Returns how many times in a row the `period` texts from `at` on occur."""
    block, count = texts[at : at + period], 1
    while texts[at + count * period : at + (count + 1) * period] == block:
        count += 1
    return count
