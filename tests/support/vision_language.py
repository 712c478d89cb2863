"""Vision-language models as Megatron-Bridge and mbridge compose them, small enough for a CPU.

Real: megatron's GPTModel, TransformerBlock, its layers and its parallel linear layers; transformers' vision tower.
Stood in for: the module around them, the modules that Bridge has of its own (patch embedding, mergers), with Bridge's
names of parameters, and how an image gets into the sequence: its features take the place of the first embeddings, and
those of the inner layers (Qwen3-VL's "deepstack") are added to them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

# A tower of the tests, as `vision_config` describes it: 16 patches of an image, of which 4 are merged into one token.
SIDE = 4
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
TOWER_2_5 = {**TOWER, "hidden_act": "silu", "fullatt_block_indexes": [1], "window_size": 8, "tokens_per_second": 2}
TOWER_3 = {
    **TOWER,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": SIDE**2,
    "deepstack_visual_indexes": [0, 2],
}


class VisionLanguageModel(MegatronModule):
    """A tower on the first stage, and a part of a GPTModel on each.

    Args:
        config: the language model's.
        language_model: this stage's part of the language model.
        tower: the tower, on the first stage.
        name: the attribute that holds the tower: `visual` or `vision_model`.
    """

    def __init__(self, config: Any, language_model: Any, tower: torch.nn.Module | None, name: str) -> None:
        super().__init__(config=config)
        self.pre_process, self.post_process = language_model.pre_process, language_model.post_process
        self.vp_stage, self.model_type = language_model.vp_stage, language_model.model_type
        self._name = name
        if tower is not None:
            setattr(self, name, tower)
        self.language_model = language_model
        self.share_embeddings_and_output_weights = language_model.share_embeddings_and_output_weights
        self.shared_embedding_or_output_weight = language_model.shared_embedding_or_output_weight
        self.makes_images = False

    @property
    def tower(self) -> Any:
        return getattr(self, self._name)

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, **more: Any) -> Any:
        """`positions` are those of text. With `makes_images`, each sequence begins with an image made of its tokens."""
        embeddings = None
        if self.pre_process:
            embeddings = self.language_model.embedding(input_ids=tokens, position_ids=None).clone()
        if self.pre_process and self.makes_images:
            for number, image in enumerate(images_of(tokens, embeddings.dtype)):
                features = features_of(self.tower, image)
                embeddings[: len(features), number] = features
        if self.pre_process and self.config.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings)
        return self.language_model(None, positions.expand(3, *positions.shape), mask, decoder_input=embeddings, **more)


def images_of(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Images that depend on tokens: [batch, patches, values of a patch]."""
    values = TOWER["in_channels"] * TOWER["temporal_patch_size"] * TOWER["patch_size"] ** 2
    patches = torch.arange(SIDE**2)[:, None] * values + torch.arange(values)
    return torch.sin(patches + tokens.float().mean(dim=1)[:, None, None]).to(dtype)


