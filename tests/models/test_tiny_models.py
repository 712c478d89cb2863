"""A tiny model that is kept for all processes of a test run is one made anew (tests/support/tiny_models.py)."""

from pathlib import Path

import pytest

from tests.support.tiny_models import make_hf_folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_kept_is_what_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTS_MODELS", raising=False)
    made = contents(make_hf_folder(tmp_path / "made", "llama", vocab_size=32))
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setenv("TESTS_MODELS", str(kept))
    for number in range(2):
        assert contents(make_hf_folder(tmp_path / str(number) / "deep", "llama", vocab_size=32)) == made
        assert len(list(kept.iterdir())) == 1
    other = contents(make_hf_folder(tmp_path / "other", "llama", vocab_size=48))
    assert other["model.safetensors"] != made["model.safetensors"]


def test_where_nothing_can_be_kept_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_MODELS", str(tmp_path / "absent"))
    assert "config.json" in contents(make_hf_folder(tmp_path / "made", "llama", vocab_size=32))
