"""Every command in README.md, CONTRIBUTING.md and docs/ is run by a test, or a table names what runs it.

`mcore-ckpt` commands run here as they are written, in a folder that has what they name. For all others, `RUN_BY` says
which test or script runs them. A new command that nobody runs fails.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt.checkpoint.file_names import MANIFEST_FILE
from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.steps import commit
from mcore_ckpt.tools.maintain.bench import bench, speeds
from tests.support import small_model
from tests.support.mcore_checkpoints import make_checkpoint
from tests.support.shells import Ended, in_this_process
from tests.support.tiny_models import make_hf_folder
from tests.support.walk import REPOSITORY, all_blocks, commands

pytestmark = pytest.mark.slow

DOCUMENTS = (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md")))

# Pages that a test follows from beginning to end, with all of their commands.
FOLLOWED = {
    "docs/get_started/plain_loop.md": "tests/test_walks.py::test_a_loop_of_ones_own",
    "docs/get_started/megatron_lm.md": "tests/test_walks.py::test_megatrons_own_loop",
    "docs/get_started/verl.md": "tests/verl/with_verl/test_walk.py::test_a_verl_run",
}

HERE = "tests/test_commands_of_documents.py::test_a_program_knows_its_flags"
# By a regular expression for the whole command: the test or the script that runs it. Several, if one only looks at the
# flags, or does so on a smaller scale.
RUN_BY = {
    r"pip install '\.\[megatron,hf\]'": ("tests/test_walks.py::test_a_loop_of_ones_own_in_a_clean_environment",),
    r"bash scripts/quickstart\.sh": ("tests/cli/test_demo.py", "scripts/test.sh"),  # install.sh, and the demo
    r"bash scripts/test\.sh( --quick| --full)?": (".ci/run",),
    r"bash scripts/test\.sh --part ranks": ("tests/test_parts.py",),
    r"bash scripts/install\.sh": ("scripts/test.sh",),
    r"(bash|cp result\.json benchmarks/results/\w+\.json &&) scripts/docs\.sh": ("scripts/test.sh",),
    r"(PYTHONPATH=\S+ )?\.venv/bin/python -m pytest .*": ("scripts/test.sh", "tests/test_versions.py"),
    r"OMP_NUM_THREADS=1 \S+ -m torch\.distributed\.run .* -m pytest .*": ("tests/test_distributed.py",),
    r"\.venv/bin/(pip install build|python -m build .*)": ("tests/test_packaging.py",),
    # Once by hand, and the page says when: the CUDA build of torch is too large for each run of the tests.
    r"python3\.13 -m venv .*|env/bin/mcore-ckpt demo": ("tests/cli/test_demo.py",),
    r"python benchmarks/page\.py .*": ("tests/cli/test_inspect_page.py", HERE),
    r"python benchmarks/scale\.py.*": ("tests/save/test_scale.py", HERE),
    r"python benchmarks/many_files\.py.*": ("tests/steps/test_many_steps.py", HERE),
    r"python benchmarks/\w+\.py.*": (HERE,),  # by hand, on a machine that is quiet for an hour
    r"scripts/chaos\.sh .*": ("scripts/test.sh", "tests/faults/kills/test_chaos.py", HERE),
    r"scripts/fault_chaos\.sh .*": ("scripts/test.sh", "tests/faults/kills/test_faults.py", HERE),
    r"scripts/fast_chaos\.sh .*": ("scripts/test.sh", "tests/hosts/test_fast_chaos.py", HERE),
    r"scripts/preemptions\.sh .*": ("tests/faults/kills/test_preemptions.py", HERE),
    r"scripts/power_loss\.sh .*": ("tests/faults/power/test_power_loss.py", HERE),
    r"scripts/soak\.sh .*": ("scripts/test.sh", "tests/faults/soak/test_soak.py", HERE),
    r"python -m tests\.faults\.soak\.publish .*": ("tests/faults/soak/test_soak.py",),
    r"torchrun .* mcore-ckpt doctor .*": ("tests/faults/disks/test_doctor_ranks.py",),
    r"torchrun .* -m mcore_ckpt\.integrations\.bridge .*": ("tests/bridge/with_bridge/test_more_runs.py",),
    r"uv run python -m mcore_ckpt\.integrations\.nemo_rl .*": ("tests/bridge/with_bridge/test_nemo_rl.py",),
    r"NPROC_PER_NODE=8 python -m mcore_ckpt\.integrations\.swift .*": ("tests/swift/test_swift.py",),
    r"megatron sft .*": ("tests/swift/with_swift/test_sft_pipeline.py",),
    r"cp -r CHECKPOINTS/step_100 .*": ("tests/bridge/with_bridge/test_nemo_rl.py",),
}

# What would take long, or never end, by a regular expression: what is typed here instead.
SMALLER = {
    r"^(mcore-ckpt watch \S+)$": r"\1 --once",
    r"^(mcore-ckpt bench .*)$": r"\1 --megabytes 2",
    r"--real \d+": "--real 3",
    r"^(mcore-ckpt doctor \S+)$": r"\1 --megabytes 0",
    # The folder of the test, in the place of one at the root of the disk, and what a shell makes of a variable.
    r" /checkpoints": " checkpoints",
    r"\$PWD": "{folder}",
}
# These end with 1 if what they compare differs, which it may.
COMPARES = ("diff", "test")
STEPS = (90, 100, 1200)


def found() -> Iterator[tuple[str, int, list[str]]]:
    """Yields each block of bash: its document, its number in there, and its commands."""
    for document in DOCUMENTS:
        name = document.relative_to(REPOSITORY).as_posix()
        codes = [block.code for block in all_blocks(document.read_text()) if block.language == "bash"]
        yield from ((name, number, commands(code)) for number, code in enumerate(codes))


def is_ours(command: str) -> bool:
    return command.startswith("mcore-ckpt ")


BLOCKS = [
    pytest.param([command for command in block if is_ours(command)], id=f"{document}-{number}")
    for document, number, block in found()
    if document not in FOLLOWED and any(map(is_ours, block))
]
OTHERS = sorted(
    {command for name, _, block in found() if name not in FOLLOWED for command in block if not is_ours(command)}
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name: HuggingFace models, and checkpoints of one of them."""
    made = tmp_path_factory.mktemp("documents")
    model = make_hf_folder(made / "Qwen2.5-7B", "qwen2")
    for copy in ("Qwen/Qwen3-0.6B", "DIR"):
        shutil.copytree(model, made / copy)
    make_hf_folder(made / "Qwen3-30B-A3B", "qwen3_moe", num_experts=8)
    with pytest.MonkeyPatch.context() as patched:
        for step in STEPS:
            patched.setattr(small_model, "STEP", step)
            role = make_checkpoint(made / "made", model, tp=2)
        (made / "copies").mkdir()
        shutil.move(role.parent.parent, made / "checkpoints")
        patched.setattr(small_model, "STEP", 100)
        make_adapters(made / "adapters", model)
    for name in ("CHECKPOINTS", "out"):
        (made / name).symlink_to("checkpoints")
    policy = made / "checkpoints" / "step_100" / "policy" / "weights"
    policy.mkdir(parents=True)
    (policy / "policy").symlink_to(made / "checkpoints" / "global_steps_100" / "actor")
    (made / "BACK" / "step_100" / "policy").mkdir(parents=True)
    return made