def features_of(tower: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    """What a tower makes of an image, with the features of its inner layers added: [merged patches, hidden]."""
    if isinstance(tower, MegatronTower):
        features, inner = tower(image)
        return features + sum(inner)
    found = tower(image, grid_thw=torch.tensor([[1, SIDE, SIDE]]))
    features: torch.Tensor = found.pooler_output
    for each in getattr(found, "deepstack_features", None) or ():
        features = features + each
    return features


def transformers_tower(model_type: str, vision: Mapping[str, Any]) -> torch.nn.Module:
    """The vision tower of transformers, from a `vision_config`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    fields = {name: value for name, value in vision.items() if name not in ("model_type", "dtype")}
    config = AutoConfig.for_model(model_type, vision_config=fields, text_config=_SMALL_TEXT)
    config.vision_config._attn_implementation = "eager"
    tower: torch.nn.Module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").model.visual
    return tower


_SMALL_TEXT = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tower_of(kind: str, model_type: str, vision: Mapping[str, Any], language: Any, norm: type) -> torch.nn.Module:
    """A tower of modules of "transformers" or of "megatron"."""
    if kind == "transformers":
        return transformers_tower(model_type, vision)
    return MegatronTower2_5(vision, language, norm) if "2_5" in model_type else MegatronTower(vision, language)


class NamedTensors(torch.nn.Module):
    """Parameters of given names and shapes, in the place of modules that come with a model. It computes nothing."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        inner: dict[str, dict[str, Sequence[int]]] = {}
        for name, shape in shapes.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = shape
            else:
                self.register_parameter(first, torch.nn.Parameter(torch.zeros(*shape)))
        for name, own in inner.items():
            self.add_module(name, NamedTensors(own))


TOWER_NAMES = {"transformers": "visual", "megatron": "vision_model"}
"""What the models call their towers."""


class PatchEmbedding(torch.nn.Module):
    """Makes a vector of each patch: a convolution whose kernel is the patch."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision
        self.shape = (vision["in_channels"], vision["temporal_patch_size"], *(vision["patch_size"],) * 2)
        self.proj = torch.nn.Conv3d(
            self.shape[0], config.hidden_size, self.shape[1:], self.shape[1:], bias=config.has_patch_bias
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches.view(-1, *self.shape)).flatten(1)


class Merger(MegatronModule):
    """Makes one vector of several patches, in two layers that tensor parallelism cuts."""

    def __init__(self, config: Any, out: int, norm_merged: bool) -> None:
        super().__init__(config=config)
        self.merged = config.hidden_size * config.vision["spatial_merge_size"] ** 2
        self.norm_merged = norm_merged
        self.patch_norm = torch.nn.LayerNorm(self.merged if norm_merged else config.hidden_size, eps=1e-6)
        more: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": True}
        self.linear_fc1 = ColumnParallelLinear(self.merged, self.merged, gather_output=False, **more)
        self.linear_fc2 = RowParallelLinear(self.merged, out, input_is_parallel=True, skip_bias_add=False, **more)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.patch_norm(hidden.reshape(-1, self.merged) if self.norm_merged else hidden)
        hidden = torch.nn.functional.gelu(self.linear_fc1(hidden.reshape(-1, self.merged))[0])
        merged: torch.Tensor = self.linear_fc2(hidden)[0]
        return merged


class TowerBlock(TransformerBlock):
    """Megatron's block with mergers for the output of some layers, as Bridge's and mbridge's Qwen3-VL have it."""

    def __init__(self, config: Any, out: int) -> None:
        super().__init__(config, layer_spec(), post_layer_norm=False)
        self.indexes = config.vision.get("deepstack_visual_indexes", [])
        self.deepstack_merger_list = torch.nn.ModuleList(Merger(config, out, norm_merged=True) for _ in self.indexes)

    def forward(self, hidden: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inner = []
        for number, layer in enumerate(self.layers):
            hidden, _ = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
            if number in self.indexes:
                inner.append(self.deepstack_merger_list[self.indexes.index(number)](hidden[:, 0]))
        return hidden, inner

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        # The default takes a list of modules for replicated. Bridge's block asks each of them, too, and by default
        # they share keys.
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        shared = f"{prefix}deepstack_merger_list."
        has_numbers = bool((metadata or {}).get("non_homogeneous_layers"))
        for number, merger in enumerate(self.deepstack_merger_list):
            offsets = () if has_numbers else ((0, number, len(self.deepstack_merger_list)),)
            own = merger.sharded_state_dict(f"{shared}{number}.", offsets, metadata)
            if not has_numbers:
                replace_prefix_for_sharding(own, f"{shared}{number}.", shared)
            found |= own
        return found


class MegatronTower(VisionModule):
    """Qwen3-VL's vision tower of megatron's layers, for one image of `SIDE` x `SIDE` patches."""

    def __init__(self, vision: Mapping[str, Any], language: TransformerConfig) -> None:
        config = tower_config(vision, language, torch.nn.functional.gelu, "LayerNorm", gated=False)
        super().__init__(config=config)
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = torch.nn.Embedding(vision["num_position_embeddings"], config.hidden_size)
        self.decoder = TowerBlock(config, vision["out_hidden_size"])
        self.merger = Merger(config, vision["out_hidden_size"], norm_merged=False)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        places = places_of(self.config.vision["spatial_merge_size"])
        hidden = self.patch_embed(image) + self.pos_embed.weight[places]
        rotary = rotary_of(places, self.config.kv_channels)
        hidden, inner = self.decoder(hidden[:, None], rotary)
        return self.merger(hidden[:, 0]), inner


class MegatronTower2_5(VisionModule):
    """Qwen2.5-VL's tower of megatron's layers with mbridge's names. Only its tensors matter: it has no forward."""

    def __init__(self, vision: Mapping[str, Any], language: TransformerConfig, norm: type) -> None:
        config = tower_config(vision, language, torch.nn.functional.silu, "RMSNorm", gated=True)
        super().__init__(config=config)
        self.patch_embed = PatchEmbedding(config)
        spec = layer_spec()
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        self.decoder = TransformerBlock(config, spec, post_layer_norm=False)
        self.decoder.final_layernorm = norm(config, config.hidden_size)
        projection = copy.copy(config)
        projection.hidden_size, projection.gated_linear_unit = vision["out_hidden_size"], False
        merged = config.hidden_size * vision["spatial_merge_size"] ** 2
        projection.ffn_hidden_size = merged
        self.projection = MegatronModule(projection)
        self.projection.encoder = MLP(
            projection, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), input_size=merged
        )


def layer_spec() -> Any:
    """The spec of a tower's layers, in which all patches see all others."""
    spec = get_vit_layer_with_local_spec()
    # Until 0.17 the spec has a causal mask, unlike that of transformer-engine's layers.
    spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return spec


def tower_config(vision: Mapping[str, Any], language: Any, activation: Any, normalization: str, gated: bool) -> Any:
    """megatron's config of a tower, which no pipeline cuts."""
    if activation is torch.nn.functional.gelu:
        activation = partial(activation, approximate="tanh")
    config = TransformerConfig(
        num_layers=vision["depth"],
        hidden_size=vision["hidden_size"],
        num_attention_heads=vision["num_heads"],
        ffn_hidden_size=vision["intermediate_size"],
        tensor_model_parallel_size=language.tensor_model_parallel_size,
        normalization=normalization,
        layernorm_epsilon=1e-6,
        gated_linear_unit=gated,
        activation_func=activation,
        add_bias_linear=True,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=language.bf16,
        fp16=language.fp16,
        params_dtype=language.params_dtype,
        use_cpu_initialization=True,
    )
    config.vision, config.has_patch_bias = dict(vision), not gated
    return config


def places_of(merge: int) -> torch.Tensor:
    """The numbers of an image's patches, row by row, in the order in which they are merged."""
    places = torch.arange(SIDE**2).view(SIDE // merge, merge, SIDE // merge, merge)
    return places.permute(0, 2, 1, 3).flatten()


def rotary_of(places: torch.Tensor, dim: int) -> torch.Tensor:
    """The angles of patches by row and column, for each element of a head: [patches, 1, 1, dim]."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim // 2, 2).float() / (dim // 2))
    angles = torch.cat([torch.outer(place.float(), frequencies) for place in (places // SIDE, places % SIDE)], dim=1)
    return angles.repeat(1, 2)[:, None, None]
