"""A plain Megatron loop that imports our two functions: through their signatures alone it goes on bit for bit."""

import inspect
import random
import shutil
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, num_microbatches_calculator, parallel_state
from megatron.core import rerun_state_machine as machines
from megatron.core.dist_checkpointing import validation

from mcore_ckpt import CheckpointConfig, FastTier, SavedPart, SaveHandle, set_metrics
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CommitError,
    InvalidArgumentError,
    UnsupportedError,
)
from mcore_ckpt.integrations import megatron as drop_in
from mcore_ckpt.preemption import PreemptionGuard
from mcore_ckpt.steps import listing as steps
from tests.distributed.agreement import error_of, everywhere, raised_everywhere
from tests.distributed.foreign_checkpoints import save_torch_dist, seed_replicas_alike
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, Step, Training, build, parallel, train
from tests.support.commits import branch_in, came_from, is_fork_of
from tests.support.energon_states import energon_classes, state_of_rank

SAMPLES, OPERATIONS = 8, 1.5e12  # of one iteration
PLAIN, DP2 = LAYOUTS["plain"], LAYOUTS["dp2-bf16"]
CONFIG = CheckpointConfig(timeout_s=40.0)
# --optimizer-cpu-offload and --use-precision-aware-optimizer, as most large runs have them; --fp8-param-gather.
OPTIMIZER_SWITCHES: dict[str, dict[str, Any]] = {
    "offloaded": {"offload": 0.5, "precision_aware": True},
    "remainders": {"precision_aware": True, "remainders": True, "moment_dtypes": ("bf16", "fp16")},
    "quantized": {"quantized": "blockwise"},
}
SHOWN = {"offloaded": ("offload", "precision-aware"), "remainders": ("precision-aware",), "quantized": ()}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """The module keeps what it was configured with, as Megatron-LM keeps its arguments."""
    yield
    drop_in.configure(SimpleNamespace(), config=CONFIG)


class Loop:
    """What `pretrain` does with checkpoints: load at the beginning, save every so often, with what Megatron counts."""

    def __init__(self, training: Training, args: SimpleNamespace, config: CheckpointConfig = CONFIG) -> None:
        self.training, self.args = training, args
        vars(args).setdefault("consumed_train_samples", 0)
        drop_in.configure(args, config=config)
        self.iteration, self.operations = 0, 0.0

    def load(self, **options: Any) -> None:
        t = self.training
        self.iteration, self.operations = drop_in.load_checkpoint(
            t.model, t.optimizer, t.scheduler, checkpointing_context={}, **options
        )

    def save(self, **options: Any) -> SaveHandle:
        t = self.training
        return drop_in.save_checkpoint(
            self.iteration, t.model, t.optimizer, t.scheduler, self.operations, {}, **options
        )

    def train(self, iterations: int) -> list[Step]:
        done = train(self.training, self.iteration, self.iteration + iterations)
        self.iteration += iterations
        self.operations += iterations * OPERATIONS
        self.args.consumed_train_samples += iterations * SAMPLES
        return done


