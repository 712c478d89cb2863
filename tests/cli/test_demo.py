"""The demo as a stranger runs it: a real training is killed and resumed, in processes of its own."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from rich.console import Console
from torch.distributed.run import parse_args

from mcore_ckpt.cli.demo import runner
from mcore_ckpt.cli.demo.report import LiveReport, checkpoint_tree
from mcore_ckpt.cli.main import main
from tests.support.forks import Launched, launch
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
TRANSFORMERS_4 = Path(os.environ.get("MCORE_CKPT_TRANSFORMERS4", REPOSITORY / ".venv" / "transformers4"))

TRAINING = "mcore_ckpt.cli.demo.training"
# With what the training imports where it is used.
IMPORTS = (TRAINING, "transformers.models.qwen3.configuration_qwen3", "transformers.tokenization_utils_tokenizers")


def demo(cwd: Path, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mcore_ckpt.cli.main", "demo", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def forked_ranks(command: list[str], stdout: IO[bytes], env: dict[str, str], **of_popen: Any) -> Launched:
    """Starts a command line of torchrun: its ranks are forks of a process that has imported everything."""
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    torchrun = parse_args(command[3:])
    assert (torchrun.module, torchrun.training_script) == (True, TRAINING)
    environment = {name: value for name, value in env.items() if os.environ.get(name) != value}
    small = [Path(__file__).with_name("small_training.py"), *torchrun.training_script_args]
    return launch(small, int(torchrun.nproc_per_node), imports=IMPORTS, environment=environment, stdout=stdout)


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = SimpleNamespace(Popen=forked_ranks, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(runner, "subprocess", popen)


@pytest.fixture(params=["forked", pytest.param("as a stranger runs it", marks=pytest.mark.full)])
def run_demo(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the demo as a stranger runs it, or, in CI, in this process with forked ranks that do a quarter of the work.

    The command line of the ranks, the kill, the checkpoints and what is made of them are the same.
    """

    def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        fork_ranks(monkeypatch)
        return subprocess.CompletedProcess(arguments, main(["demo", *arguments]), *capfd.readouterr())

    return run if request.param == "forked" else demo


