"""Tells apart, by name, the language model and the vision tower of a vision-language model.

In Megatron-Bridge and mbridge, one module has the language model as `language_model` and the tower as `visual`,
`vision_model` or `vision_tower`. ROLL keeps the language model's own modules next to the tower, without a prefix. A
tower is on the first pipeline stage, with the embedding, so the pipeline does not cut the tower's layers.
"""

from __future__ import annotations

import re

LANGUAGE_MODEL = "language_model."
"""The beginning of the names of the language model's tensors."""

VISUAL, VISION_MODEL = "visual.", "vision_model."
"""The beginnings of the names of a tower's tensors."""

VISION_TOWER, PROJECTOR = "vision_tower.", "mm_projector."
"""The beginnings of names in Kimi-K2.5's tower and projector, which are modules of the model's own Python files."""

_TOWER = re.compile(r"(?:visual|vision_model|vision_projection|vision_tower|mm_projector)\..+")
_OF_LANGUAGE_MODEL = re.compile(r"(?:embedding|decoder|mtp|output_layer)\..+")
# The tensors of a tower that consists of megatron's modules (Bridge's and mbridge's Qwen models). In towers, tensor
# parallelism cuts only these tensors and, in some towers, the tensors of `_OF_EITHER`.
_OF_MEGATRON = re.compile(r"vision_model\.(?:decoder|projection|merger\.patch_norm)\..+|vision_projection\..+")
# In some towers these layers are megatron's modules, which are cut. In other towers the layers are transformers'
# modules, which are not cut.
_OF_EITHER = re.compile(r"vision_model\.merger\.linear_fc[12]\..+")


def split_language_model(name: str) -> tuple[str, str]:
    """Splits a name into the prefix of the language model, which may be empty, and the rest.

    Example:
        >>> split_language_model("language_model.decoder.layers.3.mlp.linear_fc2.weight")
        ('language_model.', 'decoder.layers.3.mlp.linear_fc2.weight')
    """
    if name.startswith(LANGUAGE_MODEL):
        return LANGUAGE_MODEL, name[len(LANGUAGE_MODEL) :]
    return "", name


def in_tower(name: str) -> bool:
    """Returns True if a tensor or a module belongs to a vision tower."""
    return _TOWER.fullmatch(name) is not None


def is_replicated(name: str) -> bool:
    """Returns True if a tensor belongs to a module of transformers, which tensor parallelism does not cut."""
    return in_tower(name) and not _OF_MEGATRON.fullmatch(name) and not _OF_EITHER.fullmatch(name)


def may_be_replicated(name: str) -> bool:
    """Returns True if a tensor is in a module that is cut in some towers, and not cut in others."""
    return _OF_EITHER.fullmatch(name) is not None


def under_other_root(name: str) -> str | None:
    """Returns the other name that a tensor has in another program's model; None if there is no other name.

    Example:
        >>> under_other_root("visual.blocks.0.norm1.weight"), under_other_root("decoder.final_layernorm.weight")
        ('vision_model.blocks.0.norm1.weight', 'language_model.decoder.final_layernorm.weight')
    """
    prefix, rest = split_language_model(name)
    if prefix:
        return rest if _OF_LANGUAGE_MODEL.fullmatch(rest) else None
    if name.startswith(VISUAL):
        other = VISION_MODEL + name[len(VISUAL) :]
        return None if _OF_MEGATRON.fullmatch(other) else other
    if name.startswith(VISION_MODEL):
        return None if _OF_MEGATRON.fullmatch(name) else VISUAL + name[len(VISION_MODEL) :]
    return LANGUAGE_MODEL + name if _OF_LANGUAGE_MODEL.fullmatch(name) else None
