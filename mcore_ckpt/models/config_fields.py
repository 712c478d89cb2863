"""Rules of single fields: what a field of `config.json` is called in megatron, in both directions.

A rule reads some fields of a `config.json` and says what they are in megatron (`to_mcore`), or which fields say what
megatron has (`to_hf`). Values of megatron are in one flat dict: arguments of `TransformerConfig` under their names,
arguments of `GPTModel` after "gpt.", and after "attributes." what megatron-core 0.16.1 reads from the config although
it is no field of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mcore_ckpt.errors import UnsupportedError

HfConfig = Mapping[str, Any]
"""The object in a `config.json`, of transformers 4 or 5."""

McoreValues = Mapping[str, Any]
HfFields = dict[str, Any]


class MissingFieldError(UnsupportedError):
    """A `config.json` lacks a field that cannot be guessed."""


class Rule(Protocol):
    """Some fields in both worlds."""

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        """What a config says. Raises MissingFieldError, and UnsupportedError for what megatron cannot do."""
        ...

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        """The fields that say it; `base` is the config that they will be put in. What cannot be said is left out:
        whoever asks compares what `to_mcore` makes of the result."""
        ...


_REQUIRED = object()


def needed(hf: HfConfig, *names: str) -> Any:
    """The first of several fields that is there. Raises MissingFieldError."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise MissingFieldError(f"config.json: {' (or '.join(names)}{')' * (len(names) - 1)} is missing")


@dataclass(frozen=True)
class Same:
    """One value under two names.

    Attributes:
        mcore: its name in megatron.
        hf: its name in `config.json`.
        default: what its absence, or null, means; else it must be there.
        also: other names of it in `config.json`, of other versions of transformers; all are written.
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
class Constant:
    """A value that every model of the architecture has in megatron."""

    mcore: str
    value: Any

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        return {self.mcore: self.value}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {}


@dataclass(frozen=True)
class Refused:
    """A field that must have one value, because megatron has nothing for others. Absence means that value."""

    hf: str
    allowed: Any

    def to_mcore(self, hf: HfConfig) -> dict[str, Any]:
        value = hf.get(self.hf)
        if value is not None and value != self.allowed:
            raise UnsupportedError(
                f"config.json: {self.hf} is {value!r}, which megatron-core 0.16.1 has no counterpart for: it does what "
                f"{self.allowed!r} means"
            )
        return {}

    def to_hf(self, mcore: McoreValues, base: HfConfig) -> HfFields:
        return {}
