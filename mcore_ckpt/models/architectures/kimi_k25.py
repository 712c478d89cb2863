"""Kimi-K2.5 and K2.6: Kimi-K2's decoder with a vision tower and a projector.

`text_config` contains the fields of the language model. It also contains `quantization_config`, because experts are
published as packed 4-bit integers. The classes of tower and projector are in Python files that come with the model.
Megatron-Bridge's model has the two modules under the same names (`models/kimi_vl`, 0.6), whole on each rank of the
first stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.models.architecture import Architecture, ModelFacts, language_config
from mcore_ckpt.models.architectures.common import (
    first_integer,
    integer,
    language_model_rows,
    vision_of,
    weight_and_bias,
)
from mcore_ckpt.models.architectures.deepseek import DEEPSEEK_RULES, DEEPSEEK_TABLE, read_deepseek
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.table import Row
from mcore_ckpt.sharding.towers import LANGUAGE_MODEL, PROJECTOR, VISION_TOWER

_SECTION = "text_config"


def _same(name: str, weight: str, bias: str, per: str = "") -> tuple[Row, Row]:
    """Returns the rows of a module that has the same name on both sides."""
    return weight_and_bias(name, name, weight, bias, per=per)


_BLOCK = f"{VISION_TOWER}encoder.blocks.{{number}}."
_LAYER = (
    ("norm0", "v_hidden", "v_hidden"),
    ("norm1", "v_hidden", "v_hidden"),
    ("wqkv", "3*v_hidden v_hidden", "3*v_hidden"),
    ("wo", "v_hidden v_hidden", "v_hidden"),
    ("mlp.fc0", "v_ffn v_hidden", "v_ffn"),
    ("mlp.fc1", "v_hidden v_ffn", "v_hidden"),
)
_POSITIONS = f"{VISION_TOWER}patch_embed.pos_emb.weight"
_TOWER = (
    *_same(f"{VISION_TOWER}patch_embed.proj", "v_hidden 3 v_patch v_patch", "v_hidden"),
    Row(_POSITIONS, {_POSITIONS: "v_height v_width v_hidden"}),
    *(row for name, weight, bias in _LAYER for row in _same(_BLOCK + name, weight, bias, per="v_layers")),
    *_same(f"{VISION_TOWER}encoder.final_layernorm", "v_hidden", "v_hidden"),
    *_same(f"{PROJECTOR}pre_norm", "v_hidden", "v_hidden"),
    *_same(f"{PROJECTOR}proj.0", "v_merged v_merged", "v_merged"),
    *_same(f"{PROJECTOR}proj.2", "hidden v_merged", "hidden"),
)
_DECODER = language_model_rows(lambda name: f"language_model.{name}")
_MTP = tuple(replace(row, mcore=LANGUAGE_MODEL + row.mcore) if row.is_copy else row for row in DEEPSEEK_TABLE.mtp)
# transformers (5.23) reads the published names, but writes some tensors under names with another beginning.
_SPELLINGS = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("model.mm_projector.", PROJECTOR),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
)
_TABLE = replace(
    DEEPSEEK_TABLE,
    model=(*_DECODER, *_TOWER),
    mtp=_MTP,
    mcore=LANGUAGE_MODEL,
    hf="language_model.model.",
    spellings=_SPELLINGS,
)


def _read(config: HfConfig) -> ModelFacts:
    known = read_deepseek(language_config(config, _SECTION))
    return replace(known, sizes={**known.sizes, **_tower_sizes(vision_of(config))}, facts=known.facts | {"hf_tower"})


def _tower_sizes(vision: Mapping[str, Any]) -> dict[str, int]:
    # Each field is read under the name in the first published config, or under its name in transformers 5.
    hidden = first_integer(vision, "vt_hidden_size", "hidden_size")
    kernel = vision.get("merge_kernel_size", (2, 2))
    if not isinstance(kernel, (list, tuple)) or len(kernel) != 2:
        raise UnsupportedError(f"config.json: merge_kernel_size is {kernel!r}, but must be two numbers")
    height, width = (integer({"merge_kernel_size": side}, "merge_kernel_size") for side in kernel)
    return {
        "v_hidden": hidden,
        "v_ffn": first_integer(vision, "vt_intermediate_size", "intermediate_size"),
        "v_layers": first_integer(vision, "vt_num_hidden_layers", "num_hidden_layers"),
        "v_patch": integer(vision, "patch_size"),
        "v_height": first_integer(vision, "init_pos_emb_height", "pos_emb_height"),
        "v_width": first_integer(vision, "init_pos_emb_width", "pos_emb_width"),
        "v_merged": hidden * height * width,
    }


ARCHITECTURES = (
    Architecture(
        "kimi_k25",
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        _TABLE,
        _read,
        DEEPSEEK_RULES,
        _SECTION,
    ),
)
