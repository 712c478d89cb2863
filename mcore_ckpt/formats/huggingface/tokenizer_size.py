"""Reads from a tokenizer's files how many rows an embedding needs for all tokens that the tokenizer can produce."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mcore_ckpt import json_bounds
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits, typed_json
from mcore_ckpt.io.files import linked_file, read_small


def tokens_in(folder: Path) -> int | None:
    """Returns the largest number of a token, plus 1. None if the folder has no file that lists tokens.

    Added tokens count. A file that cannot be read is passed over, because only the tokenizer itself needs it.
    """
    highest = -1
    for name, highest_in in _FILES.items():
        if (folder / name).is_file():
            try:
                data = read_small(linked_file(folder, name), limits.HF_ASSET_BYTES)
                highest = max(highest, highest_in(data))
            except (OSError, CheckpointCorruptError, fields.FieldError, ValueError):
                continue
    return None if highest < 0 else highest + 1


def tokens_of(processing_class: Any) -> int | None:
    """Returns the same of a tokenizer, or of a processor that has one. None if it does not say."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    try:
        return max(tokenizer.get_vocab().values(), default=-1) + 1 or None
    except (AttributeError, NotImplementedError, TypeError):
        return None


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Added(msgspec.Struct, gc=False):
    id: int


class _Tokenizer(msgspec.Struct):
    """What counts in `tokenizer.json`. The pairs that make up tokens, a good part of it, are passed over unread."""

    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[_Added] | None = None


_TOKENIZER = msgspec.json.Decoder(_Tokenizer)
# How many bytes the entry of an added token has at least. It has 100 and more.
_LEAST_ADDED = 24
# A token's number. The tokens themselves are empty where it is sought.
_NUMBER = re.compile(rb":\s*([0-9]{1,12})(?=\s*[,}])")


def _of_tokenizer(data: bytes) -> int:
    if data.count(b'"id"') * _LEAST_ADDED > max(len(data), json_bounds.SMALL_BYTES):
        raise json_bounds.TooDenseError(f"{len(data)} bytes have more added tokens than their size allows")
    found = typed_json.parse(data, _TOKENIZER)
    added = max((token.id for token in found.added_tokens or ()), default=-1)
    return max(_of_vocabulary(bytes(memoryview(found.model.vocab))), added)


def _of_vocabulary(data: bytes) -> int:
    """Returns the highest number in an object of tokens and numbers, or of the last token in a list of tokens."""
    # Unigram lists pairs of a token and its score; other kinds map tokens to numbers.
    if data.lstrip().startswith(b"["):
        return sum(piece.count(b"[") for piece in json_bounds.without_strings(data)) - 2
    highest, rest = -1, b""
    for piece in json_bounds.without_strings(data):
        rest += piece
        # A number may go on in the next piece.
        end = rest.rfind(b",") + 1
        highest = max(highest, *map(int, _NUMBER.findall(rest, 0, end)), -1)
        rest = rest[end:]
    return max(highest, *map(int, _NUMBER.findall(rest)), -1)


def _of_config(data: bytes) -> int:
    return max(map(int, fields.as_dict(fields.parse(data).get("added_tokens_decoder") or {}, "tokens")), default=-1)


_FILES: dict[str, Callable[[bytes], int]] = {
    "tokenizer.json": _of_tokenizer,
    "vocab.json": _of_vocabulary,
    "added_tokens.json": _of_vocabulary,
    "tokenizer_config.json": _of_config,
}
