"""Qwen2.5-VL, Qwen3-VL and Qwen3.5, the last two also as mixtures of experts: a Qwen decoder and a vision tower.

In megatron, the module `language_model` is the language model. The section `text_config` describes this model, or
`config.json` itself does (Qwen2.5-VL as published). The tower is either transformers' own (`visual`), whose tensors are
the same on both sides, or consists of megatron's modules (`vision_model`). Megatron-Bridge uses transformers' tower in
Qwen2.5-VL. mbridge's Qwen2.5-VL and both programs' Qwen3-VL use megatron's modules.

The table of a vision-language model has the rows of a decoder and the rows of a tower. The names in the decoder's rows
get a prefix on both sides (`Table.mcore`, `Table.hf`). The rows of the tower's layers occur once per layer (`Row.per`).
The rules of `config.json` get the section for the language model as if this section were the whole file
(`Architecture.section`); `vision_config` stays as it is.

A live model has a tower of one of two kinds. So the table has the tower's rows twice: with megatron's names and cuts,
and with the names of HuggingFace (the fact `hf_tower`). The tensors of the checkpoint or of the live model show which
of these rows apply (`with_tower_of`). A conversion from HuggingFace writes the tower that Megatron-Bridge uses.
Transformers' modules have no `sharded_state_dict`. So megatron assumes that each tensor of these modules is whole on
every rank (`sharded_state_dict_default`), and this assumption is true.

In Qwen3-VL, rotary frequencies belong to time, height and width in turn, and decoder layers add features from inner
layers of the tower. GPTModel can do neither, so tests with images compare only the tower's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, ModelFacts, language_config
from mcore_ckpt.models.architectures.common import (
    ATTENTION,
    DENSE_MLP,
    EXPERT,
    NORMS,
    QK_NORMS,
    ROUTER,
    STACKED_EXPERTS,
    below,
    integer,
    language_model_rows,
    read_uniform,
    vision_of,
    weight_and_bias,
)
from mcore_ckpt.models.architectures.gpt_oss import Transposed
from mcore_ckpt.models.architectures.qwen import read_qwen3_moe
from mcore_ckpt.models.architectures.qwen3_5 import DENSE_RULES, DENSE_TABLE, MOE_RULES, MOE_TABLE, read_dense, read_moe
from mcore_ckpt.models.config_fields import Constant, HfConfig, Refused, Rule, Same
from mcore_ckpt.models.config_rules import DENSE, EXPERT_COUNT, SlidingWindow, SparseStep
from mcore_ckpt.models.rope_rules import MultimodalRope, Rope
from mcore_ckpt.models.table import Row, RowRange, Sizes, Table
from mcore_ckpt.sharding.regions import Shape
from mcore_ckpt.sharding.towers import LANGUAGE_MODEL, VISION_MODEL, VISUAL

_SECTION = "text_config"


def _tower_qkv(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Interleaves queries, keys and values by head.

    HuggingFace's tensor has all queries first, then all keys, then all values.
    """
    dim = sizes["v_hidden"] // sizes["v_heads"]
    starts = range(0, sizes["v_hidden"], dim)
    return [RowRange(0, part * sizes["v_hidden"] + start, dim) for start in starts for part in range(3)]


def _linear(mcore: str, hf: str, rows: str, columns: str, **more: Any) -> tuple[Row, Row]:
    """Returns the rows of a linear layer with a bias."""
    return weight_and_bias(mcore, hf, f"{rows} {columns}", rows, **more)


def _gated(mcore: str, hf: str, rows: str, columns: str) -> tuple[Row, Row]:
    """Returns the rows of a gated linear unit's first layer with a bias."""
    names = (f"{hf}.gate_proj", f"{hf}.up_proj")
    return (
        Row(f"{mcore}.weight", {f"{name}.weight": f"{rows} {columns}" for name in names}),
        Row(f"{mcore}.bias", {f"{name}.bias": rows for name in names}),
    )


def _norm(mcore: str, hf: str, size: str) -> tuple[Row, Row]:
    return weight_and_bias(mcore, hf, size, size)


_BLOCK, _HF_BLOCK = "decoder.layers.{number}.", "blocks.{number}."
_TOWER_ATTENTION = (
    *_linear("self_attention.linear_qkv", "attn.qkv", "3*v_hidden", "v_hidden", transform=_tower_qkv),
    *_linear("self_attention.linear_proj", "attn.proj", "v_hidden", "v_hidden"),
)
_PATCHES = Row("patch_embed.proj.weight", {"patch_embed.proj.weight": "v_hidden v_channels v_frames v_patch v_patch"})

