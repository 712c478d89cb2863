"""slime and miles: saved, killed, resumed through their own calls, bit for bit; see slime_run.py for what is real."""

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from mcore_ckpt import CheckpointManager
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError, UnsupportedError
from mcore_ckpt.ranks import rendezvous
from mcore_ckpt.steps import complete_steps
from mcore_ckpt.tools.convert.for_trainers.convert import convert_for_trainer
from tests.distributed.adapters import FROZEN, with_adapters
from tests.distributed.agreement import everywhere
from tests.distributed.foreign_checkpoints import save_torch_dist, seed_replicas_alike
from tests.distributed.global_state import loss_and_norm
from tests.distributed.layouts import LAYOUTS
from tests.distributed.megatron_lm import poison_for_megatron, ready_to_load
from tests.distributed.slime_run import Run, arguments, installed
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.test_verl_manager import with_value_head
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train
from tests.support.commits import came_from, is_fork_of
from tests.support.document_examples import run_in_shell
from tests.support.fused_adam import fused_adam
from tests.support.walk import block, section

DP2 = LAYOUTS["dp2-bf16"]
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"offload": 0.5, "precision_aware": True},
    "remainders": {"precision_aware": True, "remainders": True, "moment_dtypes": ("bf16", "fp16")},
}


def beginning(layout: Layout, folder: Path) -> Path:
    """Weights of another training, for `--ref-load`, as slime's `convert_hf_to_torch_dist.py` leaves them."""
    training = build(layout, seed=9)
    train(training, 0, 1)  # Megatron-LM cannot save an optimizer before its first step
    save_torch_dist(training, folder / "release", "dp_reshardable", iteration=1)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("release")
    dist.barrier()
    return folder


# The columns of docs/compatibility.md that the switches show.
SHOWN = {"plain": (), "offloaded": ("offload", "precision-aware"), "remainders": ("precision-aware",)}
IN_CI = (("slime", "plain", True), ("miles", "plain", False), ("slime", "offloaded", True))


def resumed(fork: str, switches: str, async_save: bool) -> Any:
    """A case, with what it shows."""
    shown = ("save", "resume", *(("async",) if async_save else ()), *SHOWN[switches])
    chosen = marks(2, (fork, switches, async_save) in IN_CI)
    return pytest.param(fork, switches, async_save, marks=(*chosen, pytest.mark.shows(fork, *shown)))


def each_fork(*shown: str) -> pytest.MarkDecorator:
    """Runs a test with slime in CI, and with miles in --full."""
    cases = [
        pytest.param(fork, marks=(pytest.mark.shows(fork, *shown), *marks(2, in_ci=fork == "slime")))
        for fork in ("slime", "miles")
    ]
    return pytest.mark.parametrize("fork", cases)


@pytest.mark.parametrize(
    ("fork", "switches", "async_save"),
    [resumed(fork, switches, how) for fork in ("slime", "miles") for switches in SWITCHES for how in (True, False)],
)
def test_a_run_goes_on_bit_for_bit(fork: str, switches: str, async_save: bool, shared_path: Path) -> None:
    layout = replace(DP2, **SWITCHES[switches])
    with parallel(layout), installed(fork) as patched:
        # The beginning is plain: Megatron-LM has no checkpoints of such optimizers to start from.
        start = beginning(DP2, shared_path / "ref")
        more = {"ref_load": str(start), "async_save": async_save, "save_interval": 2}
        first = Run(layout, arguments(layout, shared_path / "run", fork, **more), patched, fork)
        assert first.start() == 0
        first.go(0, 4)
        at_save = snapshot(first.training)
        reference = first.go(4, 6)
        first.finish()  # the second run is another process, which no file of the first may surprise
        discard(shared_path / "run", 5)

        second = Run(layout, arguments(layout, shared_path / "run", fork, **more), patched, fork, seed=2, spoil=poison)
        begins = second.start()
        loaded = snapshot(second.training)
        with everywhere():
            assert begins == 4
            assert_same(loaded, at_save)
        resumed = second.go(4, 6, num_rollout=6)
        with everywhere():
            assert resumed == reference
            assert first.samples[4:] == second.samples
            assert [status.step for status in complete_steps(shared_path / "run")] == [1, 3, 5]
        second.finish()


