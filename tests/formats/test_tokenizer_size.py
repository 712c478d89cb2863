"""How many rows an embedding needs, as the files of a tokenizer say it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt import json_bounds
from mcore_ckpt.formats.huggingface.tokenizer_size import tokens_in

tokens = st.text(st.sampled_from(list('ab"\\\\:,{}[]# 0123é')), max_size=30)
ODD = {'":5,': 1, '"': 2, "\\\\": 3, ",": 4, '\\": 99,': 5, "{": 6, "]": 7, "##": 8}


def size_of(folder: Path, name: str, found: Any, **options: Any) -> int | None:
    for old in folder.iterdir():
        old.unlink()
    text = found if isinstance(found, str) else json.dumps(found, **options)
    (folder / name).write_text(text)
    return tokens_in(folder)


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"separators": (",", ":"), "ensure_ascii": False}])
def test_tokens_that_look_like_numbers(options: dict[str, Any], tmp_path: Path) -> None:
    assert size_of(tmp_path, "vocab.json", ODD, **options) == 9
    assert size_of(tmp_path, "tokenizer.json", {"model": {"vocab": ODD}}, **options) == 9
    pairs = [[token, -0.5] for token in ODD]
    assert size_of(tmp_path, "tokenizer.json", {"model": {"vocab": pairs}}, **options) == len(ODD)


@settings(deadline=None)
@given(st.dictionaries(tokens, st.integers(0, 10**9), min_size=1), st.integers(1, 40))
def test_wherever_the_text_is_cut(vocabulary: dict[str, int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(json_bounds, "_PIECE", piece)
        for options in ({}, {"ensure_ascii": False, "indent": 1}):
            assert size_of(Path(folder), "vocab.json", vocabulary, **options) == max(vocabulary.values()) + 1


@pytest.mark.parametrize(
    ("name", "found", "size"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 3}}, "added_tokens": [{"id": 9}, {"id": "x"}, {}]}, 10),
        ("tokenizer.json", {"added_tokens": [{"id": 9, "content": "<a>"}]}, 10),
        ("tokenizer.json", {"model": {"vocab": {}}}, None),
        ("tokenizer.json", {"model": 5}, None),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "a"}, "12": {}}}, 13),
        ("tokenizer_config.json", {"added_tokens_decoder": {"seven": {}}}, None),
        ("added_tokens.json", {"<a>": 5}, 6),
        ("vocab.json", '{"a":7,"b":8,"c', None),
        ("vocab.json", '{"a":7}x', None),
        ("vocab.json", "[1,2]", None),
        ("vocab.json", "{}", None),
        ("vocab.json", '{"a":' + " " * (2 << 20) + "1}", None),
    ],
)
def test_what_counts(name: str, found: Any, size: int | None, tmp_path: Path) -> None:
    assert size_of(tmp_path, name, found) == size