_TOWER_2_5 = (
    _PATCHES,
    *below(
        _BLOCK,
        _HF_BLOCK,
        (
            Row("input_layernorm.weight", {"norm1.weight": "v_hidden"}),
            Row("pre_mlp_layernorm.weight", {"norm2.weight": "v_hidden"}),
            *_TOWER_ATTENTION,
            *_gated("mlp.linear_fc1", "mlp", "v_ffn", "v_hidden"),
            *_linear("mlp.linear_fc2", "mlp.down_proj", "v_hidden", "v_ffn"),
        ),
        per="v_layers",
    ),
    Row("decoder.final_layernorm.weight", {"merger.ln_q.weight": "v_hidden"}),
    *_linear("projection.encoder.linear_fc1", "merger.mlp.0", "v_merged", "v_merged"),
    *_linear("projection.encoder.linear_fc2", "merger.mlp.2", "v_out", "v_merged"),
)

_MERGER = (
    *_linear("linear_fc1", "linear_fc1", "v_merged", "v_merged"),
    *_linear("linear_fc2", "linear_fc2", "v_out", "v_merged"),
)
_DEEPSTACK, _HF_DEEPSTACK = "decoder.deepstack_merger_list.{number}.", "deepstack_merger_list.{number}."
_TOWER_3 = (
    _PATCHES,
    Row("patch_embed.proj.bias", {"patch_embed.proj.bias": "v_hidden"}),
    Row("pos_embed.weight", {"pos_embed.weight": "v_positions v_hidden"}),
    *below(
        _BLOCK,
        _HF_BLOCK,
        (
            *_norm("input_layernorm", "norm1", "v_hidden"),
            *_norm("pre_mlp_layernorm", "norm2", "v_hidden"),
            *_TOWER_ATTENTION,
            *_linear("mlp.linear_fc1", "mlp.linear_fc1", "v_ffn", "v_hidden"),
            *_linear("mlp.linear_fc2", "mlp.linear_fc2", "v_hidden", "v_ffn"),
        ),
        per="v_layers",
    ),
    *_norm("merger.patch_norm", "merger.norm", "v_hidden"),
    *below("merger.", "merger.", _MERGER),
    *below(_DEEPSTACK, _HF_DEEPSTACK, (*_norm("patch_norm", "norm", "v_merged"), *_MERGER), per="v_deepstack"),
)


def _tower(rows: Iterable[Row], hf: str) -> tuple[Row, ...]:
    """Returns the rows of a tower for both kinds of towers. `hf` is the beginning of the names in HuggingFace."""
    found: list[Row] = []
    for row in rows:
        found += below(VISION_MODEL, hf, [row], when="!hf_tower")
        found += (
            Row(VISUAL + name, {hf + name: words}, when="hf_tower", per=row.per) for name, words in row.hf.items()
        )
    return tuple(found)


def _table(decoder: Table, tower: Iterable[Row], hf: str, spellings: tuple[tuple[str, str], ...] = ()) -> Table:
    """Returns the table of a model with this decoder. `hf` is the beginning of the decoder's names in HuggingFace."""
    beginning = hf.removesuffix("language_model.") if hf != "model." else ""
    outside = language_model_rows(lambda name: name.replace("model.", hf, 1))
    model = (*outside, *_tower(tower, f"{beginning}visual."))
    return replace(decoder, model=model, mcore=LANGUAGE_MODEL, hf=hf, spellings=spellings)


