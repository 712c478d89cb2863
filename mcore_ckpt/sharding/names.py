"""Makes the names of a pipeline chunk's tensors global: the numbers of layers and experts, and the spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mcore_ckpt.sharding.synonyms import canonical

_LAYER = re.compile(r"((?:.*?\.)?layers)\.(\d+)(?=\.)")
_SEQUENTIAL = re.compile(r"local_experts\.(\d+)(\..+)")
_GROUPED = re.compile(r"(linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True)
class LayerNumber:
    """A layer of a chunk: `list_name.local` in the module is `list_name.number` in the model. Both start at 0."""

    list_name: str
    local: int
    number: int


@dataclass(frozen=True)
class ExpertNumbers:
    """The experts below the local name `prefix`: local expert `e` of `count` is global expert `first + e`."""

    prefix: str
    first: int
    count: int


@dataclass(frozen=True)
class ChunkNames:
    """The layer and expert numbers to translate in the names of one (virtual) pipeline chunk."""

    layers: tuple[LayerNumber, ...] = ()
    experts: tuple[ExpertNumbers, ...] = ()

    def to_global(self, name: str) -> str:
        """Returns the global name of a tensor of this chunk.

        Raises KeyError if the chunk has no such layer or expert.

        Example:
            >>> names = ChunkNames(layers=(LayerNumber("decoder.layers", 0, 6),))
            >>> names.to_global("decoder.layers.0.mlp.linear_fc2.weight")
            'decoder.layers.6.mlp.linear_fc2.weight'
        """
        return canonical(self._renumber_layer(self._renumber_expert(name)))

    @cached_property
    def _numbers(self) -> dict[str, dict[int, int]]:
        numbers: dict[str, dict[int, int]] = {}
        for layer in self.layers:
            numbers.setdefault(layer.list_name, {})[layer.local] = layer.number
        return numbers

    @cached_property
    def _experts_by_prefix(self) -> dict[str, ExpertNumbers]:
        return {experts.prefix: experts for experts in self.experts}

    def _renumber_expert(self, name: str) -> str:
        before, separator, rest = name.partition(".experts.")
        experts = self._experts_by_prefix.get(before + ".experts") if separator else None
        if experts is None:
            return name
        return f"{before}.experts.{_global_expert(rest, experts)}"

    def _renumber_layer(self, name: str) -> str:
        match = _LAYER.match(name)
        if match is None or match.group(1) not in self._numbers:
            return name
        number = self._numbers[match.group(1)].get(int(match.group(2)))
        if number is None:
            raise KeyError(f"{name}: layer {match.group(2)} of {match.group(1)} is not in this chunk")
        return f"{match.group(1)}.{number}{name[match.end(2) :]}"


def _global_expert(rest: str, experts: ExpertNumbers) -> str:
    if match := _SEQUENTIAL.fullmatch(rest):
        return f"local_experts.{_expert_number(int(match[1]), experts, rest)}{match[2]}"
    if match := _GROUPED.fullmatch(rest):
        return f"{match[1]}{_expert_number(int(match[2]), experts, rest)}"
    return rest


def _expert_number(local: int, experts: ExpertNumbers, rest: str) -> int:
    if local >= experts.count:
        raise KeyError(f"{rest}: expert {local} is not one of this rank's {experts.count} experts")
    return experts.first + local


def is_expert(name: str) -> bool:
    """Returns True if a tensor belongs to routed experts, and not to shared experts or to the router."""
    return ".experts." in name


_EXPERT = re.compile(r"(.*\.experts)\.(?:local_experts\.(\d+)\..+|linear_fc[12]\.(?:weight|bias)(\d+))")


def expert_of(name: str) -> tuple[str, int] | None:
    """Returns, for a global tensor of one expert, the prefix of the experts' names and the number of the expert.

    Returns None for a tensor that does not belong to one expert.

    Example:
        >>> expert_of("decoder.layers.3.mlp.experts.linear_fc2.weight7")
        ('decoder.layers.3.mlp.experts', 7)
    """
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match[1], int(match[2] or match[3]))


_NUMBER = re.compile(r"\d+")
# A character that sorts before all characters of names, and a character that sorts after all of them.
_LOWEST, _HIGHEST = "\0", "\U0010ffff"


def natural_order(name: str) -> str:
    """Returns a sort key that puts layer 10 after layer 9.

    The key is one string, because a commit sorts 100,000 names, and comparing tuples takes several times as long.
    """
    # No number contains a dot, so the name can be cut at its last dot and the keys of both parts joined. `_key_of`
    # caches these keys, because each part occurs in many names.
    key = ".".join(map(_key_of, name.rsplit(".", 1)))
    return _HIGHEST + key if key.startswith(_LOWEST) else key


def natural_orders(start: str, numbers: Iterable[int], end: str) -> list[str]:
    """Returns `natural_order` of each name that consists of `start`, one of the `numbers`, and `end`."""
    before, after = natural_order(f"{start}0"), _key_of(end)
    before = before.removesuffix(_key_of("0"))
    return [f"{before}{_key_of(str(number))}{after}" for number in numbers]


@lru_cache(maxsize=1 << 14)
def _key_of(part: str) -> str:
    return _NUMBER.sub(_with_length, part)


def _with_length(number: re.Match[str]) -> str:
    # The lowest character ends the text before the number, so that "ab1" comes before "abc".
    digits = str(int(number[0]))
    return f"{_LOWEST}{len(digits):04}{digits}"
