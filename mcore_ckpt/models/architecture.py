"""What is known of an architecture, and of one model of it: read from `config.json`, never guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import linked_file, read_small
from mcore_ckpt.models.config_fields import HfConfig, Rule
from mcore_ckpt.models.table import Sizes, Table


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


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's `config.json`. Raises CheckpointNotFoundError, UnsupportedError."""
    path = folder / "config.json"
    try:
        return fields.parse(read_small(linked_file(folder, "config.json"), limits.HF_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: missing: {folder} is not the folder of a HuggingFace model") from None
    except (OSError, CheckpointCorruptError, fields.FieldError) as error:
        raise UnsupportedError(f"{path}: cannot be read: {error}") from None
