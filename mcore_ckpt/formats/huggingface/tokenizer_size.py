"""Reads from a tokenizer's files how many rows an embedding needs for all tokens that the tokenizer can produce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import linked_file, read_small
from mcore_ckpt.json_bounds import TOKENS


def tokens_in(folder: Path) -> int | None:
    """Returns the largest number of a token, plus 1. None if the folder has no file that lists tokens.

    Added tokens count. A file that cannot be read is passed over, because only the tokenizer itself needs it.
    """
    highest = -1
    for name, numbers in _FILES.items():
        if (folder / name).is_file():
            try:
                data = read_small(linked_file(folder, name), limits.HF_ASSET_BYTES)
                highest = max([highest, *(n for n in numbers(fields.parse(data, TOKENS)) if type(n) is int)])
            except (OSError, CheckpointCorruptError, fields.FieldError, AttributeError, TypeError, ValueError):
                continue
    return None if highest < 0 else highest + 1


def tokens_of(processing_class: Any) -> int | None:
    """Returns the same of a tokenizer, or of a processor that has one. None if it does not say."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    try:
        return max(tokenizer.get_vocab().values(), default=-1) + 1 or None
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _of_tokenizer(found: Any) -> Iterator[Any]:
    vocabulary = found.get("model", {}).get("vocab") or {}
    # Unigram lists pairs of a token and its score; other kinds map tokens to numbers.
    yield from vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    yield from (token["id"] for token in found.get("added_tokens") or ())


_FILES: dict[str, Callable[[Any], Iterator[Any]]] = {
    "tokenizer.json": _of_tokenizer,
    "vocab.json": lambda found: iter(found.values()),
    "added_tokens.json": lambda found: iter(found.values()),
    "tokenizer_config.json": lambda found: map(int, found.get("added_tokens_decoder") or ()),
}
