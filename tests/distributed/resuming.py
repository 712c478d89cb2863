"""What the tests of every optimizer do: train and save, then build anew, spoil, load, and go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.load.report import LoadReport
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import files_of, manager_of, save
from tests.distributed.foreign_checkpoints import save_torch_dist, seed_replicas_alike
from tests.distributed.global_state import GlobalState, global_state, loss_and_norm
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.training import Layout, Training, build, device, parallel, train

# Sizes under which every layout of two ranks has the same model and the same sequences.
SIZES: dict[str, Any] = {"padded_vocab": 144, "global_batch": 4, "dropout": 0.0}


def assert_goes_on(layout: Layout, steps: int, root: Path, has_all_state: bool = True) -> None:
    """A training that is saved after `steps` steps and killed does the next three as if it had not been.

    `has_all_state`: whether what is loaded can be compared with what was saved. FusedAdam makes some of its state in
    its first step.
    """
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, steps)
        save(first, root, steps)
        at_save = snapshot(first)
        reference = train(first, steps, steps + 3)
        second, report = loaded(layout, root)
        found = snapshot(second)
        resumed = train(second, steps, steps + 3)
        with everywhere():
            assert not report.rounded
            if has_all_state:
                assert_same(found, at_save)
            assert resumed == reference


def trained(layout: Layout, root: Path, **config: Any) -> tuple[GlobalState, list[float]]:
    """What a training saves, and what its next step shows."""
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 2)
        state = global_state(training)
        save(training, root, 2, **config)
        return state, loss_and_norm(train(training, 2, 3)[0])


def loaded(layout: Layout, root: Path, **config: Any) -> tuple[Training, LoadReport]:
    """A training that was another one, and has loaded. Call it within `parallel(layout)`.

    It has state of its own, unless its optimizer stays as it is.
    """
    training = build(layout, seed=2)
    if "optimizer" in config.get("load_contents", ("optimizer",)):
        train(training, 0, 1)
    poison(training)
    manager = manager_of(training, root, **config)
    report = manager.load().report
    manager.close()
    return training, report


def saved_by_megatron(layout: Layout, folder: Path, form: str, steps: int = 2) -> Training:
    """A training that megatron itself has saved as torch_dist. Call it within `parallel(layout)`."""
    training = build(layout, seed=1)
    seed_replicas_alike()
    train(training, 0, steps)
    with device(layout):
        save_torch_dist(training, folder, form)
    return training


def loaded_from(
    folder: Path, layout: Layout, contents: tuple[str, ...] = ("model", "optimizer"), **config: Any
) -> tuple[Training, LoadReport]:
    """A new training that has loaded another program's checkpoint. Call it within `parallel(layout)`."""
    training = build(layout, seed=2)
    poison(training)
    manager = manager_of(training, folder / "unused", load_contents=contents, **config)
    report = manager.load(path=folder).report
    manager.close()
    return training, report


def assert_chain_returns_the_same_bytes(chain: Sequence[Layout], root: Path) -> None:
    """Each layout loads what the one before has saved, and the last one, which is as the first, saves its files."""
    trained(chain[0], root / "0")
    for number, layout in enumerate(chain[1:]):
        with parallel(layout):
            training, _ = loaded(layout, root / str(number))
            save(training, root / str(number + 1), 2)
    with everywhere():
        one, last = (files_of(root / str(n) / "global_steps_2" / "actor") for n in (0, len(chain) - 1))
        differing = [path for path in one if one[path] != last[path]]
        assert all(path.startswith(("rng_states/", "extra_state/")) for path in differing), differing
