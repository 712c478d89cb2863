"""Finds the known table that is closest to a model without a table, to tell users what a new table must contain.

Every known table is compared with the folder's tensors. The error for an unknown architecture names the table that has
places for the most tensors, and the tensors that have no place in this table. In the compared names, `*` replaces the
numbers of layers and experts, so the size of the model does not matter. If there is only a `config.json`, the rules of
the known architectures are compared with its fields (`_by_fields`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.accounting import some_of
from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts
from mcore_ckpt.models.config_fields import HfConfig, MissingFieldError
from mcore_ckpt.models.mapping import hf_tensors, hf_tensors_in
from mcore_ckpt.sharding.regions import Shape

Read = Callable[[Architecture, HfConfig], ModelFacts]
# Matches the number of a layer or of an expert in a tensor's name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_closest(
    architectures: Iterable[Architecture], read: Read, config: HfConfig, tensors: Mapping[str, Shape] | None
) -> str:
    """Names the architecture that fits a model best, and the tensors for which this architecture has no place.

    `tensors` has the shapes of the model's tensors by name. Architectures whose facts `read` finds in the config are
    compared with these tensors. The architecture whose table has a place for the most tensors fits best. A tensor has a
    place if the table has its name with its shape. Each name is shown once, with `*` in place of the numbers of layers
    and experts. Without tensors, or if no table has a place for any tensor, `_by_fields` decides.

    Example:
        >>> describe_closest(known, read, config, shapes)  # doctest: +SKIP
        'closest: qwen3_moe, which places 95 of 99 tensors; it has no place for model.layers.*.self_attn.sinks'
    """
    known = [architecture for architecture in architectures if architecture.table.layer]
    found = _by_tensors(known, read, config, tensors) if tensors else None
    if found is not None:
        return found
    without = "no known table has a place for any of the model's tensors, " if tensors else ""
    return without + _by_fields(known, config)


@dataclass(frozen=True)
class _Fit:
    """A measure of how well a table fits a folder.

    Attributes:
        placed: the number of the folder's tensors for which the table has a place.
        without_place: the patterns of the folder's tensors for which the table has no place.
        lacking: the patterns of the tensors that the table needs and the folder lacks.
    """

    model_type: str
    placed: int
    without_place: Sequence[str]
    lacking: Sequence[str]


def _by_tensors(
    known: Iterable[Architecture], read: Read, config: HfConfig, tensors: Mapping[str, Shape]
) -> str | None:
    """Names the table that has places for the most tensors. Tables that cannot read the config are left out.

    Returns None if no table has a place for any tensor.
    """
    fits = [fit for architecture in known if (fit := _fit(architecture, read, config, tensors)) is not None]
    best = max(fits, key=lambda fit: (fit.placed, -len(fit.lacking)), default=None)
    if best is None or not best.placed:
        return None
    placed = f"closest: {best.model_type}, which places {best.placed} of {len(tensors)} tensors"
    without = f"; it has no place for {some_of(best.without_place)}" if best.without_place else ""
    return placed + without + (f"; the model lacks {some_of(best.lacking)}" if best.lacking else "")


def _fit(architecture: Architecture, read: Read, config: HfConfig, tensors: Mapping[str, Shape]) -> _Fit | None:
    config = {**config, "model_type": architecture.model_type}
    try:
        known = read(architecture, config)
        # Layers of the same kind have the same tensors, so one layer of each kind is enough.
        known = replace(
            known, layers=tuple(dict.fromkeys(known.layers)), mtp_layers=known.mtp_layers[: known.mtp_stack]
        )
        model = HfModel(architecture, config, known, architecture.table.ignored)
        places = {(_pattern(t.name), t.shape) for t in (*hf_tensors(model), *hf_tensors_in(model, tensors))}
        needed = {(_pattern(t.name), t.shape) for t in hf_tensors_in(model, tensors)}
    except UnsupportedError:
        return None
    found = Counter((_pattern(name), shape) for name, shape in tensors.items() if not model.ignores(name))
    placed = sum(count for tensor, count in found.items() if tensor in places)
    return _Fit(
        architecture.model_type,
        placed,
        [_shown(tensor, places) for tensor in found if tensor not in places],
        [pattern for pattern, _ in sorted(needed - found.keys()) if pattern not in {name for name, _ in found}],
    )


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _shown(tensor: tuple[str, Shape], places: set[tuple[str, Shape]]) -> str:
    """Returns the tensor's name, followed by both shapes if the table has this name with another shape."""
    pattern, shape = tensor
    wanted = next((other for name, other in places if name == pattern), None)
    return pattern if wanted is None else f"{pattern} of shape {list(shape)} (the table has {list(wanted)})"


class _Watched(dict[str, Any]):
    """A config that notes which of its fields are read."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read |= {name} & self.keys()
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read |= {name} & self.keys()
        return super().__getitem__(name)


def _by_fields(known: Iterable[Architecture], config: HfConfig) -> str:
    """Names the architecture with the highest score.

    The score is the number of the config's fields that the architecture's rules read, minus the number of fields that
    the rules need and do not find.
    """
    tried = [(a.model_type, *_try(a, config)) for a in known if a.rules]
    model_type, read, missing = max(tried, key=lambda each: (each[1] - len(each[2]), each[0]))
    lacking = f"; it also needs {some_of(missing)}, but the config lacks this" if missing else ""
    return f"closest by its fields: {model_type}, which reads {read} of {len(config)}{lacking}"


def _try(architecture: Architecture, config: HfConfig) -> tuple[int, list[str]]:
    """Returns how many fields the architecture's rules read, and which needed fields they do not find."""
    watched, missing = _Watched({**config, "model_type": architecture.model_type}), list[str]()
    for rule in architecture.rules:
        try:
            rule.to_mcore(watched)
        except MissingFieldError as error:
            missing.append(str(error).removeprefix("config.json: ").removesuffix(" is missing"))
        except (UnsupportedError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
    return len(watched.read), [*dict.fromkeys(missing)]