def discard(root: Path, step: int) -> None:
    """As if the run had died before this step was committed."""
    if dist.get_rank() == 0:
        shutil.rmtree(root / f"global_steps_{step}")
        (root / "rollout" / f"global_dataset_state_dict_{step}.pt").unlink()
    dist.barrier()


@each_fork("retention")
def test_the_words_keep_their_meaning(fork: str, shared_path: Path) -> None:
    root = shared_path / "run"
    with parallel(DP2), installed(fork) as patched:
        start = beginning(DP2, shared_path / "ref")

        def run(**more: Any) -> Run:
            args = arguments(DP2, root, fork, ref_load=str(start), **more)
            made = Run(DP2, args, patched, fork, seed=2, spoil=poison)
            made.first = made.start()  # type: ignore[attr-defined]
            return made

        weights = snapshot(run(save_interval=9).training)
        reference = Run(DP2, arguments(DP2, shared_path / "other", fork, ref_load=str(start)), patched, fork, seed=3)
        reference.start()
        with everywhere():
            models = [name for name in weights if name.endswith("weight") and "optimizer" not in name]
            assert_same({n: snapshot(reference.training)[n] for n in models}, {n: weights[n] for n in models})

        saving = run(no_save_optim=True, mcore_ckpt={"max_to_keep": 2, "timeout_s": 40.0})
        saving.go(0, 4)
        saving.finish()
        with everywhere():
            assert [status.step for status in complete_steps(root)] == [2, 3]
            assert not (root / "global_steps_3" / "actor" / "optim").exists()
        older = run(ckpt_step=2, no_load_optim=True)
        newest = run(no_load_optim=True)
        tuned = run(finetune=True)
        assert (older.first, newest.first, tuned.first) == (3, 4, 0)  # type: ignore[attr-defined]
        assert newest.source.sample_offset == 32
        # Retention counts what an earlier life has left.
        again = run(no_load_optim=True, mcore_ckpt={"max_to_keep": 2, "timeout_s": 40.0})
        again.go(4, 5)
        again.finish()
        with everywhere():
            assert [status.step for status in complete_steps(root)] == [3, 4]


@pytest.mark.world(1)
def test_a_strangers_walk(shared_path: Path) -> None:
    """docs/integrations.md alone: switch over, kill and resume, look, move over and go back, as its lines say."""
    text, loop = section("integrations.md", "slime and miles"), section("integrations.md", "Megatron's own loop")
    option, path, second, data_source = block(text, "", "--custom-megatron-init-path").split()
    options = yaml.safe_load(block(text, "yaml", "mcore_ckpt"))
    command = block(loop, "bash", "mcore-ckpt convert")
    assert (option, second) == ("--custom-megatron-init-path", "--data-source-path")
    layout, root = replace(LAYOUTS["plain"], distributed_optimizer=False), shared_path / "CHECKPOINTS"
    wanted = {**options["mcore_ckpt"], "save_contents": ["model", "optimizer", "extra"]}  # the tests' model has no name

    def arguments_of(folder: Path, **more: Any) -> Any:
        ours = {"custom_megatron_init_path": path, "data_source_path": data_source}
        told = {**ours, "mcore_ckpt": wanted, "save_interval": 2, **more}
        return arguments(layout, folder, ref_load=str(shared_path / "ref"), **told)

    with parallel(layout), installed("slime") as patched:
        beginning(layout, shared_path / "ref")
        stock = {"custom_megatron_init_path": None, "data_source_path": "slime.rollout.data_source.RolloutDataSource"}
        own = Run(layout, arguments_of(root, **stock), patched)
        own.start()
        train(own.training, 0, 2)  # as slime itself: its checkpoint, its data position
        own.source.get_samples(16)
        own.source.save(1)
        state = {"iteration": 1, "num_floating_point_operations_so_far": 0, "args": arguments_of(root)}
        save_torch_dist(own.training, root / "iter_0000001", "dp_reshardable", **state)
        (root / "latest_checkpointed_iteration.txt").write_text("1")
    with parallel(layout), installed("slime") as patched:
        moved = Run(layout, arguments_of(root), patched, seed=2, spoil=poison)
        assert moved.start() == 2
        moved.go(2, 5)  # killed before the step that follows is saved
        moved.finish()
        resumed = Run(layout, arguments_of(root), patched, seed=3, spoil=poison)
        assert resumed.start() == 4
        at_save, reference = snapshot(resumed.training), train(resumed.training, 4, 5)
        typed = run_in_shell(f"mcore-ckpt list CHECKPOINTS && {command}", shared_path, {})
        assert typed.returncode == 0, typed.stderr
        assert "global_steps_3" in typed.stdout
        shutil.copytree(root / "global_steps_3" / "rollout", shared_path / "BACK" / "rollout")
    args = arguments_of(shared_path / "BACK", data_parallel_random_init=False, **stock)
    with parallel(layout), installed("slime") as patched, ready_to_load(args):
        back = Run(layout, args, patched, seed=4, spoil=poison_for_megatron)
        assert back.start() == 4
        assert back.source.sample_offset == 32
        assert_same(snapshot(back.training), at_save)
        assert train(back.training, 4, 5) == reference