def arguments(root: Path, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(save=str(root), load=str(root), **more)


@pytest.mark.world(1)
def test_a_loop_comes_back_from_the_steps_that_only_the_nodes_have(shared_path: Path) -> None:
    """The root has step 2 and the nodes step 3; a loop that saves elsewhere takes the root's."""
    fast = FastTier(shared_path / "node", replicas=0, durable_every=2)
    with parallel(PLAIN):
        loop = Loop(build(PLAIN, seed=1), arguments(shared_path / "root"), replace(CONFIG, fast=fast))
        loop.load()
        for _ in range(3):
            loop.train(1)
            loop.save()
        drop_in.maybe_finalize_async_save(terminate=True)
        at_save = snapshot(loop.training)
        assert [status.step for status in steps.complete_steps(shared_path / "root")] == [2]
        poison(loop.training)
        loop.load()
        assert loop.iteration == 3
        assert_same(snapshot(loop.training), at_save)
        loop.args.save = str(shared_path / "other")
        loop.load()
        assert loop.iteration == 2
        loop.args.save = loop.args.load
        for file in (shared_path / "node").glob("*/*/optim/distrib*.pt"):
            file.unlink()
        shutil.rmtree(shared_path / "root")
        with pytest.raises(CheckpointNotFoundError, match="the fast tier had checkpoints, but none is whole any more"):
            loop.load()


@pytest.mark.shows("Megatron-LM", "save", "resume")
@pytest.mark.parametrize(
    "async_save",
    [
        pytest.param(False, id="sync"),
        pytest.param(True, id="async", marks=pytest.mark.shows("Megatron-LM", "async")),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.world(1)),
        pytest.param(DP2, id="dp2-bf16", marks=pytest.mark.world(2)),
        pytest.param(LAYOUTS["tp2-pp2"], id="tp2-pp2", marks=marks(4, in_ci=False)),
        *(
            pytest.param(
                replace(DP2, **switches),
                id=name,
                marks=(*marks(2, in_ci=False), pytest.mark.shows("Megatron-LM", *SHOWN[name])),
            )
            for name, switches in OPTIMIZER_SWITCHES.items()
        ),
    ],
)
def test_a_plain_loop_goes_on_bit_for_bit(layout: Layout, async_save: bool, shared_path: Path) -> None:
    with parallel(layout):
        first = Loop(build(layout, seed=1), arguments(shared_path, async_save=async_save))
        first.load()
        assert (first.iteration, first.operations) == (0, 0)
        first.train(2)
        first.save()
        drop_in.maybe_finalize_async_save()
        first.train(1)
        first.save()
        at_save = snapshot(first.training)
        reference = first.train(2)
        at_end = snapshot(first.training)
        drop_in.maybe_finalize_async_save(blocking=True, terminate=True)

        second = Loop(build(layout, seed=2), arguments(shared_path, async_save=async_save))
        poison(second.training)
        second.load()
        loaded = snapshot(second.training)
        with everywhere():
            assert (second.iteration, second.operations) == (3, 3 * OPERATIONS)
            assert second.args.consumed_train_samples == 3 * SAMPLES
            assert_same(loaded, at_save)
        resumed = second.train(2)
        finally_ = snapshot(second.training)
        with everywhere():
            assert resumed == reference
            assert_same(finally_, at_end)


@pytest.mark.world(2)
def test_arguments_of_the_load_are_honoured(shared_path: Path) -> None:
    with parallel(DP2):
        first = Loop(build(DP2, seed=1), arguments(shared_path))
        saved = {}
        for _ in range(2):
            first.train(1)
            first.save()
            saved[first.iteration] = snapshot(first.training)

        def loaded(**args: Any) -> tuple[Loop, dict[str, Any]]:
            loop = Loop(build(DP2, seed=2), arguments(shared_path, **args))
            before = snapshot(loop.training)
            loop.load()
            after = snapshot(loop.training)
            # What is neither saved's nor its own would be somebody's mistake.
            return loop, {name: "kept" if same(before, after, name) else "new" for name in after}

        def same(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
            if name not in one:
                return False
            try:
                assert_same({name: one[name]}, {name: other[name]})
            except AssertionError:
                return False
            return True

        older = Loop(build(DP2, seed=2), arguments(shared_path, ckpt_step=1))
        older.load()
        with everywhere():
            assert older.iteration == 1
            assert_same(snapshot(older.training), saved[1])

        finetuned, what = loaded(finetune=True)
        with everywhere():
            # Its operations are counted on, as Megatron-LM does; its samples are not.
            assert (finetuned.iteration, finetuned.operations) == (0, 2 * OPERATIONS)
            assert finetuned.args.consumed_train_samples == 0
            assert {what[name] for name in what if name.startswith("scheduler.num_steps")} == {"kept"}
            assert what["generator.torch"] == what["generator.python"] == "kept"
            weights = {what[name] for name in what if name.endswith("linear_fc1.weight")}
            assert weights == {"new"}

        without_optimizer, what = loaded(no_load_optim=True)
        with everywhere():
            assert without_optimizer.iteration == 2
            assert what["scheduler.num_steps"] == "kept"
            assert what["generator.torch"] == "new"
        without_rng, what = loaded(no_load_rng=True)
        with everywhere():
            assert without_rng.iteration == 2
            assert what["scheduler.num_steps"] == "new"
            assert what["generator.torch"] == what["generator.python"] == "kept"


@pytest.mark.world(1)
def test_arguments_of_the_save_are_honoured(shared_path: Path) -> None:
    with parallel(PLAIN):
        bare = Loop(build(PLAIN, seed=1), arguments(shared_path, no_save_optim=True, no_save_rng=True))
        bare.train(1)
        bare.save()
        checkpoint = shared_path / "global_steps_1" / "actor"
        assert not (checkpoint / "optim").exists()

        loop = Loop(build(PLAIN, seed=2), arguments(shared_path))
        with pytest.raises(CheckpointError, match="optimizer"):
            loop.load()
        loop.args.no_load_optim = True
        before = torch.get_rng_state(), random.getstate()
        loop.load()
        assert loop.iteration == 1
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]


