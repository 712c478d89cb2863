"""Checkpoints of vision-language models under the names that a language model alone, and other programs, have."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointMismatchError
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.global_state import global_state
from tests.distributed.layouts import LAYOUTS
from tests.distributed.refusals import assert_names, refused_load
from tests.distributed.snapshot import poison
from tests.distributed.training import Layout, build, parallel, train
from tests.support import vision_language

STEP = 2


def numbers(names: tuple[str, ...], beginning: str) -> set[int]:
    return {int(name[len(beginning) :].partition(".")[0]) for name in names if name.startswith(beginning)}


@pytest.mark.world(2)
def test_the_pipeline_numbers_the_decoder_and_not_the_tower(shared_path: Path) -> None:
    layout = LAYOUTS["tower-pp2-vpp2"]
    with parallel(layout):
        save(build(layout, seed=1), shared_path, STEP)
        with everywhere():
            manifest = read_manifest(shared_path / f"global_steps_{STEP}" / "actor")
            assert numbers(manifest.tensors, "language_model.decoder.layers.") == {0, 1, 2, 3}
            assert numbers(manifest.tensors, "vision_model.decoder.layers.") == {0, 1, 2}
            assert [(stage.pp, stage.vp, stage.decoder) for stage in manifest.stages] == [
                (0, 0, (0,)),
                (0, 1, (2,)),
                (1, 0, (1,)),
                (1, 1, (3,)),
            ]


@pytest.mark.world(2)
def test_another_program_may_call_the_tower_something_else(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL has transformers' tower as `vision_model`, which is what Bridge calls a tower of megatron's modules."""
    layout = Layout(2, tp=2, tower="transformers")
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        state = global_state(first)
        save(first, shared_path, STEP)
    monkeypatch.setitem(vision_language.TOWER_NAMES, "transformers", "vision_model")
    with parallel(replace(layout, tp=1)):
        second = build(replace(layout, tp=1), seed=2)
        poison(second)
        manager = manager_of(second, shared_path, vocab_size=131)
        manager.load()
        manager.close()
        found = global_state(second)
        with everywhere():
            wanted = {name.replace("visual.", "vision_model."): tensor for name, tensor in state.items()}
            assert found.keys() == wanted.keys()
            # The vocabulary is padded for two ranks and for one.
            assert all(found[name].equal(wanted[name][: len(found[name])]) for name in wanted)


@pytest.mark.world(2)
def test_a_language_model_alone_is_told_of_the_tower(shared_path: Path) -> None:
    with parallel(Layout(2, pp=2, tower="transformers")):
        save(build(Layout(2, pp=2, tower="transformers"), seed=1), shared_path, STEP)
    alone = Layout(2, pp=2)
    with parallel(alone):
        training = build(alone, seed=2)

        # Its own tensors are found: only the tower's are left.
        assert_names(refused_load(training, shared_path, CheckpointMismatchError), r"visual\.")
