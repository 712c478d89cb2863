"""The known architectures, and what a `config.json` says of a model of one of them."""

from __future__ import annotations

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts
from mcore_ckpt.models.architectures import ARCHITECTURES
from mcore_ckpt.models.config_fields import HfConfig

_MOST_COUNTED = 100_000


_MOST_OF_A_SIZE = 2**40


# Of all layers together.
_MOST_EXPERTS = 1_000_000


_architectures: dict[str, Architecture] = {known.model_type: known for known in ARCHITECTURES}


def register_architecture(architecture: Architecture) -> None:
    """Makes an architecture known, by its `model_type`; one that is known by it already is replaced."""
    _architectures[architecture.model_type] = architecture


def known_architectures() -> dict[str, Architecture]:
    """By `model_type`."""
    return dict(_architectures)


def model_from_config(config: HfConfig, ignored: tuple[str, ...] = ()) -> HfModel:
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
            "add one with mcore_ckpt.models.register_architecture"
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
