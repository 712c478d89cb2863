"""The registry of known architectures, and the function that builds an `HfModel` from a `config.json`.

To add a built-in architecture, see `architectures/__init__.py`.
"""

from __future__ import annotations

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts
from mcore_ckpt.models.architectures import ARCHITECTURES
from mcore_ckpt.models.config_fields import HfConfig

# Limits on the numbers in a config. Without them, a damaged or hostile config could make the mapping list tensors
# without end.
_MOST_COUNTED = 100_000
_MOST_OF_A_SIZE = 2**40
_MOST_EXPERTS_OF_ALL_LAYERS = 1_000_000

_architectures: dict[str, Architecture] = {known.model_type: known for known in ARCHITECTURES}


def register_architecture(architecture: Architecture) -> None:
    """Registers an architecture under its `model_type`, in place of any architecture with the same `model_type`."""
    _architectures[architecture.model_type] = architecture


def known_architectures() -> dict[str, Architecture]:
    """Returns all registered architectures by `model_type`."""
    return dict(_architectures)


def model_from_config(config: HfConfig, ignored: tuple[str, ...] = ()) -> HfModel:
    """Returns the model that a `config.json` describes.

    Args:
        config: the parsed `config.json`.
        ignored: regular expressions for the names of HuggingFace tensors to leave out.

    Raises:
        UnsupportedError: the architecture is not registered, the model has a feature without a counterpart in mcore,
            or a field holds an impossible value.
    """
    known = known_architectures()
    model_type = config.get("model_type")
    architecture = known.get(str(model_type))
    if architecture is None:
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} is not known: there are tables for {', '.join(sorted(known))}; "
            "register this one with mcore_ckpt.models.register_architecture"
        )
    refuse_quantized(config)
    return HfModel(architecture, config, _known(architecture, config), (*architecture.table.ignored, *ignored))


def refuse_quantized(config: HfConfig) -> None:
    """Raises UnsupportedError if a `config.json` announces quantized weights."""
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
        # The code below loops over as many layers, heads and experts as the config states.
        if name.startswith(("num_", "n_")) and isinstance(value, int) and value > _MOST_COUNTED:
            raise UnsupportedError(f"config.json: {name} is {value}, more than {_MOST_COUNTED}: no such model exists")
    try:
        known = architecture.read(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(f"config.json: cannot be that of a {architecture.model_type}: {error!r}") from error
    for name, size in known.sizes.items():
        if type(size) is not int or not 0 <= size <= _MOST_OF_A_SIZE:
            raise UnsupportedError(
                f"config.json: the size {name} of the model is {fields.shown(size)}, which is impossible"
            )
    layers = len(known.layers) + len(known.mtp_layers)
    if layers * known.sizes.get("experts", 1) > _MOST_EXPERTS_OF_ALL_LAYERS:
        raise UnsupportedError(
            f"config.json: {layers} layers of {known.sizes['experts']} experts are more than "
            f"{_MOST_EXPERTS_OF_ALL_LAYERS} experts: no such model exists"
        )
    return known
