"""`config.json` <-> the arguments of megatron's `TransformerConfig` and `GPTModel`, and whether a live model agrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models.architecture import Architecture, HfModel
from mcore_ckpt.models.config_fields import HfConfig, MissingFieldError, Same

if TYPE_CHECKING:
    import torch

_GPT = "gpt."
_ATTRIBUTES = "attributes."


@dataclass(frozen=True)
class McoreConfig:
    """What a model is in megatron.

    Attributes:
        transformer: arguments of `TransformerConfig`, or of `MLATransformerConfig` where `multi_latent_attention` is
            among them. How it is trained and cut is not: add that.
        gpt: arguments of `GPTModel`; `vocab_size` is HuggingFace's, without padding.
        attributes: what `GPTModel` reads from the config although it is no field of it (Yarn's numbers, 0.16.1): to be
            set on it.
    """

    transformer: dict[str, Any]
    gpt: dict[str, Any]
    attributes: dict[str, Any]

    def transformer_config(self, **more: Any) -> Any:
        """The megatron config, with arguments for training and parallelism added."""
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        kind = MLATransformerConfig if self.transformer.get("multi_latent_attention") else TransformerConfig
        config = kind(**{**self.transformer, **more})
        for name, value in self.attributes.items():
            setattr(config, name, value)
        return config


def to_mcore_config(model: HfModel) -> McoreConfig:
    """What a HuggingFace model is in megatron.

    Raises:
        UnsupportedError: a field of its `config.json` says what megatron-core 0.16.1 cannot do.

    Example:
        >>> config = to_mcore_config(model_from_config(read_config(folder)))  # doctest: +SKIP
        >>> model = GPTModel(config.transformer_config(tensor_model_parallel_size=2), spec, **config.gpt)
    """
    import torch

    if not model.architecture.rules:
        raise UnsupportedError(f"{model.architecture.model_type} was registered without rules for its config.json")
    values = _values(model.architecture, model.config)
    values["gpt.share_embeddings_and_output_weights"] = model.is_tied
    values["gpt.vocab_size"] = model.sizes["vocab"]
    values |= {"bf16": values["params_dtype"] is torch.bfloat16, "fp16": values["params_dtype"] is torch.float16}
    if "mtp_num_layers" in values:
        values["mtp_num_layers"] = len(model.mtp_layers) or None
    return McoreConfig(
        {name: value for name, value in values.items() if not name.startswith((_GPT, _ATTRIBUTES))},
        {name.removeprefix(_GPT): value for name, value in values.items() if name.startswith(_GPT)},
        {name.removeprefix(_ATTRIBUTES): value for name, value in values.items() if name.startswith(_ATTRIBUTES)},
    )


def to_hf_config(
    architecture: Architecture,
    transformer: Any,
    gpt: Mapping[str, Any],
    base: HfConfig,
    is_value: bool | None = None,
) -> dict[str, Any]:
    """The `config.json` of a megatron model: the one it came from, changed where the model differs.

    Fields that megatron has no counterpart for are kept. What already says the same is kept as it is. Where
    transformers 4 and 5 have different fields, both are written, since each takes defaults for what it does not find.

    Args:
        architecture: what the model is to be.
        transformer: a `TransformerConfig`, or its arguments as a mapping.
        gpt: arguments of `GPTModel`, as many as are known (`gpt_arguments` reads those of a live one); `vocab_size`
            is HuggingFace's, without padding.
        base: the source's `config.json`; may be empty if `transformer` and `gpt` say all.
        is_value: whether the model has a value head; None: as `base` says.

    Raises:
        UnsupportedError: the model has a feature that the architecture cannot express, by name.
    """
    config: dict[str, Any] = {**base, "model_type": architecture.model_type}
    for rule in architecture.rules:
        try:
            said = {name: value for name, value in rule.to_mcore(config).items() if name not in _OF_TRAINING}
            wanted = {name: _read(transformer, gpt, name, value) for name, value in said.items()}
        except MissingFieldError:
            said, wanted = None, {}
        # What a source leaves out, it leaves to transformers' defaults on purpose; without a source all is said: these
        # defaults are those of one size of model (DeepSeek's num_key_value_heads is 128).
        if said != wanted or not base:
            config.update(rule.to_hf(_Everything(transformer, gpt, wanted), config))
    _check_all_said(architecture, transformer, gpt, config)
    _spell_for_both_versions(architecture, config)
    _set_class(architecture, config, is_value)
    return config


def config_of_weights(model: HfModel, dtype: torch.dtype, has_mtp: bool) -> dict[str, Any]:
    """The `config.json` beside weights, for transformers 4 and 5; what else it said before, it says still.

    Args:
        model: what the weights are; its `config` is what was known before.
        dtype: of the weights.
        has_mtp: whether multi-token prediction is among them.

    Raises:
        UnsupportedError: it is a value model, and transformers has no class for that.
    """
    config = dict(model.config)
    _spell_for_both_versions(model.architecture, config)
    # transformers took up "dtype" in 4.56; it reads the older name still.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    # Without a table nothing is known of it, and all stays as it is.
    if model.architecture.table.layer:
        _set_class(model.architecture, config, model.is_value)
    if model.is_value:
        config.update(ONE_LABEL)
    if not has_mtp and config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    return config


# transformers counts labels by these.
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def gpt_arguments(model: Any) -> dict[str, Any]:
    """What a live `GPTModel` (unwrapped) shows of its arguments: without `vocab_size`, which is padded there."""
    found = {
        "position_embedding_type": getattr(model, "position_embedding_type", None),
        "rotary_base": getattr(model, "rotary_base", None),
        "rotary_percent": getattr(model, "rotary_percent", None),
        "rope_scaling": getattr(model, "rotary_scaling", None),
        "share_embeddings_and_output_weights": getattr(model, "share_embeddings_and_output_weights", None),
        "max_sequence_length": getattr(model, "max_sequence_length", None),
    }
    return {name: value for name, value in found.items() if value is not None}


# How a model is trained, not what it is.
_OF_TRAINING = {"attention_dropout", "hidden_dropout"}
# The vocabulary is padded in a live model, and whether the head is tied is asked apart.
_FREE = {
    *("params_dtype", "bf16", "fp16", *_OF_TRAINING),
    *("gpt.vocab_size", "gpt.max_sequence_length", "gpt.share_embeddings_and_output_weights"),
}
_FREE_OF_LATENT = {"kv_channels", "gpt.rotary_percent", "gpt.rotary_base"}


def check_model(model: Any, hf_model: HfModel) -> None:
    """Raises CheckpointMismatchError unless a live model is what a HuggingFace config describes.

    Args:
        model: an unwrapped `GPTModel`, or another module with megatron's `config`. What it does not show (a
            pipeline stage without embedding has no vocabulary) is not compared; multi-token prediction may be left out.
        hf_model: from `model_from_config`.
    """
    wanted = to_mcore_config(hf_model)
    gpt = gpt_arguments(model)
    free = _FREE | _FREE_OF_LATENT if wanted.transformer.get("multi_latent_attention") else _FREE
    flat = {**wanted.transformer, **{_ATTRIBUTES + n: v for n, v in wanted.attributes.items()}}
    flat |= {_GPT + name: value for name, value in wanted.gpt.items()}
    for name, value in flat.items():
        if name in free:
            continue
        found = _read(model.config, gpt, name, value)
        if name == "mtp_num_layers" and not found:
            continue
        if found != value:
            raise CheckpointMismatchError(
                f"the model's {_plain(name)} is {found!r}, config.json of this "
                f"{hf_model.describe()} says {value!r}: build the model with "
                "mcore_ckpt.models.to_mcore_config, or load what it was built for"
            )
    if model.share_embeddings_and_output_weights != hf_model.is_tied and not hf_model.is_value:
        raise CheckpointMismatchError(
            f"the model's share_embeddings_and_output_weights is {model.share_embeddings_and_output_weights}, "
            f"tie_word_embeddings of this {hf_model.describe()} is {hf_model.is_tied}"
        )


def _plain(name: str) -> str:
    return name.removeprefix(_GPT).removeprefix(_ATTRIBUTES)


def _values(architecture: Architecture, config: HfConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for rule in architecture.rules:
        try:
            values.update(rule.to_mcore(config))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"config.json: cannot be that of a {architecture.model_type} ({type(rule).__name__}): {error!r}"
            ) from error
    return values


class _Everything(dict[str, Any]):
    """Megatron's values by name, read when they are asked for."""

    def __init__(self, transformer: Any, gpt: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._transformer, self._gpt = transformer, gpt

    def __missing__(self, name: str) -> Any:
        value = _read(self._transformer, self._gpt, name, _absent)
        if value is _absent:
            raise UnsupportedError(f"{_plain(name)} is not known, and config.json does not say it")
        return value


_absent = object()


def _read(transformer: Any, gpt: Mapping[str, Any], name: str, default: Any) -> Any:
    """A value of the megatron model in the form that rules have; `default` if the model does not show it."""
    if name.startswith(_GPT):
        value = gpt.get(name.removeprefix(_GPT), _absent)
    else:
        value = _field(transformer, name.removeprefix(_ATTRIBUTES))
    if value is _absent:
        return default
    form = _FORMS.get(name)
    return value if form is None else form(transformer, value)


def _field(transformer: Any, name: str) -> Any:
    if isinstance(transformer, Mapping):
        return transformer.get(name, _absent)
    return getattr(transformer, name, _absent)


def _moe_layer_freq(transformer: Any, freq: Any) -> Any:
    if isinstance(freq, int):
        freq = [int(number % freq == 0) for number in range(_field(transformer, "num_layers"))]
    return 1 if all(freq) else list(freq)


def _linear_attention_freq(transformer: Any, freq: Any) -> Any:
    if isinstance(freq, int):
        freq = [int((number + 1) % freq != 0) for number in range(_field(transformer, "num_layers"))]
    return freq if freq is None else list(freq)


def _window_attn_skip_freq(transformer: Any, freq: Any) -> Any:
    if isinstance(freq, int):
        freq = [int((number + 1) % freq != 0) for number in range(_field(transformer, "num_layers"))]
    return None if freq is None or _field(transformer, "window_size") is None or all(freq) else list(freq)


def _params_dtype(transformer: Any, dtype: Any) -> Any:
    import torch

    # params_dtype stays float32 in a model that is cast after it was built (Float16Module, 0.16.1).
    flags = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((to for flag, to in flags.items() if _field(transformer, flag) is True), dtype)


def _window_size(transformer: Any, size: Any) -> Any:
    return None if size is None else tuple(size)


# One form of what can be said in several (get_gpt_decoder_layer_specs, is_layer_window_attention, 0.16.1).
_FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "moe_layer_freq": _moe_layer_freq,
    "linear_attention_freq": _linear_attention_freq,
    "window_attn_skip_freq": _window_attn_skip_freq,
    "window_size": _window_size,
    "params_dtype": _params_dtype,
}


