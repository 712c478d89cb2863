"""Translates `config.json` to the arguments of megatron's `TransformerConfig` and model class, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, HfModel
from mcore_ckpt.models.config_fields import MTP_FIELDS, HfConfig, MissingFieldError, Same, factor_or_none

if TYPE_CHECKING:
    import torch

_GPT = "gpt."
_PATTERN = "gpt.hybrid_layer_pattern"
_ATTRIBUTES = "attributes."
_FIELDS = "__dataclass_fields__"


@dataclass(frozen=True)
class McoreConfig:
    """The arguments from which megatron builds a model.

    Attributes:
        transformer: arguments of `TransformerConfig`, or of `MLATransformerConfig` if `multi_latent_attention` is among
            them. Arguments for training and parallelism are not included.
        gpt: arguments of `GPTModel`, or of `HybridModel` if `hybrid_layer_pattern` is among them. `vocab_size` is
            HuggingFace's, without padding. `hybrid_layer_pattern` does not divide the layers into pipeline stages.
        attributes: attributes to set on the `TransformerConfig`. `GPTModel` reads these attributes, although
            `TransformerConfig` does not declare them as fields (Yarn's parameters, 0.16.1).
    """

    transformer: dict[str, Any]
    gpt: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments and attributes of the `TransformerConfig` in one dict."""
        return {**self.transformer, **self.attributes}

    def transformer_config(self, **more: Any) -> Any:
        """Builds megatron's config. `more` are the arguments for training and parallelism.

        Raises:
            UnsupportedError: this version of megatron-core lacks an argument that the model needs.
        """
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        kind = MLATransformerConfig if self.transformer.get("multi_latent_attention") else TransformerConfig
        check_known(self.transformer, kind)
        config = kind(**{**self.transformer, **more})
        for name, value in self.attributes.items():
            setattr(config, name, value)
        return config


def to_mcore_config(model: HfModel) -> McoreConfig:
    """Returns the megatron arguments of a HuggingFace model.

    Raises:
        UnsupportedError: the architecture has no rules, or a field of the model's `config.json` requires something that
            megatron-core 0.16.1 cannot do.

    Example:
        >>> config = to_mcore_config(model_from_config(read_config(folder)))  # doctest: +SKIP
        >>> model = GPTModel(config.transformer_config(tensor_model_parallel_size=2), spec, **config.gpt)
    """
    import torch

    if not model.architecture.rules:
        raise UnsupportedError(
            f"the architecture {model.architecture.model_type} was registered without rules for config.json: add rules "
            "to its mcore_ckpt.models.Architecture"
        )
    values = _values(model.architecture, model.language_config)
    values["gpt.share_embeddings_and_output_weights"] = model.is_tied
    values["gpt.vocab_size"] = model.sizes["vocab"]
    values |= {"bf16": values["params_dtype"] is torch.bfloat16, "fp16": values["params_dtype"] is torch.float16}
    if "mtp_num_layers" in values or model.mtp_layers:
        values["mtp_num_layers"] = model.mtp_depths or None
    if _PATTERN in values and not model.mtp_layers:
        values[_PATTERN] = values[_PATTERN].partition("/")[0]  # without the depths of multi-token prediction
    return McoreConfig(
        {name: value for name, value in values.items() if not name.startswith((_GPT, _ATTRIBUTES))},
        {name.removeprefix(_GPT): value for name, value in values.items() if name.startswith(_GPT)},
        {name.removeprefix(_ATTRIBUTES): value for name, value in values.items() if name.startswith(_ATTRIBUTES)},
    )


def to_hf_config(
    architecture: Architecture, transformer: Any, gpt: Mapping[str, Any], base: HfConfig, is_value: bool | None = None
) -> dict[str, Any]:
    """Returns the `config.json` of a megatron model: `base`, changed where `base` does not describe the model.

    Two kinds of fields of `base` stay: fields without a counterpart in megatron, and fields that already describe the
    model. If transformers 4 and 5 use different fields for a value, the result has both fields, because each version
    assumes a default for a field that it does not find.

    Args:
        architecture: the HuggingFace architecture of the result.
        transformer: a `TransformerConfig`, or its arguments as a mapping.
        gpt: the known arguments of `GPTModel`, which `gpt_arguments` reads from a live model. `vocab_size` is
            HuggingFace's, without padding.
        base: the `config.json` to start from. `base` can be empty if `transformer` and `gpt` describe the model
            completely. These two arguments never describe a vision tower, so a tower's fields (`vision_config`) must be
            in `base`.
        is_value: whether the model has a value head; None if `base` decides.

    Raises:
        UnsupportedError: the model has a feature that the architecture cannot express. The message names the feature.
    """
    if _field(transformer, "is_hybrid_model") is True and not architecture.table.is_hybrid:
        raise UnsupportedError(
            "is_hybrid_model is True, but num_layers of a HybridModel counts attention and MLP as separate layers: "
            "pass the TransformerConfig of the GPTModel with the same layers"
        )
    whole: dict[str, Any] = {**base, "model_type": architecture.model_type}
    config, has_base = dict(architecture.language_config(whole)), bool(architecture.language_config(base))
    for rule in architecture.rules:
        try:
            stated = {name: value for name, value in rule.to_mcore(config).items() if name not in _TRAINING_FIELDS}
            wanted = {name: _read(transformer, gpt, name, value) for name, value in stated.items()}
        except MissingFieldError:
            stated, wanted = None, {}
        # For a field that `base` omits, transformers uses a default. If this default describes the model, the field is
        # not added. Without a `base` every field is written, because transformers' defaults describe only one size of a
        # model (DeepSeek's num_key_value_heads is 128).
        if stated != wanted or not has_base:
            config.update(rule.to_hf(_McoreValues(transformer, gpt, wanted), config))
    _check_expressed(architecture, transformer, gpt, config)
    _spell_for_both_versions(architecture, config)
    _set_class(architecture, config, is_value)
    return architecture.with_language_config(whole, config)


def config_of_weights(model: HfModel, dtype: torch.dtype, has_mtp: bool) -> dict[str, Any]:
    """Returns the `config.json` to write with exported weights, for transformers 4 and 5.

    The result is `model.config` with two kinds of changes. Fields that must match the weights are set: dtype, class,
    labels, multi-token prediction. Fields that only one version of transformers reads are added.

    Args:
        has_mtp: whether multi-token prediction is among the weights.

    Raises:
        UnsupportedError: transformers has no class of the required kind (value model or language model) for the
            architecture.
    """
    config = dict(model.language_config)
    _spell_for_both_versions(model.architecture, config)
    # Keep the field that the config has: transformers 4.56 introduced "dtype", and still reads "torch_dtype".
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    # The classes of an architecture without a table are unknown, so the class stays as it is.
    if model.architecture.table.layer:
        _set_class(model.architecture, config, model.is_value)
    if model.is_value:
        config.update(ONE_LABEL)
    if not has_mtp:
        config.update({name: 0 for name in MTP_FIELDS if config.get(name)})
    return model.architecture.with_language_config(model.config, config)


# transformers derives the number of labels from these fields, and the size of the head from this number.
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def gpt_arguments(model: Any) -> dict[str, Any]:
    """Reads the arguments that a live, unwrapped `GPTModel` or `HybridModel` exposes.

    The result leaves out `vocab_size`, which is padded. If the model is a vision-language model, pass its
    `language_model`.
    """
    found = {name: getattr(model, name, None) for name in _EXPOSED} | {
        "rope_scaling": getattr(model, "rotary_scaling", None),
        "seq_len_interpolation_factor": getattr(
            getattr(model, "rotary_pos_emb", None), "seq_len_interpolation_factor", None
        ),
    }
    return {name: value for name, value in found.items() if value is not None}


# The arguments that a model keeps under their own names.
_EXPOSED = (
    *("position_embedding_type", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights"),
    *("max_sequence_length", "hybrid_layer_pattern"),
)


# These fields describe the training, not the model. The last field turns on a rotation of queries and keys, which
# changes none of their products.
_TRAINING_FIELDS = {"attention_dropout", "hidden_dropout", "dsa_indexer_rotate_activation"}


def check_known(names: Iterable[str], config: Any) -> None:
    """Raises UnsupportedError if `config`, an object or a class, lacks a field with one of these names."""
    if missing := [name for name in names if not hasattr(config, name) and name not in getattr(config, _FIELDS, ())]:
        raise UnsupportedError(
            f"this version of megatron-core has no {missing[0]}, but the model needs this field: install megatron-core "
            "0.19 or newer"
        )


def _without_prefix(name: str) -> str:
    return name.removeprefix(_GPT).removeprefix(_ATTRIBUTES)


def _values(architecture: Architecture, config: HfConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for rule in architecture.rules:
        try:
            values.update(rule.to_mcore(config))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"config.json: does not describe a {architecture.model_type} (rule {type(rule).__name__}): {error!r}"
            ) from error
    return values


class _McoreValues(dict[str, Any]):
    """Megatron's values by name. A value that is not known yet is read from the model when a rule needs the value."""

    def __init__(self, transformer: Any, gpt: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._transformer, self._gpt = transformer, gpt

    def __missing__(self, name: str) -> Any:
        value = _read(self._transformer, self._gpt, name, _absent)
        if value is _absent:
            raise UnsupportedError(
                f"{_without_prefix(name)} of the model is not known, and config.json does not state this value: pass "
                "the value to to_hf_config"
            )
        return value


_absent = object()


def _read(transformer: Any, gpt: Mapping[str, Any], name: str, default: Any) -> Any:
    """Reads a value of the megatron model, in the form that rules use. Returns `default` if the value is missing."""
    if name.startswith(_GPT):
        value = gpt.get(name.removeprefix(_GPT), _absent)
    else:
        value = _field(transformer, name.removeprefix(_ATTRIBUTES))
    if value is _absent:
        return default
    normalize = _NORMAL_FORMS.get(name)
    return value if normalize is None else normalize(transformer, value)


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
    layers = _linear_attention_freq(transformer, freq)
    return None if layers is None or _field(transformer, "window_size") is None or all(layers) else layers


def _params_dtype(transformer: Any, dtype: Any) -> Any:
    import torch

    # The flags count first, because params_dtype stays float32 in a model that is cast after it was built
    # (Float16Module, 0.16.1).
    flags = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((to for flag, to in flags.items() if _field(transformer, flag) is True), dtype)


# megatron accepts several forms of these values (get_gpt_decoder_layer_specs, is_layer_window_attention, 0.16.1), but
# rules know only one form of each value. Before values are compared, these functions convert each value to the form
# that the rules know.
_NORMAL_FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "moe_layer_freq": _moe_layer_freq,
    "linear_attention_freq": _linear_attention_freq,
    "window_attn_skip_freq": _window_attn_skip_freq,
    "window_size": lambda _, size: None if size is None else tuple(size),
    "params_dtype": _params_dtype,
    "dsa_indexer_k_norm_epsilon": lambda config, size: _field(config, "layernorm_epsilon") if size is None else size,
    "moe_router_topk_scaling_factor": lambda _, factor: factor_or_none(factor),
    _PATTERN: lambda _, pattern: None if pattern is None else pattern.replace("|", ""),
}


def _check_expressed(architecture: Architecture, transformer: Any, gpt: Mapping[str, Any], config: HfConfig) -> None:
    """Raises UnsupportedError if `config` does not describe the megatron model."""
    for name, stated in _values(architecture, config).items():
        found = _read(transformer, gpt, name, stated)
        if found != stated and name not in _TRAINING_FIELDS:
            raise UnsupportedError(
                f"{_without_prefix(name)} is {found!r}, but a config.json of {architecture.model_type} cannot express "
                f"this value: a model from the config.json would have {stated!r}"
            )


def _spell_for_both_versions(architecture: Architecture, config: dict[str, Any]) -> None:
    """Adds the fields that only transformers 4 or only transformers 5 reads.

    A version that does not find its field would use a default.
    """
    for rule in architecture.rules:
        try:
            if isinstance(rule, Same) and rule.also:
                config.update(rule.to_hf(rule.to_mcore(config), config))
            elif hasattr(rule, "spelling"):
                for name, value in rule.spelling(config).items():
                    config.setdefault(name, value)
        except UnsupportedError:
            # If megatron cannot express a value, add no field: the value stays in the fields that the config already
            # has.
            continue


# The class names of language models and of vision-language models end with these texts.
_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration")


def _set_class(architecture: Architecture, config: dict[str, Any], is_value: bool | None) -> None:
    classes = list(config.get("architectures") or ())
    had_value_head = bool(classes) and not any(name.endswith(_LANGUAGE_MODELS) for name in classes)
    if classes and (is_value is None or is_value == had_value_head):
        return
    ending = ("ForTokenClassification",) if is_value else _LANGUAGE_MODELS
    wanted = [name for name in architecture.classes if name.endswith(ending)]
    if not wanted:
        raise UnsupportedError(f"transformers has no class ...{ending[0]} for {architecture.model_type}")
    config["architectures"] = wanted[:1]
    if is_value:
        config.update(ONE_LABEL)
