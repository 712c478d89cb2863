"""What megatron's `sharded_state_dict` calls a tensor, with default metadata (megatron-core 0.16.1), by rules.

`TransformerBlock.sharded_state_dict`: layers that are alike share a key, with an axis of layers before the tensor's
own; otherwise the layer's number is in the key. Experts share a key below `experts.experts`, with an axis of experts
(`SequentialMLP`, `TEGroupedMLP`); multi-token prediction has no axis of layers (`MultiTokenPredictionBlock`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from mcore_ckpt.sharding.regions import Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.)?mlp\.experts\.local_experts\.(\d+)\.(.+)")
_IN_LAYER = re.compile(r"((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)(.+)")
_LATENT = "self_attention.linear_kv_up_proj.weight"
_LINEAR = "self_attention.in_proj.weight"
_ROUTER = "mlp.router.weight"

# Modules with weights, but without `_extra_state` (of the output layer GPTModel takes it away).
_STATELESS = re.compile(
    r"(?:embedding\.|output_layer\.|.*\.router\.|.*\.conv1d\.|.*\.gate_weight$|.*\.layer_norm_(?:weight|bias)$)"
)
_MODULE = re.compile(r"(.+)\.(?:weight|bias|softmax_offset)")
_MTP_ATTENTION = re.compile(r"(mtp\..+\.self_attention\.)linear_proj\.weight")


@dataclass(frozen=True)
class Place:
    """A tensor's place below a key: the index in the axes before its own, and their lengths."""

    key: str
    index: Shape
    lengths: Shape

    @property
    def object_key(self) -> str:
        """Of a sharded object in this place (`ShardedObject.unique_key`)."""
        index, lengths = (self.index, self.lengths) if self.index else ((0,), (1,))
        return f"{self.key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lengths))}"


class Keys:
    """The keys of one model's tensors.

    Args:
        names: all its tensors, as the local layer specs call them.
        layers: how many decoder layers there are.
        experts: how many experts a layer of experts has.
        alike: whether all decoder layers are made alike.
    """

    def __init__(self, names: Container[str], layers: int, experts: int, alike: bool) -> None:
        self._names = names
        self._layers = layers
        self._experts = experts
        self._alike = alike

    def places(self, name: str) -> list[Place]:
        """Where a tensor goes: in two places where layer specs disagree about a norm."""
        return [self._place(key) for key in self._in_specs(name)]

    def states(self, name: str) -> Iterator[Place]:
        """The places of the `_extra_state` of the modules that have a tensor: megatron asks for all of them."""
        for key in self._in_specs(name):
            if (match := _MODULE.fullmatch(key)) and not _STATELESS.match(key):
                yield self._place(f"{match[1]}._extra_state")
        # transformer-engine's attention keeps quiet about its own (`TEDotProductAttention.sharded_state_dict`), but
        # `MultiTokenPredictionBlock.sharded_state_dict` also takes whatever is in `state_dict()`.
        if match := _MTP_ATTENTION.fullmatch(name):
            yield self._place(f"{match[1]}core_attention._extra_state")

    def _in_specs(self, name: str) -> tuple[str, ...]:
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return (name,)
        layer, rest = match.groups()
        is_latent, is_moe = layer + _LATENT in self._names, layer + _ROUTER in self._names
        module, _, kind = rest.rpartition(".")
        if module == "input_layernorm" and layer + _LINEAR in self._names:
            # There is a spec of transformer-engine's alone (`get_gated_delta_net_module_spec`).
            return (f"{layer}self_attention.in_proj.layer_norm_{kind}",)
        if module == "input_layernorm" and not is_latent:
            # Both specs: fused, or renamed by the layer's `sharded_state_dict_keys_map`.
            return (f"{layer}self_attention.linear_qkv.layer_norm_{kind}",)
        if module == "pre_mlp_layernorm":
            fused = f"{layer}mlp.linear_fc1.layer_norm_{kind}"
            if is_latent:
                # The local spec renames nothing here.
                return (name,) if is_moe else (name, fused)
            return (name, fused) if is_moe else (fused,)
        if is_latent and module in ("self_attention.q_layernorm", "self_attention.kv_layernorm"):
            which = module.removeprefix("self_attention.").removesuffix("_layernorm")
            return (name, f"{layer}self_attention.linear_{which}_up_proj.layer_norm_{kind}")
        return (name,)

    def _place(self, name: str) -> Place:
        key, index, lengths = name, list[int](), list[int]()
        if self._alike and (match := _LAYER.fullmatch(key)):
            key = f"decoder.layers.{match[2]}"
            index.append(int(match[1]))
            lengths.append(self._layers)
        if match := _EXPERT.fullmatch(key):
            key = f"{match[1] or ''}mlp.experts.experts.{match[3]}"
            index.append(int(match[2]))
            lengths.append(self._experts)
        return Place(key, tuple(index), tuple(lengths))
