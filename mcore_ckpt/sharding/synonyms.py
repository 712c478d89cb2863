"""Lists the names that a tensor has under megatron's different layer specs and versions (megatron-core 0.16 to 0.19).

The local spec and the transformer-engine spec put some tensors into different modules. Versions of megatron and classes
of models give some modules different names. A checkpoint has a tensor's canonical name, which no version changes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from mcore_ckpt.sharding.towers import split_language_model, under_other_root

# The local spec has separate norms. The transformer-engine spec fuses each norm with the linear layer that follows it
# (`TELayerNormColumnParallelLinear`, gpt_layer_specs.py).
_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
    # The norm before linear attention (get_gated_delta_net_module_spec).
    ("input_layernorm.", "self_attention.in_proj.layer_norm_"),
    # The norm before a Mamba mixer (hybrid_layer_specs.py).
    ("norm.", "mixer.in_proj.layer_norm_"),
    # In heterogeneous models, one linear layer can replace attention or an MLP (heterogeneous_layer_specs.py).
    ("input_layernorm.", "self_attention.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.layer_norm_"),
)
_NORM = r"(.*\blayers\.\d+\.(?:.*\.)?)(%s)(weight|bias)"
_FORWARD = re.compile(_NORM % "|".join(re.escape(local) for local, _ in _NORMS))
_BACKWARD = re.compile(_NORM % "|".join(re.escape(fused) for _, fused in _NORMS))
_LOCAL = {fused: local for local, fused in _NORMS}

# Modules whose names differ between versions or models. The canonical name is the key in megatron's own checkpoints.
_CANONICAL = (
    # The module that holds the layer for one depth of multi-token prediction. megatron-core 0.17 renamed this module
    # (MultiTokenPredictionLayer). In a HybridModel the module is a stack of layers, and has always had the newer name.
    (
        re.compile(r"((?:.*\.)?mtp\.layers\.\d+\.)mtp_model_layer\.(?!layers\.|final_norm\.)(.+)"),
        r"\1transformer_layer.\2",
    ),
    # The convolution of a MambaMixer was a module until 0.18, and has been a parameter of the mixer since 0.19.
    (re.compile(r"((?:.*\.)?mixer\.)conv1d_(weight|bias)"), r"\1conv1d.\2"),
)
# The last norm: GPTModel calls it `final_layernorm`, MambaModel and HybridModel call it `final_norm`. A checkpoint has
# the name that the saved model uses.
_LAST_NORMS = {
    f"decoder.{one}.{kind}": f"decoder.{other}.{kind}"
    for one, other in (("final_layernorm", "final_norm"), ("final_norm", "final_layernorm"))
    for kind in ("weight", "bias")
}

_SEQUENTIAL = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")


def canonical(name: str) -> str:
    """Returns the name that a tensor has in a checkpoint, whichever version of megatron names the tensor.

    Example:
        >>> canonical("decoder.layers.3.mixer.conv1d_weight")
        'decoder.layers.3.mixer.conv1d.weight'
        >>> canonical("mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight")
        'mtp.layers.0.transformer_layer.mlp.linear_fc1.weight'
    """
    for pattern, replacement in _CANONICAL:
        if match := pattern.fullmatch(name):
            return match.expand(replacement)
    return name


def synonyms(name: str) -> Iterator[str]:
    """Yields `name`, a global canonical name, and then the names of the same tensor under other layer specs.

    Example:
        >>> list(synonyms("decoder.layers.3.mlp.linear_fc1.layer_norm_weight"))[1]
        'decoder.layers.3.pre_mlp_layernorm.weight'
        >>> list(synonyms("decoder.layers.3.mlp.experts.linear_fc2.weight7"))[1]
        'decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight'
    """
    yield name
    if match := _FORWARD.fullmatch(name):
        yield from (f"{match[1]}{fused}{match[3]}" for local, fused in _NORMS if local == match[2])
    elif match := _SEQUENTIAL.fullmatch(name):
        yield f"{match[1]}.{match[3]}.{match[4]}{match[2]}"
    elif (local := in_local_spec(name)) != name:
        yield local
    else:
        prefix, rest = split_language_model(name)
        if rest in _LAST_NORMS:
            yield prefix + _LAST_NORMS[rest]


def in_local_spec(name: str) -> str:
    """Returns the name that a tensor has under megatron's local layer specs.

    Example:
        >>> in_local_spec("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
        'decoder.layers.3.input_layernorm.weight'
        >>> in_local_spec("decoder.layers.3.input_layernorm.weight")
        'decoder.layers.3.input_layernorm.weight'
    """
    if match := _BACKWARD.fullmatch(name):
        return f"{match[1]}{_LOCAL[match[2]]}{match[3]}"
    if match := _GROUPED.fullmatch(name):
        return f"{match[1]}.local_experts.{match[4]}.{match[2]}.{match[3]}"
    return name


def found_as(name: str, names: Container[str]) -> str | None:
    """Returns `name` or the first of its synonyms that is in `names`. Returns None if `names` has none of them.

    The synonyms include names under another program's prefix, so a GPTModel finds its tensors in the checkpoint of a
    vision-language model.

    Example:
        >>> found_as("decoder.final_norm.weight", {"language_model.decoder.final_layernorm.weight"})
        'language_model.decoder.final_layernorm.weight'
    """
    other = under_other_root(name)
    roots = (name,) if other is None else (name, other)
    return next((synonym for root in roots for synonym in synonyms(root) if synonym in names), None)
