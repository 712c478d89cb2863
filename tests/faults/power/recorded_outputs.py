"""Run with recorder.c loaded: all else that writes checkpoints, or files that name one, below FOLDER.

`recorded_outputs.py FOLDER`. `FOLDER/in` has a HuggingFace model. Each work is marked with its name, as `begun` before
it and as `acked` when it has told its caller that it is done.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS / "integrations" / "roll_stand_in"))
# Only to be found: what is imported here of this package for AReaL imports nothing of it.
sys.path.append(str(TESTS.parent / ".venv" / "areal"))

from mcore_ckpt.checkpoint import file_names  # noqa: E402
from mcore_ckpt.cli.main import main as command_line  # noqa: E402
from mcore_ckpt.integrations.areal.recover_info import Progress  # noqa: E402
from mcore_ckpt.integrations.areal.recovery_steps import RecoverySteps  # noqa: E402
from mcore_ckpt.integrations.roll.checkpoints import commit_pipeline  # noqa: E402
from mcore_ckpt.integrations.verl.place import Place  # noqa: E402
from mcore_ckpt.integrations.verl.resume import send_back  # noqa: E402
from mcore_ckpt.io.files import make_folder, write_file  # noqa: E402
from mcore_ckpt.io.store import Store  # noqa: E402
from mcore_ckpt.steps import tracker, uncommit_earlier_save  # noqa: E402
from mcore_ckpt.steps.remote_steps import RemoteSteps  # noqa: E402
from mcore_ckpt.steps.retention import PreservationPolicy  # noqa: E402
from mcore_ckpt.steps.upload_queue import UploadQueue  # noqa: E402
from tests.faults.power.recording import mark, name_syncs  # noqa: E402
from tests.support.checkpoints import make  # noqa: E402

TIMEOUT_S = 60.0
ROLE = "actor"
CONVERTED = "out/native/checkpoints"
TRACKER = file_names.TRACKER_FILE


AREAL_ROLES = {
    step: (f"areal/global_steps_{step}/{ROLE}", f"areal/global_steps_{step}/recover_info") for step in (1, 2)
}


@dataclass(frozen=True)
class Work:
    """Something that makes or replaces files.

    Attributes:
        run: does it, in the folder that it is given.
        paths: what it makes or replaces, below that folder.
    """

    run: Callable[[Path], None]
    paths: tuple[str, ...]


def command(*arguments: str) -> Callable[[Path], None]:
    """A command line, in which {} stands for the folder."""

    def run(folder: Path) -> None:
        status = command_line([argument.format(folder) for argument in arguments])
        assert status == 0, f"{arguments[0]} ended with status {status}"

    return run


def upload(step: int, folder: Path) -> None:
    root = folder / "uploads/root"
    make(file_names.step_dir(root, step) / ROLE, step)
    tracker.update_tracker(root)
    store = Store((folder / "uploads/remote").as_uri())
    queue = UploadQueue(RemoteSteps(store), root, ROLE, PreservationPolicy(max_to_keep=1))
    handle = queue.committed(step)
    queue.close(TIMEOUT_S)
    assert handle.done, handle.exception


def roll(step: int, version: int, folder: Path) -> None:
    root, ckpt_id = folder / "roll", f"checkpoint-{step}"
    role_dir = root / ckpt_id / "actor_train"
    if role_dir.exists():
        uncommit_earlier_save(root / ckpt_id, role_dir.name, "pipeline")
    make(role_dir, version, roles=("actor_train", "pipeline"))
    source = folder / "of_roll" / str(version)
    if not source.exists():
        make_folder(source)
        write_file(source / "state.json", [b'{"version": %d}' % version])
    commit_pipeline(root, ckpt_id, source, ["actor_train"], TIMEOUT_S)


def areal(step: int, folder: Path) -> None:
    steps = RecoverySteps(folder / "areal", 2, TIMEOUT_S)
    found = steps.find([ROLE])
    steps.current = found[0].step if found else None
    progress = Progress({"epoch": step}, {}, {}, {}, {}, {"at": step})
    made = steps.open(step, lambda: progress, [ROLE])
    make(made.path / ROLE, step, roles=(ROLE, "recover_info"))
    tracker.update_tracker(folder / "areal")
    steps.current = step
    steps.delete_old()


def verl_crashed(folder: Path) -> None:
    """verl's trainer writes its tracker before an asynchronous save is committed."""
    root = folder / "verl"
    for step in (1, 2):
        if not (root / f"global_step_{step}" / ROLE).exists():
            make(root / f"global_step_{step}" / ROLE, step)
    make_folder(root / "global_step_3" / ROLE)
    tracker.write_tracker(root, 3)


def verl(folder: Path) -> None:
    send_back(Place.of(folder / "verl/global_step_3" / ROLE, ROLE), has_copies=False)


WORKS = {
    "convert": Work(
        command("convert", "--hf_model_path", "{}/in", "--output_path", "{}/" + CONVERTED),
        (f"{CONVERTED}/global_steps_0/{ROLE}", f"{CONVERTED}/{TRACKER}"),
    ),
    "convert to torch_dist": Work(
        command("convert", "--hf_model_path", "{}/in", "--output_path", "{}/out/dist", "--format", "torch_dist"),
        ("out/dist",),
    ),
    "merge": Work(command("merge", "{}/" + CONVERTED, "{}/out/deep/merged"), ("out/deep/merged",)),
    "reshard": Work(
        command("reshard", "{}/" + CONVERTED, "{}/out/resharded", "--tp", "2"),
        (f"out/resharded/global_steps_0/{ROLE}", f"out/resharded/{TRACKER}"),
    ),
    "for another trainer": Work(
        command("convert", "{}/" + CONVERTED, "--format", "torch_dist", "--output_path", "{}/out/back"),
        ("out/back/iter_0000000", f"out/back/{TRACKER}"),
    ),
    "upload 1": Work(partial(upload, 1), ("uploads/remote/global_steps_1", f"uploads/remote/{TRACKER}")),
    "upload 2": Work(
        partial(upload, 2),
        ("uploads/remote/global_steps_1", "uploads/remote/global_steps_2", f"uploads/remote/{TRACKER}"),
    ),
    "ROLL 1": Work(
        partial(roll, 1, 1), ("roll/checkpoint-1/actor_train", "roll/checkpoint-1/pipeline", f"roll/{TRACKER}")
    ),
    "ROLL 2": Work(
        partial(roll, 2, 2), ("roll/checkpoint-2/actor_train", "roll/checkpoint-2/pipeline", f"roll/{TRACKER}")
    ),
    "ROLL 2 again": Work(partial(roll, 2, 3), ("roll/checkpoint-2/actor_train", "roll/checkpoint-2/pipeline")),
    "AReaL 1": Work(partial(areal, 1), (*AREAL_ROLES[1], f"areal/{TRACKER}", "areal/step_info.json")),
    "AReaL 2": Work(partial(areal, 2), (*AREAL_ROLES[2], f"areal/{TRACKER}", "areal/step_info.json")),
    "verl's crash": Work(verl_crashed, (f"verl/{TRACKER}",)),
    "verl": Work(verl, (f"verl/{TRACKER}",)),
}


def main() -> None:
    folder = Path(sys.argv[1])
    name_syncs()
    for name, work in WORKS.items():
        mark(begun=name)
        work.run(folder)
        mark(acked=name)


if __name__ == "__main__":
    main()
