"""verl's checkpoint manager, in its words, without verl: resumes, trackers, retention, and what dies on the way."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.integrations.verl import MegatronCheckpointManager
from tests.distributed.adapters import FROZEN, with_adapters
from tests.distributed.agreement import everywhere
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, assert_state, chained, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import build, parallel, train
from tests.distributed.verl_words import (
    resume,
    step_folder,
    steps_in,
    tracked,
    verl_manager,
    write_ppo_data,
    write_sft_data_and_tracker,
)
from tests.support.commits import came_from, is_fork_of

DP2 = LAYOUTS["dp2-bf16"]


# -- resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "flat", "async_save"),
    [
        pytest.param("dp2-bf16", False, True, marks=pytest.mark.world(2)),
        pytest.param("pp2-vpp2", True, False, marks=marks(2)),
        pytest.param("tp2-pp2", False, False, marks=marks(4, in_ci=False)),
        pytest.param("ep2-dp4", True, True, marks=marks(4, in_ci=False)),
    ],
)
def test_a_resumed_training_is_the_same_bit_for_bit(
    layout: str, flat: bool, async_save: bool, shared_path: Path
) -> None:
    folder = step_folder(shared_path, 2) if flat else step_folder(shared_path, 2) / "actor"
    with parallel(LAYOUTS[layout]):
        training = build(LAYOUTS[layout], seed=1)
        train(training, 0, 2)
        manager = verl_manager(training, async_save=async_save)
        at_save = snapshot(training)
        with everywhere():
            assert manager.save_checkpoint(str(folder), None, 2, None) is None
        through = train(training, 2, 4)
        manager.close()
        after = snapshot(training)
    with parallel(LAYOUTS[layout]):
        training = build(LAYOUTS[layout], seed=2)
        poison(training)
        resume(training, folder)
        loaded = snapshot(training)
        resumed = train(training, 2, 4)
        found = snapshot(training)
        with everywhere():
            assert_same(loaded, at_save)
            assert resumed == through
            assert_same(found, after)
            assert tracked(shared_path) == "2"
            assert (folder / "manifest.json").exists()


class ValueHead(torch.nn.Linear):
    """As verl's `LinearForLastLayer` in the place of the output layer: one column, replicated, a pair of results."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@pytest.mark.world(2)
def test_a_critic_with_a_value_head_comes_back_under_another_layout(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = step_folder(shared_path, 1) / "critic"
    head = "output_layer.weight"
    with_value_head(monkeypatch)
    with parallel(LAYOUTS["tp2"]):
        training = build(LAYOUTS["tp2"], seed=1)
        before = training.model[0].module.state_dict()[head].clone()
        manager = verl_manager(training, role="critic")
        manager.save_checkpoint(str(folder), None, 1, None)
        at_save = snapshot(training)
        poison(training)
        manager.load_checkpoint(str(folder))
        manager.close()
        assert_state(training, at_save)
    with parallel(DP2):
        training = build(LAYOUTS["dp2-buckets"], seed=2)
        resume(training, folder, role="critic", load_contents=["model"])
        after = training.model[0].module.state_dict()[head]
        with everywhere():
            assert torch.equal(after, before)


def with_value_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.distributed import training as of_tests

    build_chunk = of_tests._build_chunk

    def with_head(*args: Any) -> Any:
        chunk = build_chunk(*args)
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config.hidden_size, 1, bias=False)
        return chunk

    monkeypatch.setattr(of_tests, "_build_chunk", with_head)