def _tower_sizes(vision: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = integer(vision, "hidden_size"), integer(vision, "num_heads")
    if hidden % heads:
        raise UnsupportedError(f"config.json: vision_config: {heads} num_heads cannot share a hidden_size of {hidden}")
    channels = "in_channels" if vision.get("in_channels") is not None else "in_chans"
    return {
        "v_hidden": hidden,
        "v_heads": heads,
        "v_ffn": integer(vision, "intermediate_size"),
        "v_layers": integer(vision, "depth"),
        "v_channels": integer({channels: 3, **vision}, channels),
        "v_frames": integer(vision, "temporal_patch_size"),
        "v_patch": integer(vision, "patch_size"),
        "v_merged": hidden * integer(vision, "spatial_merge_size") ** 2,
        "v_out": integer(vision, "out_hidden_size"),
    }


def _sizes_3(vision: Mapping[str, Any]) -> dict[str, int]:
    indexes = vision.get("deepstack_visual_indexes")
    if not isinstance(indexes, (list, tuple)):
        raise UnsupportedError(f"config.json: deepstack_visual_indexes is {indexes!r}, but must be a list of layers")
    return {**_sizes_3_5(vision), "v_deepstack": len(indexes)}


def _sizes_3_5(vision: Mapping[str, Any]) -> dict[str, int]:
    positions = integer(vision, "num_position_embeddings")
    return {**_tower_sizes(vision), "v_positions": positions, "v_deepstack": 0}


def _reader(
    language: Callable[[HfConfig], ModelFacts], tower: Callable[[Mapping[str, Any]], dict[str, int]], *facts: str
) -> Callable[[HfConfig], ModelFacts]:
    """Makes an architecture's function `read` from two functions that read the decoder's facts and the tower's sizes.

    `facts` are further facts of the whole model.
    """

    def read(config: HfConfig) -> ModelFacts:
        known = language(language_config(config, _SECTION))
        return replace(known, sizes={**known.sizes, **tower(vision_of(config))}, facts=known.facts.union(facts))

    return read


_STACKED: dict[str, Any] = {"when": "moe", "change": Transposed()}
# The rows of experts as published, and as transformers writes them if it has read the model from a folder. If
# transformers 5 has made the model from a config, the experts' tensors have the same names, but are stacked as in other
# models.
_EXPERTS = (
    *ROUTER,
    Row(EXPERT + "linear_fc1.weight", {"mlp.experts.gate_up_proj": "experts hidden 2*moe_ffn"}, **_STACKED),
    Row(EXPERT + "linear_fc2.weight", {"mlp.experts.down_proj": "experts moe_ffn hidden"}, **_STACKED),
)
# transformers 4 and 5 read and write Qwen2.5-VL under the names of the model's first release.
_SPELLINGS_2_5 = (("model.language_model.", "model."), ("model.visual.", "visual."))
_DENSE = Table((), (*NORMS, *ATTENTION, *QK_NORMS, *DENSE_MLP))
_MOE = Table((), (*_DENSE.layer, *_EXPERTS), stacked=STACKED_EXPERTS)
_RULES_3 = (
    *DENSE,
    MultimodalRope(500000.0, (24, 20, 20)),
    Constant("window_size", None),
    Constant("qk_layernorm", True),
    Refused("attention_bias", False),
)


def _rules_3_5(language: Iterable[Rule]) -> tuple[Rule, ...]:
    rope = MultimodalRope(10000.0, (11, 11, 10), 0.25)
    return tuple(rope if isinstance(rule, Rope) else rule for rule in language)


# Qwen3.5 has the tower of Qwen3-VL, but without mergers for features from inner layers.
ARCHITECTURES = (
    Architecture(
        "qwen2_5_vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        _table(_DENSE, _TOWER_2_5, "model.", spellings=_SPELLINGS_2_5),
        _reader(read_uniform, _tower_sizes, "qkv_bias", "hf_tower"),
        (*DENSE, MultimodalRope(1e6), SlidingWindow(), Constant("add_qkv_bias", True)),
        _SECTION,
    ),
    Architecture(
        "qwen3_vl",
        ("Qwen3VLForConditionalGeneration",),
        _table(_DENSE, _TOWER_3, "model.language_model."),
        _reader(read_uniform, _sizes_3, "qk_norm"),
        _RULES_3,
        _SECTION,
    ),
    Architecture(
        "qwen3_vl_moe",
        ("Qwen3VLMoeForConditionalGeneration",),
        _table(_MOE, _TOWER_3, "model.language_model."),
        _reader(read_qwen3_moe, _sizes_3),
        (
            *_RULES_3,
            *EXPERT_COUNT,
            Same("moe_ffn_hidden_size", "moe_intermediate_size"),
            # The weights of the chosen experts always add up to 1, because norm_topk_prob is ignored
            # (Qwen3VLMoeTextSparseMoeBlock, 4.57 and 5).
            Constant("moe_router_pre_softmax", False),
            SparseStep(),
        ),
        _SECTION,
    ),
    Architecture(
        "qwen3_5",
        ("Qwen3_5ForConditionalGeneration",),
        _table(DENSE_TABLE, _TOWER_3, "model.language_model."),
        _reader(read_dense, _sizes_3_5),
        _rules_3_5(DENSE_RULES),
        _SECTION,
    ),
    Architecture(
        "qwen3_5_moe",
        ("Qwen3_5MoeForConditionalGeneration",),
        _table(MOE_TABLE, _TOWER_3, "model.language_model."),
        _reader(read_moe, _sizes_3_5),
        _rules_3_5(MOE_RULES),
        _SECTION,
    ),
)