@pytest.mark.shows("Megatron-LM", "retention")
@pytest.mark.world(1)
def test_save_retain_interval_keeps_the_newest_and_the_multiples(shared_path: Path) -> None:
    with parallel(PLAIN):
        loop = Loop(build(PLAIN, seed=1), arguments(shared_path, save_retain_interval=2))
        for _ in range(5):
            loop.train(1)
            loop.save()
            drop_in.maybe_finalize_async_save(blocking=True)
        assert [status.step for status in steps.complete_steps(shared_path)] == [2, 4, 5]


@pytest.mark.world(1)
def test_saves_go_on_from_what_was_loaded(shared_path: Path) -> None:
    """A resume, a rollback, and a run that begins with a step of another one."""
    root, other = shared_path / "root", shared_path / "other"
    with parallel(PLAIN):
        training = build(PLAIN, seed=1)

        def live(*iterations: int, save: Path = root, **more: Any) -> None:
            loop = Loop(
                training, SimpleNamespace(load=str(root), save=str(save), **more), replace(CONFIG, max_to_keep=2)
            )
            loop.load()
            for loop.iteration in iterations:
                loop.save()

        live(90, 100)
        live(95, ckpt_step=90)
        live(96)
        live(7, save=other, finetune=True)

    def at(step: int, of: Path = root) -> Path:
        return of / f"global_steps_{step}" / "actor"

    assert [status.step for status in steps.complete_steps(root)] == [95, 96]
    assert came_from(at(96), at(95))
    assert branch_in(at(96)) == ((1, 1), (3, 4))
    assert is_fork_of(at(7, other), at(96))


@pytest.mark.world(2)
def test_nothing_to_load_is_the_beginning_and_something_bad_is_an_error(shared_path: Path) -> None:
    with parallel(DP2):
        training = build(DP2, seed=1)
        for args in (arguments(shared_path / "new"), SimpleNamespace(save=str(shared_path))):
            loop = Loop(training, args)
            loop.load()
            assert (loop.iteration, loop.operations) == (0, 0)
        loop = Loop(training, arguments(shared_path / "new", exit_on_missing_checkpoint=True))
        raised_everywhere(CheckpointNotFoundError, error_of(loop.load))

        loop = Loop(training, arguments(shared_path))
        loop.train(1)
        loop.save()
        drop_in.maybe_finalize_async_save(terminate=True)
        if dist.get_rank() == 0:
            (shared_path / "global_steps_1" / "actor" / "manifest.json").unlink()
        dist.barrier()
        messages = raised_everywhere(CheckpointNotFoundError, error_of(Loop(training, arguments(shared_path)).load))
        assert "global_steps_1" in messages[0]


@pytest.mark.world(2)
def test_a_pretrained_checkpoint_is_finetuned_until_there_is_one_of_its_own(shared_path: Path) -> None:
    """Until then the training begins, and so takes no part of the pretrained step, and needs none."""
    given: list[SavedPart] = []

    def started(seed: int, root: str, **more: Any) -> Loop:
        loop = Loop(build(DP2, seed=seed), arguments(shared_path / root, **more))
        drop_in.attach("rollouts", save=lambda _: root.encode(), load=given.append)
        return loop

    with parallel(DP2):
        first = started(1, "pretrained")
        first.train(2)
        first.save()
        more = {"pretrained_checkpoint": str(shared_path / "pretrained")}
        second = started(2, "own", **more)
        drop_in.attach("not_in_the_pretrained_step", save=lambda _: b"", load=given.append)
        second.load()
        assert second.iteration == 0
        assert second.args.finetune is True
        assert given == []
        second.args.finetune = False
        second.train(1)
        second.save()
        third = started(3, "own", **more)
        third.load()
        assert third.iteration == 1
        assert [part.step for part in given] == [1]
        assert not hasattr(third.args, "finetune")
        missing = {"pretrained_checkpoint": str(shared_path / "nowhere")}
        loop = Loop(third.training, arguments(shared_path / "new", **missing))
        messages = raised_everywhere(CheckpointNotFoundError, error_of(loop.load))
        assert "nowhere" in messages[0]