def _check_all_said(architecture: Architecture, transformer: Any, gpt: Mapping[str, Any], config: HfConfig) -> None:
    for name, said in _values(architecture, config).items():
        found = _read(transformer, gpt, name, said)
        if found != said and name not in _OF_TRAINING:
            raise UnsupportedError(
                f"{_plain(name)} is {found!r}, which a config.json of "
                f"{architecture.model_type} cannot say: there it is {said!r}"
            )


def _spell_for_both_versions(architecture: Architecture, config: dict[str, Any]) -> None:
    """Adds the fields of the other version of transformers: 4 takes a config without `rope_theta` for one with the
    default, or one of `num_local_experts` for one of 128 experts."""
    for rule in architecture.rules:
        try:
            if isinstance(rule, Same) and rule.also:
                config.update(rule.to_hf(rule.to_mcore(config), config))
            elif hasattr(rule, "spelling"):
                for name, value in rule.spelling(config).items():
                    config.setdefault(name, value)
        except UnsupportedError:
            # What megatron has no word for stays as its author has spelled it.
            continue


def _set_class(architecture: Architecture, config: dict[str, Any], is_value: bool | None) -> None:
    classes = list(config.get("architectures") or ())
    had_value_head = bool(classes) and not any(name.endswith("ForCausalLM") for name in classes)
    if classes and (is_value is None or is_value == had_value_head):
        return
    ending = "ForTokenClassification" if is_value else "ForCausalLM"
    wanted = [name for name in architecture.classes if name.endswith(ending)]
    if not wanted:
        raise UnsupportedError(f"{architecture.model_type} has no class ...{ending} in transformers")
    config["architectures"] = wanted[:1]
    if is_value:
        config.update(ONE_LABEL)