def test_killed_training_comes_back_as_if_nothing_had_happened(
    tmp_path: Path, run_demo: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # An earlier demo's folder, with a checkpoint that must not be resumed from: it is replaced.
    directory = tmp_path / "demo_checkpoints"
    old = directory / "checkpoints" / "global_steps_99"
    old.mkdir(parents=True)
    (directory / "demo.json").write_text('{"made_by": "mcore-ckpt demo"}')

    done = run_demo(tmp_path, "--json", "--steps", "7", "--kill-after", "5")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["resumed_from"] == 4
    assert result["killed_after"] == 5
    losses = result["losses"]
    assert list(losses["uninterrupted"]) == ["1", "2", "3", "4", "5", "6", "7"]
    assert list(losses["killed"]) == ["1", "2", "3", "4", "5"]
    assert list(losses["resumed"]) == ["5", "6", "7"]
    # A training that learns nothing would compare equal too.
    assert losses["uninterrupted"]["7"] < losses["uninterrupted"]["1"] - 0.5

    # Other kernels add up in another order.
    assert abs(result["held_out_loss"]["transformers"] - result["held_out_loss"]["megatron"]) < 1e-4
    assert result["text"].startswith("def ")
    assert len(result["text"]) > len("def ")

    if run_demo is demo:
        assert_loads_with_transformers_4(tmp_path / result["checkpoint"] / "actor" / "huggingface")

    assert not old.exists()
    checkpoint = tmp_path / result["checkpoint"]
    assert checkpoint.name == "global_steps_7"
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert result["bytes"] == sum(path.stat().st_size for path in files) > 5_000_000 * 3 * 4
    names = {path.relative_to(checkpoint / "actor").as_posix() for path in files}
    assert "manifest.json" in names
    assert {f"model/mp_rank_0{tp}_00{pp}/model_states.pt" for tp in (0, 1) for pp in (0, 1)} <= names
    assert {f"optim/distrib_optim_pp{pp}_tp{tp}_cp0_dp0.pt" for tp in (0, 1) for pp in (0, 1)} <= names
    assert (checkpoint.parent / "latest_checkpointed_iteration.txt").read_text() == "7"


def assert_loads_with_transformers_4(folder: Path) -> None:
    """What was exported in line: the demo itself loads it with the newest version."""
    if not TRANSFORMERS_4.is_dir():
        return
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "support" / "load_with_transformers.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TRANSFORMERS_4), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "error" not in found, found["error"]
    assert found["version"].startswith("4.")
    assert (found["class"], found["dtypes"]) == ("Qwen3ForCausalLM", ["torch.float32"])
    assert (found["wrong"], found["absent"], found["different"], found["warnings"]) == ({}, [], [], [])
    assert found["written"]["text"].startswith("def f(x):")
    assert len(found["written"]["text"]) > len("def f(x):")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "5"),
        ("--steps", "many"),
        ("--kill-after", "8"),
        ("--kill-after", "3"),
        ("--kill-after", "20"),
        ("--nonsense",),
    ],
    ids=" ".join,
)
def test_unusable_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    directory = tmp_path / "demo"
    try:
        status = main(["demo", "--dir", str(directory), *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert arguments[0] in capsys.readouterr().err
    assert not directory.exists()


def test_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    (directory / "checkpoints").mkdir(parents=True)
    precious = directory / "checkpoints" / "precious.pt"
    precious.write_bytes(b"months of work")

    done = demo(tmp_path, "--dir", "mine")

    assert done.returncode == 2
    assert "mine is not empty and was not made by the demo" in done.stderr
    assert done.stdout == ""
    assert precious.read_bytes() == b"months of work"
    assert [path.name for path in directory.rglob("*")] == ["checkpoints", "precious.pt"]


def test_failed_launch_is_one_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import sys; sys.stderr.write('[rank1]: Traceback (most recent call last):\\n[rank1]: OSError: disk\\nnoise')"
    )
    monkeypatch.setattr(runner, "torchrun_command", lambda *_: [sys.executable, "-c", f"{script}; sys.exit(3)"])

    assert main(["demo", "--json", "--dir", str(tmp_path / "demo")]) == 1
    captured = capsys.readouterr()
    assert "the uninterrupted training failed with status 3" in captured.err
    assert "OSError: disk" in captured.err
    assert "noise" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_ranks_and_leaves_nothing_behind(
    number: signal.Signals,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ctrl_c: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fork_ranks(monkeypatch)
    ranks: list[int] = []

    def interrupt(training: Any, event: dict[str, Any]) -> None:
        ranks.append(event["pid"])
        signal.raise_signal(number)

    monkeypatch.setattr(runner.Training, "record", interrupt)
    try:
        found = main(["demo", "--dir", str(tmp_path / "deep" / "demo")])
    except SystemExit as ended:
        found = int(ended.code or 0)
    assert found == status
    (rank,) = ranks
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_ctrl_c_ends_torchrun_and_its_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mcore_ckpt.cli.main", "demo", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as running:
        events = tmp_path / "demo_checkpoints" / "logs" / "uninterrupted.jsonl"
        wait_for(lambda: events.exists() and '"pid"' in events.read_text())
        rank = json.loads(events.read_text().splitlines()[0])["pid"]
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "mcore-ckpt: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
    assert list(tmp_path.iterdir()) == []


def heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_tree_of_the_checkpoints(tmp_path: Path) -> None:
    """The newest in full, older ones in a line each, and sizes."""
    sizes = {"global_steps_8/actor/model.pt": 1500, "global_steps_12/actor/manifest.json": 10, "latest.txt": 2}
    for name, size in {**sizes, ".hidden/x": 1}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    outcome: Any = SimpleNamespace(plan=SimpleNamespace(checkpoints=tmp_path), checkpoint=tmp_path / "global_steps_12")
    shown = io.StringIO()
    Console(file=shown, width=500).print(checkpoint_tree(outcome))
    assert [line.strip("│├└─ ") for line in shown.getvalue().splitlines()] == [
        f"{tmp_path}/",
        "global_steps_8/  1.5 kB",
        "global_steps_12/  10 B",
        "actor/  10 B",
        "manifest.json  10 B",
        "latest.txt  2 B",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_it_shows_while_it_trains(is_terminal: bool, tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, color_system=None, width=100)
    killed = runner.Training("killed", {1: 2.0, 2: 1.5})
    with LiveReport(console, runner.Plan(tmp_path, steps=8, kill_after=6)) as report:
        report.update(killed)
        assert report.progress.tasks[1].completed == 2
        report.ended(killed)
    if is_terminal:
        assert re.search(r"killed after step 2.* 2/8 loss 1\.5000 \d:\d\d:\d\d [-\d]:", shown.getvalue())
    else:
        assert shown.getvalue() == "killed after step 2, loss 1.5000\n"


def test_one_wrong_bit_is_seen(tmp_path: Path) -> None:
    from mcore_ckpt.cli.demo.huggingface import Generated
    from mcore_ckpt.cli.demo.runner import Outcome, Plan, Training

    def outcome(redone: float, exported: float = 2.0) -> Outcome:
        losses = {step: 1.0 / step for step in range(1, 9)}
        killed = {step: losses[step] for step in range(1, 7)}
        resumed = {5: losses[5], 6: redone, 7: losses[7], 8: losses[8]}
        return Outcome(
            Plan(tmp_path, steps=8, kill_after=6),
            Training("uninterrupted", losses),
            Training("killed", killed),
            Training("resumed", resumed, resumed_from=4, held_out_loss=2.0),
            Generated(exported, "def "),
        )

    assert outcome(1.0 / 6).identical
    assert not outcome(1.0 / 6 + 2.0**-55).identical
    assert outcome(1.0 / 6, exported=2.0 + 9e-5).is_exported
    assert not outcome(1.0 / 6, exported=2.0 + 2e-4).is_exported