@pytest.mark.shows("Megatron-LM", "moving over")
@pytest.mark.world(2)
def test_a_run_of_megatron_lm_goes_on_without_being_converted(shared_path: Path) -> None:
    """`iter_0000003` and its tracker are what Megatron-LM has left; the first save of ours is the newer one after."""
    with parallel(DP2):
        first = Loop(build(DP2, seed=1), arguments(shared_path))
        seed_replicas_alike()  # it keeps the generators of one replica
        first.train(3)
        told = {"consumed_train_samples": 24, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        more = {"iteration": 3, "num_floating_point_operations_so_far": 4.5e12, "args": SimpleNamespace(**told)}
        save_torch_dist(first.training, shared_path / "iter_0000003", "dp_reshardable", **more)
        if dist.get_rank() == 0:
            (shared_path / "latest_checkpointed_iteration.txt").write_text("3")
        dist.barrier()
        at_save = snapshot(first.training)

        second = Loop(build(DP2, seed=2), arguments(shared_path))
        second.load()
        loaded = snapshot(second.training)
        with everywhere():
            assert (second.iteration, second.operations) == (3, 4.5e12)
            assert second.args.consumed_train_samples == 24
            assert_same(loaded, at_save)
        second.train(1)
        second.save()
        third = Loop(build(DP2, seed=3), arguments(shared_path))
        third.load()
        assert third.iteration == 4
        named = Loop(third.training, arguments(shared_path, ckpt_step=3))
        named.load()
        assert named.iteration == 3


@pytest.mark.world(2)
@pytest.mark.parametrize("verify", [False, True])
def test_verify_integrity_checks_what_no_rank_needs_too(verify: bool, shared_path: Path) -> None:
    """Here a file of optimizer states is damaged, which a load without the optimizer does not read."""
    with parallel(DP2):
        loop = Loop(build(DP2, seed=1), arguments(shared_path))
        loop.train(1)
        loop.save()
        with everywhere():
            if dist.get_rank() == 0:
                optimizer = shared_path / "global_steps_1" / "actor" / "optim" / "distrib_optim_pp0_tp0_cp0_dp0.pt"
                flip_a_byte_of(optimizer)
        second = Loop(build(DP2, seed=2), arguments(shared_path, no_load_optim=True, verify_integrity=verify))
        if verify:
            with pytest.raises(CheckpointCorruptError, match="distrib_optim"):
                second.load()
        else:
            second.load()
            assert second.iteration == 1


@pytest.mark.skipif(
    "verify_integrity" not in inspect.signature(dist_checkpointing.save).parameters,
    reason="this megatron-core writes no digests",
)
@pytest.mark.world(2)
def test_verify_integrity_asks_for_the_digests_of_megatron_lm(shared_path: Path) -> None:
    with parallel(DP2):
        first = Loop(build(DP2, seed=1), arguments(shared_path))
        first.train(1)
        folder = shared_path / "iter_0000003"
        save_torch_dist(first.training, folder, "dp_reshardable", iteration=3)
        if dist.get_rank() == 0:
            (shared_path / "latest_checkpointed_iteration.txt").write_text("3")
        dist.barrier()
        second = Loop(build(DP2, seed=2), arguments(shared_path, verify_integrity=True, no_load_rng=True))
        with pytest.raises(CheckpointCorruptError, match=r"leave out args\.verify_integrity"):
            second.load()
        if dist.get_rank() == 0:
            validation.save_integrity_manifest(str(folder))
        dist.barrier()
        second.load()
        assert second.iteration == 3


def flip_a_byte_of(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.world(2)
def test_what_cannot_be_honoured_is_refused_by_name(shared_path: Path) -> None:
    with parallel(DP2):
        loop = Loop(build(DP2, seed=1), arguments(shared_path))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        refused = {
            "non_persistent_ckpt": True,
            "release": True,
            "rng_state_key_prefix": "vision.",
            "tensor_rank": 1,
            "pipeline_rank": 1,
            "expert_rank": 1,
            "pipeline_parallel": True,
            "expert_parallel": True,
            "dp_group": alone,
            "dp_cp_group": alone,
        }
        for name, value in refused.items():
            with pytest.raises(UnsupportedError, match=name):
                loop.save(**{name: value})
        refused = {"strict": False, "skip_load_to_model_and_opt": True, "rng_state_key_prefix": "vision."}
        for name, value in {**refused, "dp_group": alone}.items():
            with pytest.raises(UnsupportedError, match=name):
                loop.load(**{name: value})
        loop.args.non_persistent_ckpt_type = "local"
        for work in (loop.save, loop.load):
            with pytest.raises(UnsupportedError, match="non_persistent_ckpt_type"):
                work()
        del loop.args.non_persistent_ckpt_type
        for name in ("torch_dcp", "fsdp_dtensor"):
            loop.args.ckpt_format = name
            with pytest.raises(UnsupportedError, match=f"ckpt_format is '{name}'"):
                loop.save()
        loop.args.ckpt_format = "torch_dist"
        loop.args.dataloader_save = "somewhere"
        with pytest.raises(UnsupportedError, match="save_state"):
            loop.save(train_data_iterator=iter([]))
        with everywhere():
            assert not list(shared_path.iterdir())

        loop.args.dataloader_save = None
        own = {
            "tensor_rank": 0,
            "pipeline_rank": 0,
            "expert_rank": 0,
            "pipeline_parallel": False,
            "expert_parallel": False,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_group": parallel_state.get_data_parallel_group(),
        }
        loop.save(**own, preprocess_common_state_dict_fn=dict)
        dist.barrier()
        loop.load(dp_group=own["dp_group"])
        dist.destroy_process_group(alone)


@pytest.mark.world(2)
def test_what_is_wrong_on_one_rank_is_told_to_all(shared_path: Path) -> None:
    layout = LAYOUTS["tp2"]
    with parallel(layout):
        loop = Loop(build(layout, seed=1), arguments(shared_path))
        groups = [dist.new_group([rank]) for rank in range(2)]
        first = groups[0] if dist.get_rank() == 0 else None
        for work in (
            lambda: loop.save(tensor_rank=0),
            lambda: loop.save(tp_group=first),
            lambda: loop.load(tp_group=first),
        ):
            raised_everywhere(UnsupportedError, error_of(work))
        # And all are in step.
        loop.save()
        loop.load()
        for group in groups:
            dist.destroy_process_group(group)


@pytest.mark.world(1)
def test_arguments_are_megatron_s_own_where_it_is_installed(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel(PLAIN):
        loop = Loop(build(PLAIN, seed=1), arguments(shared_path / "unused"))
        drop_in.configure(config=CONFIG)
        with pytest.raises(RuntimeError, match="configure"):
            loop.save()
        trainer: Any = types.ModuleType("megatron.training")
        trainer.get_args = lambda: own
        monkeypatch.setitem(sys.modules, "megatron.training", trainer)
        own = arguments(shared_path / "own", consumed_train_samples=5)
        loop.save()
        own.consumed_train_samples = 0
        loop.load()
        assert own.consumed_train_samples == 5
        assert (shared_path / "own" / "global_steps_0").is_dir()
        own.save = None
        with pytest.raises(ValueError, match=r"args\.save"):
            loop.save()


@pytest.mark.world(1)
def test_the_batch_size_goes_on_growing_from_the_samples_consumed(shared_path: Path) -> None:
    init = num_microbatches_calculator.init_num_microbatches_calculator
    # megatron 0.18 replaced the ramp by a schedule.
    if "step_batch_size_schedule" in inspect.signature(init).parameters:
        init(0, None, 6, 2, 1, False, step_batch_size_schedule="0:2 4:4 8:6")
    else:
        init(0, [2, 2, 8], 6, 2, 1, False)
    try:
        with parallel(PLAIN):
            first = Loop(build(PLAIN, seed=1), arguments(shared_path))
            first.args.consumed_train_samples = 5
            first.save()
            assert num_microbatches_calculator.get_num_microbatches() == 1
            Loop(build(PLAIN, seed=2), arguments(shared_path)).load()
            assert num_microbatches_calculator.get_num_microbatches() == 2
    finally:
        num_microbatches_calculator.destroy_num_microbatches_calculator()


@pytest.mark.world(1)
def test_the_best_steps_of_a_loop_that_saves_in_the_background(shared_path: Path) -> None:
    """docs/how_to/retention.md: the metric is known after the save, whose commit is still under way."""
    config = replace(CONFIG, max_to_keep=1, keep_best="reward:1:max")
    with parallel(PLAIN):
        loop = Loop(build(PLAIN, seed=1), arguments(shared_path, async_save=True), config)
        for reward in (0.5, 0.9, 0.1, 0.3):
            loop.train(1)
            loop.save()
            set_metrics(loop.args.save, loop.iteration, {"reward": reward}, wait_s=600)
        drop_in.maybe_finalize_async_save(terminate=True)
        assert [status.step for status in steps.complete_steps(shared_path)] == [2, 4]


@pytest.mark.world(1)
def test_a_guard_saves_as_the_loop_does(shared_path: Path) -> None:
    """docs/how_to/preemption.md. The machine goes before a second step has been saved."""
    with parallel(PLAIN):
        loop = Loop(build(PLAIN, seed=1), arguments(shared_path))
        t = loop.training
        manager = drop_in.saving_manager(t.model, t.optimizer, t.scheduler)
        save = {"save": lambda iteration: loop.save(), "signals": (), "training_ends_in_s": 50.0}
        with PreemptionGuard(manager, **save) as guard:
            while not guard.should_stop(loop.iteration):
                loop.train(1)
        assert drop_in.saving_manager(t.model, t.optimizer, t.scheduler) is manager
        assert [status.step for status in steps.complete_steps(shared_path)] == [loop.iteration]
        again = Loop(build(PLAIN, seed=2), arguments(shared_path))
        again.load()
        assert (again.iteration, again.operations) == (loop.iteration, loop.operations)


class Loader:
    """One that is not Energon's: its state is of plain values."""

    def save_state(self) -> dict[str, Any]:
        return {"rank": dist.get_rank(), "at": 7}


@pytest.mark.world(2)
def test_the_data_loaders_state_is_in_the_checkpoint(shared_path: Path) -> None:
    with parallel(DP2):
        loop = Loop(build(DP2, seed=1), arguments(shared_path, dataloader_save="wherever"))
        assert_position_comes_back(loop, shared_path)


def assert_position_comes_back(loop: Loop, root: Path) -> None:
    """A save of this loop and a load of another bring the position of the data loader back."""
    loop.save(train_data_iterator=SimpleNamespace(iterable=Loader()))
    second = Loop(build(DP2, seed=2), arguments(root))
    second.load()
    with everywhere():
        assert drop_in.loaded_dataloader_state() == {"rank": dist.get_rank(), "at": 7}


@pytest.mark.shows("Megatron-LM", "other layout")
@pytest.mark.world(2)
def test_the_data_loaders_state_under_another_data_parallel_size(
    shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM's wrappers of Energon return `save_state_rank()` from `save_state` (EnergonDataloader)."""
    classes, rank = energon_classes(monkeypatch), dist.get_rank()
    states = [state_of_rank(classes, each, workers=1) for each in range(2)]
    roots = {"energon": shared_path / "energon", "plain": shared_path / "plain"}
    loaders = {"energon": SimpleNamespace(save_state=lambda: states[rank]), "plain": Loader()}
    same = {"padded_vocab": 144, "global_batch": 8, "dropout": 0.0}
    with parallel(two := Layout(2, **same)):
        for name, root in roots.items():
            loop = Loop(build(two, seed=1), arguments(root, dataloader_save="wherever"))
            loop.save(train_data_iterator=SimpleNamespace(iterable=loaders[name]))
            loop.load()
            found = drop_in.loaded_dataloader_state()
            with everywhere():
                assert repr(found) == repr(loaders[name].save_state())
    with parallel(one := Layout(2, tp=2, **same)):
        loop = Loop(build(one, seed=2), arguments(roots["energon"]))
        loop.load()
        found = drop_in.loaded_dataloader_state()
        with everywhere():
            assert isinstance(found, classes["SavableDataLoaderState"])
            assert repr(found.worker_states) == repr([state.worker_states[0] for state in states])
        before = snapshot(loop.training)
        plain = Loop(loop.training, arguments(roots["plain"]))
        for message in raised_everywhere(CheckpointMismatchError, error_of(plain.load)):
            assert "of 2 data-parallel ranks, and this training has 1" in message
            assert "configure(other_data_size='begin_anew')" in message
        assert_same(snapshot(loop.training), before)
        for rule, wanted in {"begin_anew": None, "as_saved": {"rank": 0, "at": 7}}.items():
            drop_in.configure(plain.args, config=CONFIG, other_data_size=rule)
            plain.load()
            with everywhere():
                assert drop_in.loaded_dataloader_state() == wanted


@pytest.mark.world(1)
def test_a_rule_for_other_data_sizes_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"other_data_size is 'anew'.*'begin_anew'"):
        drop_in.configure(SimpleNamespace(), other_data_size="anew")


@pytest.mark.world(2)
def test_a_data_loader_that_fails_on_one_rank_is_told_to_all(shared_path: Path) -> None:
    """The others would wait for it until the deadline."""

    class Broken(Loader):
        def save_state(self) -> dict[str, Any]:
            if dist.get_rank() == 1:
                raise RuntimeError("a worker of the data loader has died")
            return super().save_state()

    with parallel(DP2):
        loop = Loop(build(DP2, seed=1), arguments(shared_path, dataloader_save="wherever"))
        error = error_of(lambda: loop.save(train_data_iterator=SimpleNamespace(iterable=Broken())))
        for message in raised_everywhere(CommitError, error):
            assert "extra_state could not be read: RuntimeError: a worker of the data loader has died" in message
        assert_position_comes_back(loop, shared_path)


@pytest.mark.world(2)
def test_a_step_that_is_to_be_run_again_is(shared_path: Path) -> None:
    """The rerun state machine asks for a checkpoint when a result was not what it was before."""
    with parallel(DP2):
        loop = Loop(build(DP2, seed=1), arguments(shared_path))
        machines.initialize_rerun_state_machine(mode=machines.RerunMode.VALIDATE_RESULTS)
        try:
            machine = machines.get_rerun_state_machine()
            call = machines.Call(machines.Caller("loss", dist.get_rank()), 3)
            machine.state = machines.RerunState.WILL_RERUN_FROM_CHECKPOINT
            machine.failed_validation_call, machine.initial_result = call, 2.5
            machine.current_iteration = 9
            data = machines.RerunDataIterator(iter([torch.arange(3), torch.arange(4)]))
            next(data)
            loop.save(train_data_iterator=data)
            machines.destroy_rerun_state_machine()
            machines.initialize_rerun_state_machine(mode=machines.RerunMode.VALIDATE_RESULTS)
            Loop(build(DP2, seed=2), arguments(shared_path)).load()
            found = machines.get_rerun_state_machine()
            with everywhere():
                assert found is not machine
                assert found.state is machines.RerunState.WILL_RERUN_FROM_CHECKPOINT
                assert found.mode is machines.RerunMode.VALIDATE_RESULTS
                assert found.failed_validation_call == call
                assert type(found.failed_validation_call) is machines.Call
                assert (found.initial_result, found.current_iteration) == (2.5, 9)
                (kept,) = found.data_iterator_checkpoints
                assert [batch.tolist() for batch in kept["saved_microbatches"]] == [[0, 1, 2]]
        finally:
            machines.destroy_rerun_state_machine()


@pytest.mark.world(2)
def test_a_save_that_fails_beside_the_training_is_told(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel(DP2):
        loop = Loop(build(DP2, seed=1), arguments(shared_path, async_save=True))
        loop.save()
        drop_in.maybe_finalize_async_save(blocking=True)
        with monkeypatch.context() as patched:
            patched.setattr("mcore_ckpt.steps.commit.write_manifest", broken)
            loop.iteration = 1
            loop.save()
            drop_in.maybe_finalize_async_save()  # it may not have ended yet
            error = error_of(lambda: drop_in.maybe_finalize_async_save(blocking=True))
        with everywhere():
            assert "no space" in str(error)
        loop.save()
        drop_in.maybe_finalize_async_save(blocking=True)
        assert [status.step for status in steps.complete_steps(shared_path)] == [0, 1]


def broken(*args: Any) -> None:
    raise OSError(28, "no space left")


@pytest.mark.world(1)
def test_a_changed_argument_makes_another_manager(shared_path: Path) -> None:
    with parallel(PLAIN):
        loop = Loop(build(replace(PLAIN, precision="bf16"), seed=1), arguments(shared_path / "a"))
        loop.save()
        loop.args.save = str(shared_path / "b")
        loop.save()
        assert all((shared_path / name / "global_steps_0" / "actor").is_dir() for name in "ab")
