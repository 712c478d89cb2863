"""Rules that translate single fields of `config.json` to Megatron's arguments and back.

A rule's `to_mcore` reads some fields of a `config.json` and returns Megatron's values. The rule's `to_hf` returns the
fields that express Megatron's values. Megatron's values are in one flat dict, under three kinds of names:

- arguments of `TransformerConfig` under their own names;
- arguments of `GPTModel` (or of `HybridModel`, if `Table.is_hybrid`) with the prefix "gpt.";
- attributes that megatron-core 0.16.1 reads from the config, although `TransformerConfig` does not declare them as
  fields, with the prefix "attributes.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mcore_ckpt.errors import UnsupportedError

HfConfig = Mapping[str, Any]
"""The parsed `config.json` of transformers 4 or 5."""

MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The fields that give the number of multi-token-prediction layers. Each architecture has at most one of them."""

McoreValues = Mapping[str, Any]
HfFields = dict[str, Any]


class MissingFieldError(UnsupportedError):
    """A `config.json` lacks a field that has no safe default."""


def factor_or_none(factor: float | None) -> float | None:
    """Returns a factor in the form that rules use: a factor of 1.0, which changes nothing, becomes None."""
    return None if factor == 1 else factor


class Rule(Protocol):
    """A translation between some fields of `config.json` and Megatron's values.

    A rule that translates in only one direction derives from this class, whose methods translate nothing.
    """

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        """Returns Megatron's values for a config.

        Raises:
            MissingFieldError: a field that the rule needs is missing.
            UnsupportedError: a field requires something that Megatron cannot do.
        """
        return {}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        """Returns the fields of `config.json` that express Megatron's values.

        `base` is the config that the caller puts these fields into. The rule leaves out values that no field can
        express. The caller detects this: it translates the result back with `to_mcore` and compares.
        """
        return {}


_REQUIRED = object()


def needed(hf: HfConfig, *names: str) -> Any:
    """Returns the value of the first of these fields that is present. Raises MissingFieldError if all are missing."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise MissingFieldError(f"config.json: {' (or '.join(names)}{')' * (len(names) - 1)} is missing")


@dataclass(frozen=True)
class Same:
    """The rule for a field that has the same value in `config.json` and in Megatron, under two names.

    Attributes:
        default: the value if the field is missing or null. Without a default the field is required.
        also: the field's other names in `config.json`, for other versions of transformers. `to_hf` writes the value
            under all names.
    """

    mcore: str
    hf: str
    default: Any = _REQUIRED
    also: tuple[str, ...] = ()

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        found = [hf[name] for name in (self.hf, *self.also) if hf.get(name) is not None]
        if not found and self.default is not _REQUIRED:
            return {self.mcore: self.default}
        if any(value != found[0] for value in found):
            raise UnsupportedError(f"config.json: {' and '.join((self.hf, *self.also))} differ: {found}")
        return {self.mcore: needed(hf, self.hf, *self.also)}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return dict.fromkeys((self.hf, *self.also), mcore[self.mcore])


@dataclass(frozen=True)
class Constant(Rule):
    """The rule for a value that is the same for all models of an architecture and is not in `config.json`."""

    mcore: str
    value: Any

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        return {self.mcore: self.value}


@dataclass(frozen=True)
class Refused(Rule):
    """The rule for a field that must have the value `allowed` or be missing: Megatron supports no other value."""

    hf: str
    allowed: Any

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        value = hf.get(self.hf)
        if value is not None and value != self.allowed:
            raise UnsupportedError(
                f"config.json: {self.hf} is {value!r}, but megatron-core 0.16.1 has no counterpart for this value: "
                f"only {self.allowed!r} can be converted"
            )
        return {}
