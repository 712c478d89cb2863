"""The data classes of an architecture and of one model, and the reader of `config.json`."""

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
    """The facts about one model that its table of tensors depends on.

    An architecture's `read` function takes them from `config.json`. A field that is missing there is an error, never a
    guess.

    Attributes:
        sizes: the lengths that the table's shapes refer to, by name: hidden, heads, groups, head_dim, ffn, vocab,
            experts, ...
        facts: words that are true of the whole model: tied, value, qkv_bias, ...
        layers: for each decoder layer, the words that are true of this layer in addition: moe, linear, ...
        mtp_layers: the same for each layer of multi-token prediction.
    """

    sizes: Sizes
    facts: frozenset[str]
    layers: tuple[frozenset[str], ...]
    mtp_layers: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class Architecture:
    """One HuggingFace architecture and its counterpart in Megatron.

    Attributes:
        model_type: the value of `model_type` in `config.json`.
        classes: the names of its transformers classes. `architectures` in `config.json` holds one of them.
        table: which HuggingFace tensors make up which Megatron tensor.
        read: reads the facts that the table depends on from a config.
        rules: translate the config's fields to Megatron's arguments and back. Where two rules give the same argument,
            the later one wins.
    """

    model_type: str
    classes: tuple[str, ...]
    table: Table
    read: Callable[[HfConfig], ModelFacts]
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class HfModel:
    """One HuggingFace model: its architecture, its `config.json`, and the facts read from it.

    Attributes:
        architecture: the architecture that `model_type` names.
        config: the object in its `config.json`.
        known: the facts that `architecture.read` found in the config.
        ignored: regular expressions of HuggingFace tensor names that are left out, the architecture's and the user's.
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
        """True if the HuggingFace tensor of this name is left out."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def describe(self) -> str:
        """Describes the model for error messages: "qwen3 of 4 layers (tied)"."""
        words = [*(("tied",) if self.is_tied else ()), *(("value model",) if self.is_value else ())]
        extra = f" ({', '.join(words)})" if words else ""
        return f"{self.architecture.model_type} of {len(self.layers)} layers{extra}"


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the object in a folder's `config.json`.

    Raises:
        CheckpointNotFoundError: the folder has no `config.json`.
        UnsupportedError: the file cannot be read, or holds no JSON object.
    """
    path = folder / "config.json"
    try:
        return fields.parse(read_small(linked_file(folder, "config.json"), limits.HF_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: missing: {folder} is not a HuggingFace model's folder") from None
    except (OSError, CheckpointCorruptError, fields.FieldError) as error:
        raise UnsupportedError(f"{path}: cannot be read: {error}") from None
