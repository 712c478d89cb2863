"""What is known of an architecture, and of one model of it: read from `config.json`, never guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt import knobs
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.hf.config_fields import HfConfig, Rule
from mcore_ckpt.hf.table import Sizes, Table
from mcore_ckpt.storage import json_fields as fields
from mcore_ckpt.storage.files import linked_file, read_small


@dataclass(frozen=True)
class ModelFacts:
    """What a table needs to know of a model.

    Attributes:
        sizes: lengths of axes by the table's words: hidden, heads, groups, head_dim, ffn, vocab, experts, ...
        facts: what is true of the model: tied, value, qkv_bias, ...
        layers: what is true of each decoder layer besides: dense or moe, ...
        mtp_layers: the same of each multi-token-prediction layer.
    """

    sizes: Sizes
    facts: frozenset[str]
    layers: tuple[frozenset[str], ...]
    mtp_layers: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: as in `config.json`.
        classes: the names of its transformers classes; `architectures` in `config.json` is one of them.
        table: its tensors.
        read: what the table needs to know, from a config.
        rules: what the config's fields are in megatron; later rules win over earlier ones.
    """

    model_type: str
    classes: tuple[str, ...]
    table: Table
    read: Callable[[HfConfig], ModelFacts]
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class HfModel:
    """One model.

    Attributes:
        architecture: of which it is.
        config: its `config.json`.
        known: what was read from it.
        ignored: regular expressions of HuggingFace names to leave out: the architecture's and the user's.
    """

    architecture: Architecture
    config: HfConfig
    known: ModelFacts
    ignored: tuple[str, ...] = field(default=())

    @property
    def sizes(self) -> Sizes:
        return self.known.sizes

    @property
    def facts(self) -> frozenset[str]:
        return self.known.facts

    @property
    def layers(self) -> tuple[frozenset[str], ...]:
        return self.known.layers

    @property
    def mtp_layers(self) -> tuple[frozenset[str], ...]:
        return self.known.mtp_layers

    @property
    def is_tied(self) -> bool:
        return "tied" in self.facts

    @property
    def is_value(self) -> bool:
        return "value" in self.facts

    def ignores(self, name: str) -> bool:
        """Whether a HuggingFace name is one to leave out."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def describe(self) -> str:
        """For error messages."""
        words = [*(("tied",) if self.is_tied else ()), *(("value model",) if self.is_value else ())]
        extra = f" ({', '.join(words)})" if words else ""
        return f"{self.architecture.model_type} of {len(self.layers)} layers{extra}"


_MOST_COUNTED = 100_000
_MOST_OF_A_SIZE = 2**40
# Of all layers together.
_MOST_EXPERTS = 1_000_000

_architectures: dict[str, Architecture] = {}


def register_architecture(architecture: Architecture) -> None:
    """Makes an architecture known, by its `model_type`; one that is known by it already is replaced."""
    _architectures[architecture.model_type] = architecture


def known_architectures() -> dict[str, Architecture]:
    """By `model_type`."""
    # They register themselves when they are imported.
    from mcore_ckpt.hf import architectures  # noqa: F401

    return dict(_architectures)


def read_model(config: HfConfig, ignored: tuple[str, ...] = ()) -> HfModel:
    """What a `config.json` describes.

    Args:
        config: the object in it.
        ignored: regular expressions of HuggingFace tensors to leave out.

    Raises:
        UnsupportedError: no table for this architecture, a feature that mcore has no counterpart for, or fields that
            hold something else than they should.
    """
    known = known_architectures()
    model_type = config.get("model_type")
    architecture = known.get(str(model_type))
    if architecture is None:
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} is not known: there are tables for {', '.join(sorted(known))}; "
            "add one with mcore_ckpt.hf.register_architecture"
        )
    refuse_quantized(config)
    return HfModel(architecture, config, _known(architecture, config), (*architecture.table.ignored, *ignored))


def refuse_quantized(config: HfConfig) -> None:
    """Raises UnsupportedError if a `config.json` speaks of quantized weights: their numbers mean nothing alone."""
    quantization = config.get("quantization_config")
    if quantization:
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(
            f"config.json: quantization_config is {kind!r}: only plain weights are converted; dequantize them first, "
            "as transformers does (from_pretrained(..., dtype='bfloat16') with the quantizer's dequantize option, then "
            "save_pretrained)"
        )


def _known(architecture: Architecture, config: HfConfig) -> ModelFacts:
    for name, value in config.items():
        # As many layers, heads or experts as are said are counted through.
        if name.startswith(("num_", "n_")) and isinstance(value, int) and value > _MOST_COUNTED:
            raise UnsupportedError(f"config.json: {name} is {value}, more than {_MOST_COUNTED}: no such model exists")
    try:
        known = architecture.read(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(f"config.json: cannot be that of a {architecture.model_type}: {error!r}") from error
    for name, size in known.sizes.items():
        if type(size) is not int or not 0 <= size <= _MOST_OF_A_SIZE:
            raise UnsupportedError(f"config.json: the size {name} of the model is {fields.shown(size)}")
    layers = len(known.layers) + len(known.mtp_layers)
    if layers * known.sizes.get("experts", 1) > _MOST_EXPERTS:
        raise UnsupportedError(f"config.json: {layers} layers of {known.sizes['experts']} experts: none has so many")
    return known


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's `config.json`. Raises CheckpointNotFoundError, UnsupportedError."""
    path = folder / "config.json"
    try:
        return fields.parse(read_small(linked_file(folder, "config.json"), knobs.HF_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: missing: {folder} is not the folder of a HuggingFace model") from None
    except (OSError, CheckpointCorruptError, fields.FieldError) as error:
        raise UnsupportedError(f"{path}: cannot be read: {error}") from None