# -- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_of_a_model_with_adapters_only_these_are_saved(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_adapters(monkeypatch)
    layout = replace(DP2, frozen=FROZEN)
    folder = step_folder(shared_path, 2) / "actor"
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        manager = verl_manager(training, peft_cls=object())
        manager.save_checkpoint(str(folder), None, 2, None)
        at_save = snapshot(training)
        through = train(training, 2, 3)
        manager.close()
    saved = torch.load(folder / "model/mp_rank_00_000/model_states.pt", weights_only=True)
    with everywhere():
        assert saved
        assert all(".adapter." in name for name in saved)
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 5, 6)
        manager = verl_manager(training, peft_cls=object())
        manager.load_checkpoint(str(folder))
        loaded = snapshot(training)
        resumed = train(training, 2, 3)
        base = next(p for p in training.model[0].parameters() if not p.requires_grad)
        base.data.fill_(3.0)
        manager.load_checkpoint(str(folder))
        manager.close()
        with everywhere():
            assert_same(loaded, at_save)
            assert resumed == through
            assert bool((base == 3.0).all())


@pytest.mark.world(2)
def test_a_checkpoint_of_the_whole_model_loads_into_one_with_adapters(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_adapters(monkeypatch)
    layout = replace(DP2, frozen=FROZEN)
    folder = str(step_folder(shared_path, 1) / "actor")
    with parallel(layout):
        training = build(layout, seed=1)
        manager = verl_manager(training)
        manager.save_checkpoint(folder, None, 1, None)
        at_save = snapshot(training)
        manager.close()
        train(training, 0, 1)
        resume(training, folder, peft_cls=object())
        assert_state(training, at_save)


@pytest.mark.world(1)
def test_saves_go_on_from_what_was_loaded(shared_path: Path) -> None:
    """Also into another `default_local_dir` than that of `resume_from_path`."""
    plain, first, second = LAYOUTS["plain"], shared_path / "first", shared_path / "second"
    with parallel(plain):
        training = build(plain, seed=1)

        def live(root: Path, step: int, load: Path | None = None) -> Path:
            manager = verl_manager(training)
            if load is not None:
                manager.load_checkpoint(str(load))
            manager.save_checkpoint(str(step_folder(root, step) / "actor"), None, step, 3)
            manager.close()
            return step_folder(root, step) / "actor"

        before = live(first, 1)
        assert came_from(live(first, 2, load=before), before)
        assert is_fork_of(live(second, 2, load=before), before)


# -- retention, copies, older workers ----------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("flat", [False, True])
def test_how_many_stay_is_counted_on_disk(flat: bool, shared_path: Path) -> None:
    """verl's own count lives in memory, and begins anew at a restart."""
    with parallel(DP2):
        training = build(DP2, seed=1)
        for steps in ((1, 2, 3), (4,), (5, 6)):
            manager = verl_manager(training, keep_every=3)
            for step in steps:
                folder = step_folder(shared_path, step)
                manager.save_checkpoint(str(folder if flat else folder / "actor"), None, step, 2)
                if flat:
                    write_sft_data_and_tracker(shared_path, step)
                else:
                    write_ppo_data(shared_path, step)
            manager.close()
            dist.barrier()
            with everywhere():
                newest = [step for step in range(1, steps[-1] + 1) if step > steps[-1] - 2 or step == 3]
                assert steps_in(shared_path) == newest
                assert all(list(step_folder(shared_path, step).glob("data*.pt")) for step in newest)
        manager = verl_manager(training)
        manager.save_checkpoint(str(step_folder(shared_path, 7) / "actor"), None, 7, None)
        manager.close()
        with everywhere():
            assert steps_in(shared_path) == [3, 5, 6, 7]


@pytest.mark.world(2)
def test_what_was_loaded_is_deleted_once_there_is_a_newer_step(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        first, second = (str(step_folder(shared_path, step) / "actor") for step in (1, 2))
        manager = verl_manager(training)
        manager.save_checkpoint(first, None, 1, None)
        manager.close()
        manager = verl_manager(training)
        manager.load_checkpoint(first, None, True)
        dist.barrier()
        manager.save_checkpoint(first, None, 1, None)
        dist.barrier()
        with everywhere():
            assert steps_in(shared_path) == [1]
        manager.save_checkpoint(second, None, 2, None)
        dist.barrier()
        with everywhere():
            assert steps_in(shared_path) == [2]
            assert tracked(shared_path) == "2"
        manager.close()


@pytest.mark.world(2)
@pytest.mark.parametrize(("option", "kept"), [("hdfs_path", [1, 2]), ("remote", [2])])
def test_a_copy_elsewhere_is_loaded_where_the_folder_is_gone(option: str, kept: list[int], shared_path: Path) -> None:
    """Of verl's copies all stay, in the store of our own option as many as here."""
    local, store = shared_path / "local", shared_path / "store"

    def copy_of(step: int) -> str | None:
        return str(step_folder(store, step) / "actor") if option == "hdfs_path" else None

    options = {} if option == "hdfs_path" else {"remote": store.as_uri()}
    with parallel(DP2):
        training = build(DP2, seed=1)
        manager = verl_manager(training, **options)
        for step in (1, 2):
            train(training, step - 1, step)
            manager.save_checkpoint(str(step_folder(local, step) / "actor"), copy_of(step), step, 1)
            manager.wait()
            dist.barrier()
        at_save = snapshot(training)
        manager.close()
        with everywhere():
            assert steps_in(local) == [2]
            assert sorted(path.name for path in store.glob("global_steps_*")) == [f"global_steps_{n}" for n in kept]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(local)
        poison(training)
        dist.barrier()
        resume(training, step_folder(local, 2) / "actor", copy_of(2), **options)
        assert_state(training, at_save)


@pytest.mark.world(2)
def test_memory_that_is_freed_when_an_async_save_returns(shared_path: Path) -> None:
    """verl offloads, or lets the rollout have the memory, as soon as it can."""
    folder = str(step_folder(shared_path, 1) / "actor")
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        manager = verl_manager(training, async_save=True, async_mode="lazy", frees_memory=True)
        at_save = snapshot(training)
        manager.save_checkpoint(folder, None, 1, None)
        for buffer in training.model[0].buffers:
            buffer.param_data.untyped_storage().resize_(0)
        for part in chained(training.optimizer):
            for state in part.optimizer.state.values():
                state["exp_avg"].untyped_storage().resize_(0)
        manager.close()
    with parallel(DP2):
        training = build(DP2, seed=2)
        resume(training, folder)
        assert_state(training, at_save)


@pytest.mark.world(2)
def test_the_keywords_of_older_workers(shared_path: Path) -> None:
    """verl 0.4.0 had a tokenizer, contents without a config, no scheduler; 0.5 had what 0.9 has, and less."""
    folder = str(step_folder(shared_path, 1) / "actor")
    with parallel(DP2):
        training = build(DP2, seed=1)
        train(training, 0, 1)
        keywords = {
            "config": SimpleNamespace(),
            "model_config": None,
            "role": "actor",
            "model": training.model,
            "arch": "Qwen2ForCausalLM",
            "hf_config": None,
            "param_dtype": torch.bfloat16,
            "share_embeddings_and_output_weights": False,
            "tokenizer": None,
            "optimizer": training.optimizer,
            "use_distributed_optimizer": True,
        }
        manager = MegatronCheckpointManager(**keywords, checkpoint_contents=["model", "optimizer"])
        manager.save_checkpoint(local_path=folder, hdfs_path=None, global_step=1, max_ckpt_to_keep=None)
        manager.close()
        at_save = {name: value for name, value in snapshot(training).items() if not name.startswith("generator")}
        poison(training)
        training.scheduler.load_state_dict(training.scheduler.state_dict() | {"num_steps": 0})
        manager = MegatronCheckpointManager(**keywords, checkpoint_contents=["model", "optimizer"])
        manager.load_checkpoint(local_path=folder)
        manager.close()
        found = snapshot(training)
        with everywhere():
            wanted = {name: value for name, value in at_save.items() if not name.startswith("scheduler")}
            assert_same({name: found[name] for name in wanted}, wanted)
            assert not (Path(folder) / "rng_states").exists()
