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
    """Returns the largest token number plus 1; None if the folder has no file that lists tokens.

    Added tokens count, too. Files that cannot be read are skipped, because only the tokenizer itself needs them.
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
    """Does the same as `tokens_in` for a tokenizer or processor. Returns None if the object lists no tokens."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    try:
        return max(tokenizer.get_vocab().values(), default=-1) + 1 or None
    except (AttributeError, NotImplementedError, TypeError):
        return None


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Added(msgspec.Struct, gc=False):
    id: int | float | str | None = None


class _Tokenizer(msgspec.Struct):
    """The needed fields of `tokenizer.json`. The pairs that make up tokens, a large part of the file, are skipped."""

    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[_Added] | None = None


class _Config(msgspec.Struct):
    """The needed field of `tokenizer_config.json`: its members' names are the numbers of the added tokens."""

    added_tokens_decoder: dict[str, _Added] | None = None


_TOKENIZER, _CONFIG = msgspec.json.Decoder(_Tokenizer), msgspec.json.Decoder(_Config)
# A safe lower bound for the bytes of an added token's entry. Real entries have 100 bytes or more.
_LEAST_ADDED = 24
# The longest accepted text between two commas, not counting the contents of strings.
_LONGEST_MEMBER = 1 << 20
_ANY = msgspec.json.Decoder(msgspec.Raw)
# Matches a token's number. The text of a token cannot match, because the contents of strings are removed before the
# search.
_NUMBER = re.compile(rb":\s*([0-9]{1,12})(?=\s*[,}])")


def _of_tokenizer(data: bytes) -> int:
    _check_density(data, b'"id"')
    found = typed_json.parse(data, _TOKENIZER)
    added = max((token.id for token in found.added_tokens or () if isinstance(token.id, int)), default=-1)
    vocabulary = bytes(memoryview(found.model.vocab))
    # A Unigram model lists pairs of a token and its score; other models map tokens to numbers.
    is_list = vocabulary.startswith(b"[")
    return max(_count_of(vocabulary) - 1 if is_list else _highest_in(vocabulary), added)


def _of_object(data: bytes) -> int:
    return _highest_in(bytes(memoryview(typed_json.parse(data, _ANY))))


def _count_of(pairs: bytes) -> int:
    """Returns the number of inner lists in a JSON list of lists."""
    return sum(piece.count(b"[") for piece in json_bounds.without_strings(pairs)) - 1


def _highest_in(tokens: bytes) -> int:
    """Returns the highest number in a JSON object that maps tokens to numbers. Raises ValueError for other JSON."""
    if not tokens.startswith(b"{"):
        raise ValueError("not an object of tokens and their numbers")
    highest, rest = -1, b""
    for piece in json_bounds.without_strings(tokens):
        rest += piece
        # A number may continue in the next piece, so search only up to the last comma.
        end = rest.rfind(b",") + 1
        highest = max(highest, *map(int, _NUMBER.findall(rest, 0, end)), -1)
        rest = rest[end:]
        if len(rest) > _LONGEST_MEMBER:
            raise ValueError("not an object of tokens and their numbers")
    return max(highest, *map(int, _NUMBER.findall(rest)), -1)


def _of_config(data: bytes) -> int:
    _check_density(data, b"{")
    return max(map(int, typed_json.parse(data, _CONFIG).added_tokens_decoder or {}), default=-1)


def _check_density(data: bytes, text: bytes) -> None:
    if data.count(text) * _LEAST_ADDED > max(len(data), json_bounds.SMALL_BYTES):
        raise json_bounds.TooDenseError(f"{len(data)} bytes have more added tokens than their size allows")


_FILES: dict[str, Callable[[bytes], int]] = {
    "tokenizer.json": _of_tokenizer,
    "vocab.json": _of_object,
    "added_tokens.json": _of_object,
    "tokenizer_config.json": _of_config,
}