def make_adapters(root: Path, model: Path) -> None:
    """A checkpoint of LoRA adapters alone, of one layer."""
    adapter = "decoder.layers.0.mlp.linear_fc1.adapter."
    tensors = {
        f"{adapter}linear_in.weight": torch.rand(4, 64),
        f"{adapter}linear_out.weight": torch.rand(2 * 96, 4),
    }
    whole = {name: Cut(None) for name in tensors}
    role = small_model.make(root, tensors, cuts=whole, config=(model / "config.json").read_bytes())
    manifest = replace(read_manifest(role), adapters=AdapterSettings(8))
    (role / MANIFEST_FILE).unlink()
    commit.write_manifest(role, manifest)


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "folder"
    shutil.copytree(prepared, copy, symlinks=True)
    return copy


@pytest.mark.parametrize("block", BLOCKS)
def test_the_commands_of_a_block_run_in_turn(block: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((speeds, "_SAVES"), (bench, "_REAL_SAVES")):
        monkeypatch.setattr(module, name, 1)
    for command in block:
        if "--adapters only" in command and "checkpoints/" in command:
            (folder / "checkpoints").rename(folder / "of_models")
            (folder / "adapters").rename(folder / "checkpoints")
        ended = typed(command, folder)
        assert ended.status in ((0, 1) if shlex.split(command)[1] in COMPARES else (0,)), (
            f"{command}\n{ended.stdout}{ended.stderr}"
        )
        if (folder / "of_models").exists():
            shutil.rmtree(folder / "checkpoints")
            (folder / "of_models").rename(folder / "checkpoints")


def typed(command: str, folder: Path) -> Ended:
    for pattern, smaller in SMALLER.items():
        command = re.sub(pattern, smaller.format(folder=folder), command)
    return in_this_process(shlex.split(command)[1:], folder)


@pytest.mark.parametrize("command", OTHERS)
def test_something_runs_each_other_command(command: str) -> None:
    runners = next((runners for pattern, runners in RUN_BY.items() if re.fullmatch(pattern, command)), None)
    assert runners, f"nobody runs `{command}`: write a test that does, and name it in RUN_BY"


@pytest.mark.parametrize("pattern", RUN_BY)
def test_what_runs_them_is_there(pattern: str) -> None:
    assert any(re.fullmatch(pattern, command) for command in OTHERS), "no document has such a command any more"
    for runner in RUN_BY[pattern]:
        check_is_there(runner)


def test_followed_pages_are_there() -> None:
    assert FOLLOWED.keys() <= {document.relative_to(REPOSITORY).as_posix() for document in DOCUMENTS}
    for runner in FOLLOWED.values():
        check_is_there(runner)


def check_is_there(runner: str) -> None:
    path, _, function = runner.partition("::")
    assert (REPOSITORY / path).is_file(), runner
    assert not function or f"def {function}(" in (REPOSITORY / path).read_text(), runner


PROGRAMS = [command for command in OTHERS if re.match(r"python benchmarks/|scripts/\w+\.sh ", command)]


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_program_knows_its_flags(command: str) -> None:
    """Its source, or that of a module beside it, has the flags that the document gives it."""
    words = command.replace("[", "").replace("]", "").split()
    script = REPOSITORY / (words[1] if words[0] == "python" else words[0])
    if script.suffix == ".sh":
        (name,) = re.findall(r" (tests/[\w/]+\.py) \"\$@\"", script.read_text())
        script = REPOSITORY / name
    sources = {path.stem: path.read_text() for path in script.parent.glob("*.py")}
    used = [script.stem, *(name for name in sources if re.search(rf"\b{name}\b", sources[script.stem]))]
    known = {flag for name in used for flag in re.findall(r'"(--[\w-]+)"', sources[name])}
    assert {word for word in words if word.startswith("--")} <= known


def test_what_the_page_about_bad_files_says_of_verify_and_merge(folder: Path) -> None:
    """The command finds the damage and ends with 1, in the words of the page; the weights can still be merged."""
    page = (REPOSITORY / "docs" / "how_to" / "bad_files.md").read_text()
    file = folder / "checkpoints" / "global_steps_100" / "actor" / "optim" / "distrib_optim_pp0_tp1_cp0_dp0.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    ended = typed("mcore-ckpt verify checkpoints", folder)
    assert ended.status == 1
    said = "".join(ended.stdout.split())  # the terminal folds lines, and where depends on the folder's name
    for words in ("/global_steps_90/actor: sound, 10 files", "/global_steps_100/actor: damaged", "(written by rank 1)"):
        assert words in page
        assert "".join(words.replace("10 files", "").split()) in said
    assert re.search(r"tensor\S+\(\w+\):bytes\[\d+,\d+\)haveawrongCRC:theyaredamaged", said)
    assert typed("mcore-ckpt merge checkpoints/global_steps_100 merged", folder).status == 0
