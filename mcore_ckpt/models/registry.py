"""Keeps the registry of known architectures, and builds an `HfModel` from a `config.json`.

To add a built-in architecture, see `architectures/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts
from mcore_ckpt.models.architectures import ARCHITECTURES
from mcore_ckpt.models.closest import describe_closest
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.quantization import quantization_of, without_quantization
from mcore_ckpt.sharding.patterns import compiled
from mcore_ckpt.sharding.regions import Shape

# Limits on the numbers in a config. Without them, a damaged or hostile config could cause an endless list of tensors.
_MOST_COUNTED = 100_000
_MOST_OF_A_SIZE = 2**40
_MOST_EXPERTS_OF_ALL_LAYERS = 1_000_000

_architectures: dict[str, Architecture] = {known.model_type: known for known in ARCHITECTURES}


def register_architecture(architecture: Architecture) -> None:
    """Registers an architecture under its `model_type`. Replaces an architecture that has the same `model_type`."""
    _architectures[architecture.model_type] = architecture


def known_architectures() -> dict[str, Architecture]:
    """Returns all registered architectures by `model_type`."""
    return dict(_architectures)


def model_from_config(
    config: HfConfig, ignored: tuple[str, ...] = (), tensors: Mapping[str, Shape] | None = None
) -> HfModel:
    """Returns the model that a `config.json` describes, as if its weights were not quantized.

    Args:
        ignored: regular expressions for the names of HuggingFace tensors to leave out.
        tensors: the shapes of the model's tensors, if they are known, for the message about an unknown architecture.

    Raises:
        UnsupportedError: the architecture is not registered (the message names the closest known architecture), the
            model has a feature without a counterpart in mcore, the weights are quantized in an unknown form, or a field
            holds an impossible value.
    """
    compiled(ignored)
    known = known_architectures()
    model_type = config.get("model_type")
    architecture = known.get(str(model_type))
    if architecture is None:
        tables = sorted(name for name, architecture in known.items() if architecture.table.layer)
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} is not known: there are tables for {', '.join(tables)}; "
            f"{describe_closest(known.values(), _known, config, tensors)}: write a table for this architecture ('How "
            "to add an architecture' in CONTRIBUTING.md) and register it with mcore_ckpt.models.register_architecture"
        )
    quantization_of(config)
    plain = without_quantization(config)
    return HfModel(architecture, plain, _known(architecture, plain), (*architecture.table.ignored, *ignored))


def _known(architecture: Architecture, config: HfConfig) -> ModelFacts:
    sections = [section for section in config.values() if isinstance(section, Mapping)]
    for name, value in (item for section in (config, *sections) for item in section.items()):
        # Check these numbers first, because the code below loops over as many layers, heads and experts as the config
        # states.
        if str(name).startswith(("num_", "n_")) and isinstance(value, int) and value > _MOST_COUNTED:
            raise UnsupportedError(f"config.json: {name} is {value}, more than {_MOST_COUNTED}: no such model exists")
    try:
        known = architecture.read(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(f"config.json: does not describe a {architecture.model_type}: {error!r}") from error
    for name, size in known.sizes.items():
        if type(size) is not int or not 0 <= size <= _MOST_OF_A_SIZE:
            raise UnsupportedError(
                f"config.json: the size {name} of the model is {fields.shown(size)}, but such a size is impossible"
            )
    for row in architecture.table.model:
        if row.per and known.sizes[row.per] > _MOST_COUNTED:
            raise UnsupportedError(
                f"config.json: states {known.sizes[row.per]} {row.per}, more than {_MOST_COUNTED}: no such model exists"
            )
    layers = len(known.layers) + len(known.mtp_layers)
    if layers * known.sizes.get("experts", 1) > _MOST_EXPERTS_OF_ALL_LAYERS:
        raise UnsupportedError(
            f"config.json: states {layers} layers of {known.sizes['experts']} experts, more than "
            f"{_MOST_EXPERTS_OF_ALL_LAYERS} experts in all: no such model exists"
        )
    return known
