"""What verl hands over, without verl: options, paths, and what is said where the package is missing."""

import importlib
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations import verl
from mcore_ckpt.integrations.verl.options import NOT_OPTIONS, VERLS_OWN, own_options, read_options
from mcore_ckpt.integrations.verl.place import Place, remote_root

MODEL = SimpleNamespace()


@pytest.mark.parametrize(
    ("name", "root", "step", "is_flat"),
    [
        ("runs/global_step_12/actor", "runs", 12, False),
        ("runs/global_step_12/critic", "runs/global_step_12", None, False),
        ("runs/global_step_12", "runs", 12, True),
        ("runs/global_step_12/", "runs", 12, True),
        ("runs/best", "runs", None, False),
    ],
)
def test_the_folder_of_the_steps(name: str, root: str, step: int | None, is_flat: bool) -> None:
    place = Place.of(f"/data/{name}", "actor")
    assert (place.root, place.step, place.is_flat) == (Path("/data") / root, step, is_flat)
    assert place.folder == Path("/data") / name


def test_a_relative_path_is_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Place.of("checkpoints/global_step_1/actor", "actor").root == tmp_path / "checkpoints"


def test_the_same_place_in_another_step() -> None:
    ppo, sft = Place.of("/data/global_step_12/actor", "actor"), Place.of("/data/global_step_12", "actor")
    assert ppo.in_step(3) == Place.of("/data/global_step_3/actor", "actor")
    assert sft.in_step(3) == Place.of("/data/global_step_3", "actor")
    assert Place.of("/data/best", "actor").in_step(3) is None


@pytest.mark.parametrize(
    ("hdfs_path", "root"),
    [
        ("hdfs://name/runs/global_step_12/actor", "hdfs://name/runs"),
        ("hdfs://name/runs/global_step_12", "hdfs://name/runs"),
        ("/mnt/copies/global_step_12/actor/", "file:///mnt/copies"),
    ],
)
def test_the_root_of_the_copies(hdfs_path: str, root: str) -> None:
    assert remote_root(hdfs_path) == root


@pytest.mark.parametrize("kind", [dict, lambda **options: SimpleNamespace(**options)])
def test_options_of_any_kind(kind: Any) -> None:
    options = kind(save_contents=None, load_contents=["model"], async_save=True, strict=True, keep_every=5, lr=1)
    assert read_options(options) == {"load_contents": ("model",), "async_save": True, "strict": True, "keep_every": 5}
    assert read_options(None) == {}


def test_every_choice_of_ours_can_be_made_in_verls_options() -> None:
    ours = {field.name for field in own_options()}
    assert ours | {*VERLS_OWN, *NOT_OPTIONS} == {field.name for field in fields(CheckpointConfig)}
    assert not ours & {*VERLS_OWN, *NOT_OPTIONS}


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"use_megatron_fsdp": True}, UnsupportedError, "use_megatron_fsdp"),
        ({"checkpoint_config": {"save_contents": ["weights"]}}, ValueError, "save_contents has 'weights'"),
        ({"checkpoint_config": {"if_busy": "maybe"}}, ValueError, "if_busy"),
        ({"checkpoint_config": {"if_busy": "skip"}}, UnsupportedError, "if_busy='skip', but verl writes its tracker"),
        ({"checkpoint_contents": ["weights"]}, ValueError, "save_contents has 'weights'"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_save(
    keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        verl.MegatronCheckpointManager(model=MODEL, **keywords)


@pytest.mark.parametrize("name", ["McoreCkptConfig", "LanguageModelEngine", "ValueModelEngine"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "verl", None)
    for module in ("config", "engines"):
        monkeypatch.delitem(sys.modules, f"mcore_ckpt.integrations.verl.{module}", raising=False)
    with pytest.raises(ImportError, match="pip install verl"):
        getattr(verl, name)


def test_the_entry_point_imports_nothing_of_verl_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    monkeypatch.delitem(sys.modules, "mcore_ckpt.integrations.verl.plugin", raising=False)
    before = set(sys.modules)
    importlib.import_module("mcore_ckpt.integrations.verl.plugin")
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] == "verl"}
    with pytest.raises(AttributeError, match="Nothing"):
        verl.Nothing  # noqa: B018


def test_memory_that_is_freed_is_not_copied_lazily() -> None:
    """On a GPU the copy would still be under way."""
    lazy = {"async_save": True, "async_mode": "lazy"}
    for frees_memory, mode in ((True, "snapshot"), (False, "lazy")):
        manager = verl.MegatronCheckpointManager(model=MODEL, checkpoint_config=lazy, frees_memory=frees_memory)
        assert manager._config.async_mode == mode


def test_the_tokenizer_by_either_name() -> None:
    tokenizer, processor = object(), object()
    old = verl.MegatronCheckpointManager(model=MODEL, tokenizer=tokenizer)
    new = verl.MegatronCheckpointManager(model=MODEL, processing_class=processor)
    assert (old._trainer["processing_class"], new._trainer["processing_class"]) == (tokenizer, processor)
