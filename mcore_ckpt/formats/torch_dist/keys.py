"""Translates tensors' names to keys of megatron's `sharded_state_dict` with default metadata (megatron-core 0.16.1).

- `TransformerBlock.sharded_state_dict`: if all layers have the same structure, they share a key, and the stored tensor
  has an axis of layers in front. Otherwise the key contains the layer's number.
- `SequentialMLP`, `TEGroupedMLP`: experts share a key below `experts.experts`, and the stored tensor has an axis of
  experts.
- `MultiTokenPredictionBlock`: layers of multi-token prediction share no keys.
- `HybridStack` (0.18): layers share no keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mcore_ckpt.models.table import MCORE_HEAD
from mcore_ckpt.sharding.regions import Shape

_LAYER = re.compile(r"((?:language_model\.)?decoder\.layers\.)(\d+)\.(.+)")
# In a vision tower of megatron's modules, all layers share keys, because they are alike. In the same way, all mergers
# of Qwen3-VL's tower share keys.
_IN_TOWER = re.compile(r"(vision_model\.decoder\.(?:layers|deepstack_merger_list)\.)(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.)?mlp\.experts\.local_experts\.(\d+)\.(.+)")
_IN_LAYER = re.compile(
    r"((?:language_model\.)?(?:decoder|mtp)\.layers\.\d+\."
    r"(?:transformer_layer\.|mtp_model_layer\.layers\.\d+\.)?)(.+)"
)
_TOWER_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
_LATENT = "self_attention.linear_kv_up_proj.weight"
_LINEAR = "self_attention.in_proj.weight"
_ROUTER = "mlp.router.weight"
# The last norm of a HybridModel. `_HYBRID_NORMS` maps the norms in the model's layers to the modules that follow them.
_HYBRID_NORM = "decoder.final_norm.weight"
_HYBRID_NORMS = {
    "norm": "mixer.in_proj",
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
}

# Tensors of modules that have weights but no `_extra_state`. GPTModel removes the `_extra_state` of the output layer.
_STATELESS = re.compile(
    r"(?:(?:language_model\.)?(?:embedding|output_layer)\.|visual\.|vision_model\.(?:patch|pos)_embed\."
    r"|.*\.router\.|.*\.conv1d\.|.*\.mixer\.norm\.|.*\.gate_weight$|.*\.layer_norm_(?:weight|bias)$)"
)
_MODULE = re.compile(r"(.+)\.(?:weight|bias|softmax_offset)")
_MTP_ATTENTION = re.compile(r"((?:language_model\.)?mtp\..+\.self_attention\.)linear_proj\.weight")


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a stored tensor.

    Attributes:
        index: the tensor's index along the axes of layers and experts, which the stored tensor has in front.
        lengths: the lengths of these axes.
    """

    key: str
    index: Shape
    lengths: Shape

    @property
    def object_key(self) -> str:
        """The key of a sharded object at this place (`ShardedObject.unique_key`)."""
        index, lengths = (self.index, self.lengths) if self.index else ((0,), (1,))
        return f"{self.key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, lengths))}"