@pytest.mark.world(2)
def test_weights_and_data_position_go_back_together(shared_path: Path) -> None:
    """The driver died between the two: slime itself would use the data from its beginning again."""
    root = shared_path / "run"
    with parallel(DP2), installed("slime") as patched:
        more = {"ref_load": str(beginning(DP2, shared_path / "ref"))}
        first = Run(DP2, arguments(DP2, root, **more), patched)
        first.go(first.start(), 3)
        data = root / "rollout" / "global_dataset_state_dict_2.pt"
        dist.barrier()
        cut = data.read_bytes()[:-100]
        for spoilt in (lambda: data.write_bytes(cut), data.unlink):
            if dist.get_rank() == 0:
                spoilt()
            dist.barrier()
            second = Run(DP2, arguments(DP2, root, **more), patched, seed=2)
            assert second.start() == 2
            assert second.source.sample_offset == 16
        # The old actor of --keep-old-actor is of the step that the actor has.
        weights = snapshot(second.training)
        poison(second.training)
        second.actor.load_other_checkpoint("old_actor", str(root))
        found = snapshot(second.training)
        models = [name for name in found if name.endswith("weight") and "optimizer" not in name]
        with everywhere():
            assert_same({name: found[name] for name in models}, {name: weights[name] for name in models})
        named = Run(DP2, arguments(DP2, root, ckpt_step=2, **more), patched, seed=2)
        assert named.start() == 3
        if dist.get_rank() == 0:
            data.with_name("global_dataset_state_dict_1.pt").write_bytes(b"cut")
            data.with_name("global_dataset_state_dict_0.pt").unlink()
        dist.barrier()
        last = Run(DP2, arguments(DP2, root, **more), patched, seed=3)
        with pytest.raises(CheckpointNotFoundError, match="set --ckpt-step 2"):
            last.start()


@each_fork("parts")
def test_weights_position_and_buffer_are_one_step(fork: str, shared_path: Path) -> None:
    """With our data source. The driver dies between the two; then it goes back, and saves a step again."""
    root, more = shared_path / "run", {"async_save": True, "mcore_ckpt": {"timeout_s": 40.0, "max_to_keep": 1}}
    more["data_source_path"] = f"mcore_ckpt.integrations.{fork}.data_source.DataSource"
    with parallel(DP2), installed(fork) as patched:
        more["ref_load"] = str(beginning(DP2, shared_path / "ref"))
        sample = import_module(f"{fork}.utils.types").Sample

        def live(last: int, seed: int, **args: Any) -> tuple[Run, int]:
            run = Run(DP2, arguments(DP2, root, fork, **more, **args), patched, fork, seed=seed, spoil=poison)
            first = run.start()
            run.source.add_samples([[sample(index=seed)]])
            run.go(first, last)
            return run, first

        first, _ = live(2, 1)
        first.source.save = lambda rollout_id: None  # the driver dies between the two
        first.go(2, 3)
        first.finish()
        with everywhere():
            assert [status.step for status in complete_steps(root)] == [1]
            assert not (root / "rollout").exists()
        second, begins = live(4, 2)
        second.finish()
        with everywhere():
            assert begins == 2
            # Retention kept the step that was complete, and looks again at the next save.
            assert [status.step for status in complete_steps(root)][-1] == 3
        third, begins = live(4, 3, ckpt_step=3)
        with everywhere():
            assert begins == 4
            assert third.source.sample_offset == second.source.sample_offset
            assert third.source.sample_offset < 4 * 8  # some samples came from the buffer
        third.actor.save_model(3)  # saved again: it waits for its own position
        third.finish()
        with everywhere():
            assert 3 not in [status.step for status in complete_steps(root)]
        if dist.get_rank() == 0:
            third.source.save(3)
        dist.barrier()
        with everywhere():
            assert complete_steps(root)[-1].step == 3


