"""Defines the data classes that describe architectures and models, and reads `config.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import linked_file, read_small
from mcore_ckpt.models.config_fields import HfConfig, Rule, Same
from mcore_ckpt.models.table import MCORE_HEAD, Sizes, Table

# Both a vision-language model's config and its section for the language model have these fields.
_OF_BOTH = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings")

_TIED = "gpt.share_embeddings_and_output_weights"


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model. The table of the model's architecture depends on these facts.

    An architecture's `read` function reads these facts from `config.json`, and refuses a config that lacks a required
    field.

    Attributes:
        sizes: the lengths that occur in the shapes of the table, by name: hidden, heads, groups, head_dim, ffn, vocab,
            experts, ...
        facts: words that are true of the whole model: tied, value, qkv_bias, ...
        layers: for each decoder layer, the additional words that are true of this layer: moe, linear, ...
        mtp_layers: for each multi-token-prediction layer, the additional words that are true of this layer.
        mtp_stack: the number of `mtp_layers` in one depth of multi-token prediction: 1, or more in hybrid models.
        unstated_mtp: the multi-token-prediction layers that published models have although their `config.json` does not
            mention them. Only a model's tensors show whether the model has these layers (`reconcile.with_mtp_of`).
    """

    sizes: Sizes
    facts: frozenset[str]
    layers: tuple[frozenset[str], ...]
    mtp_layers: tuple[frozenset[str], ...] = ()
    mtp_stack: int = 1
    unstated_mtp: tuple[frozenset[str], ...] = ()


def language_config(config: HfConfig, section: str) -> HfConfig:
    """Returns the fields of `config.json` that describe the language model, as if this model had its own `config.json`.

    Early vision-language models (Qwen2.5-VL as published) have these fields in `config.json` itself. Fields of the
    whole model (`_OF_BOTH`) can be in both places. Then the values in `config.json` itself count (transformers 5 reads
    `tie_word_embeddings` in `config.json` itself, and 4.57 in the section). `section` is empty if the architecture has
    no section.
    """
    if not _is_nested(config, section):
        return config
    both = {name: config[name] for name in _OF_BOTH if config.get(name) is not None}
    return {**(config.get(section) or {}), **both}


def _is_nested(config: HfConfig, section: str) -> bool:
    return bool(section) and (isinstance(config.get(section), Mapping) or "hidden_size" not in config)


@dataclass(frozen=True)
class Architecture:
    """One HuggingFace architecture and its counterpart in Megatron.

    Attributes:
        model_type: the value of `model_type` in `config.json`.
        classes: the names of the model classes in transformers. `architectures` in `config.json` contains one of them.
        table: which HuggingFace tensors make up which Megatron tensor.
        read: a function that reads, from a config, the facts on which the table depends.
        rules: objects that translate the config's fields to Megatron's arguments and back. If two rules set the same
            argument, the later rule takes precedence.
        section: the field of `config.json` that holds the language model's fields, which `rules` and `read` translate:
            "text_config" in vision-language models. Empty if these fields are in `config.json` itself.
    """

    model_type: str
    classes: tuple[str, ...]
    table: Table
    read: Callable[[HfConfig], ModelFacts]
    rules: tuple[Rule, ...] = ()
    section: str = ""

    def language_config(self, config: HfConfig) -> HfConfig:
        """See the function `language_config`."""
        return language_config(config, self.section)

    def with_language_config(self, config: HfConfig, language: HfConfig) -> dict[str, Any]:
        """Returns `config` with the fields of the language model from `language`; the reverse of `language_config`."""
        if not _is_nested(config, self.section):
            return {**config, **language}
        own = {**(config.get(self.section) or {}), **{name: v for name, v in language.items() if name not in _OF_BOTH}}
        changed = {name: language[name] for name in _OF_BOTH if name in language and language[name] != config.get(name)}
        own |= {name: value for name, value in changed.items() if name != "architectures"}
        # Write this field in both places: transformers 4.57 reads it in the section, and 5 in config.json itself.
        own["tie_word_embeddings"] = bool(language.get("tie_word_embeddings"))
        return {**config, self.section: own, **changed}

    @property
    def tied_field(self) -> str:
        """The field of `config.json` that says whether the output head is the embedding."""
        rules = (rule for rule in self.rules if isinstance(rule, Same))
        return next((rule.hf for rule in rules if rule.mcore == _TIED), "tie_word_embeddings")


@dataclass(frozen=True)
class HfModel:
    """One HuggingFace model: its architecture, its `config.json`, and the facts about the model.

    Attributes:
        architecture: the architecture that `model_type` names.
        config: the parsed `config.json`, without `quantization_config`.
        known: the facts about the model. `architecture.read` finds them in the config, and `reconcile` corrects them.
        ignored: regular expressions, from the architecture's table and from the user, for the names of HuggingFace
            tensors to leave out.
    """

    architecture: Architecture
    config: HfConfig
    known: ModelFacts
    ignored: tuple[str, ...] = ()

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
    def mtp_depths(self) -> int:
        """The number of tokens that multi-token prediction predicts."""
        return len(self.mtp_layers) // self.known.mtp_stack

    @property
    def language_config(self) -> HfConfig:
        """The fields of `config.json` that describe the language model."""
        return self.architecture.language_config(self.config)

    @property
    def mcore_head(self) -> str:
        """The name of the output layer's weight in mcore."""
        return self.architecture.table.mcore + MCORE_HEAD

    @property
    def is_tied(self) -> bool:
        return "tied" in self.facts

    @property
    def is_value(self) -> bool:
        return "value" in self.facts

    @property
    def ignored_by_user(self) -> tuple[str, ...]:
        """The patterns in `ignored` that do not come from the table."""
        return tuple(pattern for pattern in self.ignored if pattern not in self.architecture.table.ignored)

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
        raise CheckpointNotFoundError(f"{path}: is missing, so {folder} is not a HuggingFace model") from None
    except (OSError, CheckpointCorruptError, fields.FieldError) as error:
        raise UnsupportedError(f"{path}: cannot be read: {error}") from None
