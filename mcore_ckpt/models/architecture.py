"""The data classes that describe architectures and models, and the reader of `config.json`."""

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
    """The facts about one model on which the table of its architecture depends.

    An architecture's `read` function reads them from `config.json`, and refuses a config that lacks a required field.

    Attributes:
        sizes: the lengths that occur in the shapes of the table, by name: hidden, heads, groups, head_dim, ffn, vocab,
            experts, ...
        facts: words that are true of the whole model: tied, value, qkv_bias, ...
        layers: for each decoder layer, the additional words that are true of this layer: moe, linear, ...
        mtp_layers: the same for each multi-token-prediction layer.
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
        classes: the names of the model classes in transformers. `architectures` in `config.json` contains one of them.
        table: which HuggingFace tensors make up which Megatron tensor.
        read: a function that reads, from a config, the facts on which the table depends.
        rules: translate the config's fields to Megatron's arguments and back. If two rules set the same argument, the
            later rule takes precedence.
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
        config: the parsed `config.json`.
        known: the facts about the model. `architecture.read` finds them in the config, and `reconcile` corrects them.
        ignored: regular expressions for the names of HuggingFace tensors to leave out. They come from the
            architecture's table and from the user.
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
        """Returns True if the HuggingFace tensor with this name is left out."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def describe(self) -> str:
        """Describes the model for error messages, such as "qwen3 of 4 layers (tied)"."""
        words = [*(("tied",) if self.is_tied else ()), *(("value model",) if self.is_value else ())]
        extra = f" ({', '.join(words)})" if words else ""
        return f"{self.architecture.model_type} of {len(self.layers)} layers{extra}"


def read_config(folder: Path) -> dict[str, Any]:
    """Reads and parses the `config.json` of a folder.

    Raises:
        CheckpointNotFoundError: the folder has no `config.json`.
        UnsupportedError: the file cannot be read, or contains no JSON object.
    """
    path = folder / "config.json"
    try:
        return fields.parse(read_small(linked_file(folder, "config.json"), limits.HF_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: missing, so {folder} is not a HuggingFace model's folder") from None
    except (OSError, CheckpointCorruptError, fields.FieldError) as error:
        raise UnsupportedError(f"{path}: cannot be read: {error}") from None