@pytest.mark.world(2)
def test_the_step_zero_is_a_step(shared_path: Path) -> None:
    root = shared_path / "run"
    with parallel(DP2), installed("slime") as patched:
        more = {"ref_load": str(beginning(DP2, shared_path / "ref"))}
        first = Run(DP2, arguments(DP2, root, **more), patched)
        first.go(first.start(), 2)
        dist.barrier()
        if dist.get_rank() == 0:
            (root / "rollout" / "global_dataset_state_dict_1.pt").unlink()
        dist.barrier()
        assert Run(DP2, arguments(DP2, root, **more), patched, seed=2).start() == 1


@pytest.mark.world(1)
@pytest.mark.parametrize("fork", ["slime", "miles"])
def test_a_critic_starts_from_a_language_model(fork: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is its own, and the fork makes it anew. miles gives the critic a folder of its own."""
    plain, root = LAYOUTS["plain"], shared_path / "run"
    with parallel(plain), installed(fork) as patched:
        start = beginning(plain, shared_path / "ref")
        language = Run(plain, arguments(plain, root, fork, ref_load=str(start)), patched, fork)
        language.start()
        wanted = snapshot(language.training)
        with_value_head(monkeypatch)
        args = arguments(plain, shared_path / "run_critic", fork, ref_load=str(start), use_critic=True)
        critic = Run(plain, args, patched, fork, role="critic", seed=2)
        assert critic.start() == 0
        found = snapshot(critic.training)
        head = "chunk0.output_layer.weight"
        names = [name for name in wanted if name.startswith("chunk0.") and name != head]
        assert_same({name: found[name] for name in names}, {name: wanted[name] for name in names})
        assert found[head].shape[0] == 1
        assert all(parameter.requires_grad for parameter in critic.training.model[0].parameters())
        critic.actor.save_model(0)
        critic.finish()
        counts = [status.step for status in complete_steps(shared_path / "run_critic")]
        assert counts == ([0] if fork == "miles" else [])  # slime's step has the actor, too


@pytest.mark.world(1)
@pytest.mark.parametrize("fork", ["slime", "miles"])
def test_saves_go_on_from_what_was_loaded(fork: str, shared_path: Path) -> None:
    """From the actor's step, in a resume, a rollback and at the beginning; never from the reference model's."""
    plain, start, root = LAYOUTS["plain"], shared_path / "start", shared_path / "run"
    with parallel(plain), installed(fork) as patched:
        training = build(plain, seed=1)
        manager = CheckpointManager(start, training.model, training.optimizer, training.scheduler)
        manager.save(7)
        manager.close()

        def live(*rollouts: int, **more: Any) -> None:
            reference = {"ref_load": str(start), "ref_ckpt_step": 7}
            args = arguments(plain, root, fork, **reference, rollout_global_dataset=False, **more)
            run = Run(plain, args, patched, fork, with_ref=True)
            run.start()
            for rollout in rollouts:
                run.actor.save_model(rollout)
            run.finish()

        live(0, 1)
        live(2)
        live(3, ckpt_step=1)
    actor = {step: root / f"global_steps_{step}" / "actor" for step in range(4)}
    assert is_fork_of(actor[0], start / "global_steps_7" / "actor")
    assert came_from(actor[2], actor[1])
    assert came_from(actor[3], actor[1])
    assert [status.step for status in complete_steps(root)] == [2, 0, 1, 3]


@each_fork("other layout", "moving over")
def test_another_layout_moving_over_and_a_reference_model(fork: str, shared_path: Path) -> None:
    """slime's own `iter_0000003` is loaded, the next save is ours, and that loads under another layout."""
    sizes = {"padded_vocab": 144, "global_batch": 4, "dropout": 0.0}
    before, after = (replace(LAYOUTS[name], precision="bf16", **sizes) for name in ("dp2-bf16", "tp2"))
    root = shared_path / "run"
    with parallel(before), installed(fork) as patched:
        stock = build(before, seed=1)
        seed_replicas_alike()
        train(stock, 0, 4)
        told = arguments(before, root, fork, consumed_train_samples=32)
        state = {"iteration": 3, "num_floating_point_operations_so_far": 0, "args": told}
        save_torch_dist(stock, root / "iter_0000003", "dp_reshardable", **state)
        if dist.get_rank() == 0:
            (root / "latest_checkpointed_iteration.txt").write_text("3")
        dist.barrier()
        at_save, reference = snapshot(stock), train(stock, 4, 5)
        moved = Run(before, arguments(before, root, fork), patched, fork, seed=2, spoil=poison)
        begins = moved.start()
        with everywhere():
            assert begins == 4
            assert_same(snapshot(moved.training), at_save)
        assert moved.go(4, 5) == reference
        expected = loss_and_norm(moved.go(5, 6)[0])
        moved.finish()
    with parallel(after), installed(fork) as patched:
        args = arguments(after, root, fork, ckpt_step=4, ref_load=str(root), ref_ckpt_step=5)
        other = Run(after, args, patched, fork, seed=3, spoil=poison, with_ref=True)
        assert other.start() == 5
        # The reference model's weights are in the model now, as slime has it: it copies them away and loads again.
        other.args.ckpt_step = 4
        third = Run(after, args, patched, fork, seed=4, spoil=poison)
        third.start()
        found = loss_and_norm(third.go(5, 6)[0])
        assert found == pytest.approx(expected, rel=1e-2)


@each_fork("going back")
def test_a_run_goes_back(fork: str, shared_path: Path) -> None:
    """Without the argument, slime's call of Megatron-LM's own `load_checkpoint` resumes the converted step."""
    root, back = shared_path / "run", shared_path / "back"
    own_states = {"data_parallel_random_init": True}  # of each replica; Megatron-LM compares it with its argument
    with parallel(DP2), installed(fork) as patched, fused_adam():
        more = {"ref_load": str(beginning(DP2, shared_path / "ref")), **own_states}
        first = Run(DP2, arguments(DP2, root, fork, **more), patched, fork)
        first.go(first.start(), 2)
        at_save, reference = snapshot(first.training), train(first.training, 2, 4)
        convert_for_trainer(root, back, "megatron", rendezvous("test-slime/back", 60.0), test=True)
        if dist.get_rank() == 0:
            shutil.copytree(root / "rollout", back / "rollout")
        dist.barrier()
    args = arguments(DP2, back, fork, custom_megatron_init_path=None, **own_states)
    with parallel(DP2), installed(fork) as patched, fused_adam(), ready_to_load(args):
        second = Run(DP2, args, patched, fork, seed=2, spoil=poison_for_megatron)
        begins = second.start()
        with everywhere():
            assert begins == 2
            assert_same(snapshot(second.training), at_save)
            assert second.source.sample_offset == 16
        assert train(second.training, 2, 4) == reference


@pytest.mark.shows("miles", "LoRA")
@pytest.mark.world(2)
def test_adapters_of_miles_resume_from_load(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters alone are saved. The base model comes from where miles takes it at the first start."""
    with_adapters(monkeypatch, target_modules=["linear_qkv"])
    layout, root = replace(DP2, frozen=FROZEN), shared_path / "run"
    (shared_path / "hf" / "model").mkdir(parents=True, exist_ok=True)
    with parallel(layout), installed("miles") as patched:
        base = {name: value.clone() for name, value in _frozen(build(layout, seed=1))}
        filled = []

        def load_base(ddp_model: Any, optimizer: Any, args: Any, load_path: str) -> tuple[int, int]:
            """Stands in for Megatron-Bridge, which fills a model from a HuggingFace folder."""
            filled.append(load_path)
            for name, value in _frozen(SimpleNamespace(model=ddp_model)):
                value.data.copy_(base[name])
            return 0, 0

        def run(seed: int, **more: Any) -> Run:
            args = arguments(layout, root, "miles", ref_load=str(shared_path / "hf"), lora_rank=4, **more)
            return Run(layout, args, patched, "miles", seed=seed, spoil=poison if seed > 1 else None)

        module = import_module("miles.backends.megatron_utils.checkpoint")
        patched.setattr(module, "_load_checkpoint_hf", load_base)
        first = run(1)
        first.go(first.start(), 2)
        first.finish()
        at_save = snapshot(first.training)
        reference = train(first.training, 2, 4)
        for more in ({}, {"load": str(shared_path / "hf"), "lora_adapter_path": str(root)}):
            second = run(2, **more)
            assert second.start() == 2
            with everywhere():
                assert set(filled) == {str(shared_path / "hf")}
                assert_same(snapshot(second.training), at_save)
            assert train(second.training, 2, 4) == reference
        wrong = run(3)
        wrong.args.ref_load = str(root)
        with pytest.raises(UnsupportedError, match="starts from a HuggingFace folder"):
            wrong.start()


def _frozen(training: Any) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{number}.{name}", parameter)
        for number, chunk in enumerate(training.model)
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    ]


@pytest.mark.world(1)
def test_actor_and_critic_of_one_folder_are_one_step(shared_path: Path) -> None:
    """slime's actor and critic save to one folder, where Megatron-LM's files of the second replace the first's."""
    plain, root = LAYOUTS["plain"], shared_path / "run"
    with parallel(plain), installed("slime") as patched:
        more = {"ref_load": str(beginning(plain, shared_path / "ref")), "use_critic": True, "num_critic_only_steps": 1}

        fresh = Run(plain, arguments(plain, shared_path / "none", **more), patched, seed=7)
        fresh.start()

        def begin(role: str, seed: int) -> tuple[Run, int]:
            run = Run(plain, arguments(plain, root, **more), patched, role=role, seed=seed)
            return run, run.start()

        critic, first = begin("critic", 2)
        critic.go(first, 1)
        assert [status.step for status in complete_steps(root)] == [0]
        critic_again, first = begin("critic", 3)
        assert first == 1
        actor, _ = begin("actor", 1)  # no step of its own yet
        started = snapshot(actor.training)
        weights = [name for name in started if name.endswith("weight") and "optimizer" not in name]
        assert_same({n: snapshot(fresh.training)[n] for n in weights}, {n: started[n] for n in weights})
        actor.actor.save_model(1)
        assert [status.step for status in complete_steps(root)] == [0]  # the critic is missing
        critic_again.go(1, 2)
        assert [status.step for status in complete_steps(root)] == [0, 1]
        actor.finish()
        critic_again.finish()


@pytest.mark.world(2)
def test_a_save_outlives_the_process_group(shared_path: Path) -> None:
    """With --offload-train slime destroys the default process group after each save, and makes another for the next."""
    root, more = shared_path / "run", {"offload_train": True, "async_save": True}
    store = dist.distributed_c10d._get_default_store()
    with installed("slime") as patched:
        with parallel(DP2):
            more["ref_load"] = str(beginning(DP2, shared_path / "ref"))
            run = Run(DP2, arguments(DP2, root, **more), patched)
            run.start()
            run.actor.save_model(0)
            saved = snapshot(run.training)
        another_world(dist.PrefixStore("slime-1", store))
        run.finish()
        with everywhere():
            assert [status.step for status in complete_steps(root)] == [0]
        with parallel(DP2):
            again = Run(DP2, arguments(DP2, root, **more), patched, seed=2, spoil=poison)
            assert again.start() == 1
            with everywhere():
                assert_same(snapshot(again.training), saved)
            again.actor.save_model(1, force_sync=True)
            with everywhere():
                assert [status.step for status in complete_steps(root)] == [0, 1]
            again.finish()


def another_world(store: dist.Store) -> None:
    """What `destroy_process_groups` and `reload_process_groups` of slime do to the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


@pytest.mark.world(1)
def test_what_cannot_be_honoured_is_refused_by_name(shared_path: Path) -> None:
    plain = LAYOUTS["plain"]
    with parallel(plain), installed("slime") as patched:
        root = beginning(plain, shared_path / "ref")

        def start(**more: Any) -> int:
            return Run(plain, arguments(plain, root, **more), patched).start()

        with pytest.raises(
            InvalidArgumentError, match=r"args\.mcore_ckpt has no option 'max_keep': did you mean 'max_to_keep'"
        ):
            start(mcore_ckpt={"max_keep": 3})
        with pytest.raises(InvalidArgumentError, match="has 'async_save', which the framework decides"):
            start(mcore_ckpt={"async_save": True})
        with pytest.raises(UnsupportedError, match="fsdp_dtensor"):
            start(ckpt_format="fsdp_dtensor")
        with pytest.raises(CheckpointNotFoundError, match="step 7"):
            start(ckpt_step=7)
    with parallel(plain), installed("miles") as patched:
        for wrong in ({"multi_lora": True}, {"custom_megatron_post_save_hook_path": "a.b"}):
            with pytest.raises(UnsupportedError, match="not supported"):
                Run(plain, arguments(plain, root, "miles", **wrong), patched, "miles").start()
