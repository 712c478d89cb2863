"""Finds the layers of a stored model that hold the parts of another model's layers.

A layer of GPTModel has attention and an MLP. A layer of HybridModel (megatron-core 0.18) is only one of them, or a
Mamba mixer. So the same sequence of parts has different layer numbers in the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
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
# What tells parts of one kind apart: their tensors do not fit each other.
_VARIANTS = (
    ("attention", "self_attention.in_proj.", "linear attention"),
    ("attention", "self_attention.linear_kv_down_proj.", "latent attention"),
    ("mlp", "mlp.router.", "experts"),
)

# By layer number, the layer's parts in the order in which it runs them.
Layers = Mapping[int, tuple[str, ...]]


def layers_of(names: Iterable[str]) -> Layers:
    """Returns the parts of all decoder layers that the names belong to. Tensors of no known part are left out.

    Example:
        >>> layers_of(["decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.router.weight"])
        {0: ('attention', 'experts')}
    """
    found: dict[int, dict[str, str]] = {}
    for name in names:
        place = _place(name)
        if place is None:
            continue
        number, part, rest = place
        parts = found.setdefault(number, {})
        parts.setdefault(part, part)
        for kind, start, variant in _VARIANTS:
            if kind == part and rest.startswith(start):
                parts[part] = variant
    return {number: tuple(parts[part] for part in _ORDER if part in parts) for number, parts in sorted(found.items())}


def _place(name: str) -> tuple[int, str, str] | None:
    """Returns a tensor's layer, the part that it belongs to, and its name there. None if it is of no known part."""
    match = _LAYER.fullmatch(name)
    part = None if match is None else _MODULES.get(match[2].partition(".")[0])
    return None if match is None or part is None else (int(match[1]), part, match[2])


@dataclass(frozen=True)
class Counterparts:
    """The layer of a stored model for each part of each layer of a wanted model.

    Attributes:
        stored: by the wanted layer's number and its part (attention, mlp or mamba), the stored layer's number. Empty if
            both models have the same layers.
    """

    stored: Mapping[tuple[int, str], int]

    def stored_name(self, name: str) -> str:
        """Returns the name that a tensor of the wanted model has in the stored model.

        Example:
            >>> wanted, stored = {0: ("attention",), 1: ("mlp",)}, {0: ("attention", "mlp")}
            >>> find_counterparts(wanted, stored).stored_name("decoder.layers.1.mlp.linear_fc2.weight")
            'decoder.layers.0.mlp.linear_fc2.weight'
        """
        place = _place(name) if self.stored else None
        if place is None:
            return name
        number, part, rest = place
        return f"decoder.layers.{self.stored.get((number, part), number)}.{rest}"


def find_counterparts(wanted: Layers, stored: Layers) -> Counterparts:
    """Matches the parts of two models one by one, in the order in which the models run them.

    Raises:
        ValueError: the models do not run the same parts in the same order. The message lists the layers of both.
    """
    if wanted == stored:
        return Counterparts({})
    ours, theirs = _sequence(wanted), _sequence(stored)
    if [part for _, part in ours] != [part for _, part in theirs]:
        raise ValueError(f"wanted the layers {describe(wanted)}, found {describe(stored)}")
    return Counterparts(
        {(number, _module_part(part)): other for (number, part), (other, _) in zip(ours, theirs, strict=True)}
    )


def _sequence(layers: Layers) -> list[tuple[int, str]]:
    return [(number, part) for number, parts in sorted(layers.items()) for part in parts]


def _module_part(part: str) -> str:
    return next((kind for kind, _, variant in _VARIANTS if variant == part), part)


def describe(layers: Layers) -> str:
    """Returns the layers as text, with equal ones in a row counted.

    Example:
        >>> describe({0: ("attention", "mlp"), 1: ("attention", "mlp"), 2: ("mamba",)})
        '2 x (attention + mlp), mamba'
    """
    runs: list[tuple[str, int]] = []
    for _, parts in sorted(layers.items()):
        text = " + ".join(parts)
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return ", ".join(text if count == 1 else f"{count} x ({text})" for text, count in runs) or "none"