class Keys:
    """Translates the names of one model's tensors to the keys of a torch_dist checkpoint.

    Args:
        names: the names of all tensors of the model in the local layer specs.
        alike: True if all decoder layers have the same structure.
    """

    def __init__(self, names: Collection[str], layers: int, experts: int, alike: bool) -> None:
        self._names = names
        self._in_tower: dict[str, int] = {}
        for match in filter(None, map(_IN_TOWER.fullmatch, names)):
            self._in_tower[match[1]] = max(self._in_tower.get(match[1], 0), int(match[2]) + 1)
        self._layers = layers
        self._experts = experts
        self._alike = alike
        self._is_hybrid = _HYBRID_NORM in names

    def places(self, name: str) -> list[Place]:
        """Returns the places of a tensor: two for a norm whose key differs between megatron's layer specs, else one."""
        return [self.place(key) for key in self._in_specs(name)]

    def states(self, name: str) -> Iterator[Place]:
        """Yields the place of each `_extra_state` that megatron requires for the modules that hold a tensor."""
        for key in self._in_specs(name):
            # HybridModel keeps the `_extra_state` of the output layer (0.19).
            has_state = not _STATELESS.match(key) or (self._is_hybrid and key == MCORE_HEAD)
            if has_state and (match := _MODULE.fullmatch(key)):
                yield self.place(f"{match[1]}._extra_state")
        # transformer-engine's attention leaves out its own state (`TEDotProductAttention.sharded_state_dict`), but
        # `MultiTokenPredictionBlock.sharded_state_dict` includes everything in `state_dict()`.
        if match := _MTP_ATTENTION.fullmatch(name):
            yield self.place(f"{match[1]}core_attention._extra_state")

    def _in_specs(self, name: str) -> tuple[str, ...]:
        if match := _IN_TOWER.fullmatch(name):
            module, _, kind = match[3].rpartition(".")
            # transformer-engine's spec fuses these norms, and the local spec does not rename them (`vit_layer_specs`).
            # So each of these norms has two names.
            fused = _TOWER_NORMS.get(module)
            return (name,) if fused is None else (name, f"{match[1]}{match[2]}.{fused}.layer_norm_{kind}")
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return (name,)
        layer, rest = match.groups()
        is_latent, is_moe = layer + _LATENT in self._names, layer + _ROUTER in self._names
        module, _, kind = rest.rpartition(".")
        if self._is_hybrid and module in _HYBRID_NORMS:
            # megatron's only spec for HybridModel uses transformer-engine, and fuses the norms of layers without
            # experts. A spec of local layers would not fuse these norms. So the norm of a layer without experts has two
            # names.
            return (name,) if is_moe else (name, f"{layer}{_HYBRID_NORMS[module]}.layer_norm_{kind}")
        if module == "input_layernorm" and layer + _LINEAR in self._names:
            # Only transformer-engine has a spec for this module (`get_gated_delta_net_module_spec`), so the norm has
            # only the fused name.
            return (f"{layer}self_attention.in_proj.layer_norm_{kind}",)
        if module == "input_layernorm" and not is_latent:
            # transformer-engine's spec fuses the norm, and the local spec renames the norm
            # (`sharded_state_dict_keys_map`). So both specs use one name.
            return (f"{layer}self_attention.linear_qkv.layer_norm_{kind}",)
        if module == "pre_mlp_layernorm":
            fused = f"{layer}mlp.linear_fc1.layer_norm_{kind}"
            if is_latent:
                # The local spec does not rename this norm, so the norm has two names if transformer-engine's spec fuses
                # it.
                return (name,) if is_moe else (name, fused)
            return (name, fused) if is_moe else (fused,)
        if is_latent and module in ("self_attention.q_layernorm", "self_attention.kv_layernorm"):
            which = module.removeprefix("self_attention.").removesuffix("_layernorm")
            return (name, f"{layer}self_attention.linear_{which}_up_proj.layer_norm_{kind}")
        return (name,)

    def place(self, name: str) -> Place:
        """Returns the place of a tensor. Its key is `name` without the numbers that become axes (layers, experts)."""
        key, index, lengths = name, list[int](), list[int]()
        if match := _IN_TOWER.fullmatch(key):
            key = match[1] + match[3]
            index.append(int(match[2]))
            lengths.append(self._in_tower[match[1]])
        elif self._alike and (match := _LAYER.fullmatch(key)):
            key = match[1] + match[3]
            index.append(int(match[2]))
            lengths.append(self._layers)
        if match := _EXPERT.fullmatch(key):
            key = f"{match[1] or ''}mlp.experts.experts.{match[3]}"
            index.append(int(match[2]))
            lengths.append(self._experts)
        return Place(key, tuple(index), tuple(lengths))
