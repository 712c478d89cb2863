"""A newcomer follows README.md and a page of docs/get_started: what they say is typed, in their order.

Each file, command and output of the page counts. In CI the commands run at once (`QuickShell`); with --full, in an
environment into which the first command of the page has installed this checkout.
"""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from safetensors.torch import load_file

from mcore_ckpt.integrations import megatron as drop_in
from mcore_ckpt.tools.examine.diff import diff
from tests.support.shells import Ended, QuickShell, Shell, StrangersShell
from tests.support.walk import REPOSITORY, all_blocks, assert_prints, blocks, commands

pytestmark = pytest.mark.slow

GET_STARTED = REPOSITORY / "docs" / "get_started"
PAGE, MEGATRON_PAGE = ((GET_STARTED / name).read_text() for name in ("plain_loop.md", "megatron_lm.md"))
INSTALL = "pip install '.[megatron,hf]'"
IMPORTS = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "mcore_ckpt.integrations.megatron",
    "mcore_ckpt.recover",
    "transformers.models.llama.modeling_llama",
)
# What the installation of a checkout needs.
PARTS = ("csrc", "docs", "mcore_ckpt")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in", "pyproject.toml", "setup.py")


def follow(page: str, shell: Shell, folder: Path, checkout: Path | None) -> None:
    """Does what a page says. A block of text is what the command before it prints on stdout."""
    ended = Ended(0, "", "")
    for block in all_blocks(page):
        if block.title:
            (folder / block.title).write_text(block.code)
        elif block.language == "text":
            assert_prints(block.code, ended.stdout, folder)
        for command in commands(block.code) if block.language == "bash" else ():
            if command == INSTALL:
                ended = shell.run(command, checkout) if checkout else ended
            else:
                ended = shell.run(command, folder)
            assert (ended.status == 0) == ("KILL_AT" not in command), f"{command}\n{ended.stdout}{ended.stderr}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a fresh clone has, without what was built here."""
    copy = tmp_path / "clone"
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, copy / name)
    return copy


def check_results(folder: Path) -> None:
    """What the page does not say: the weights of every step of the way are the same, bit for bit."""
    from mcore_ckpt.tools.convert.merge import MergeRequest, merge

    merge(MergeRequest(folder / "checkpoints", folder / "again"))
    resharded, saved = (load_file(folder / name / "model.safetensors") for name in ("merged", "again"))
    assert resharded.keys() == saved.keys()
    assert all(resharded[name].equal(saved[name]) for name in saved)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "counting"
    folder.mkdir()
    follow(PAGE, QuickShell(tmp_path, IMPORTS), folder, None)
    check_results(folder)


@pytest.mark.full
def test_a_loop_of_ones_own_in_a_clean_environment(tmp_path: Path, checkout: Path) -> None:
    folder = tmp_path / "counting"
    folder.mkdir()
    # Two threads of two ranks on two cores spin. pip must find all it needs here.
    shell = StrangersShell(tmp_path, {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"})
    assert shell.run("mcore-ckpt --help", folder).status == 127
    follow(PAGE, shell, folder, checkout)
    assert str(checkout) not in shell.run("python -c 'import mcore_ckpt; print(mcore_ckpt.__file__)'", folder).stdout
    check_results(folder)


@pytest.mark.full  # tests/integrations/test_examples.py kills and resumes such a loop in CI
def test_megatrons_own_loop(tmp_path: Path) -> None:
    """Beside what the page says: the killed run is as one that was never stopped, but for the names of its folders."""
    folder, shell = tmp_path / "counting", QuickShell(tmp_path, IMPORTS)
    folder.mkdir()
    (model,) = (block for block in all_blocks(PAGE) if block.title == "model.py")
    (folder / model.title).write_text(model.code)
    follow(MEGATRON_PAGE, shell, folder, None)
    again = shell.run("torchrun --standalone --nproc-per-node 2 loop.py --save uninterrupted", folder)
    assert again.status == 0, again.stderr
    compared = diff(folder / "uninterrupted", folder / "checkpoints" / "global_steps_60")
    (role,) = compared.roles
    assert not role.tensors
    assert [value.name for value in role.values if ".arguments." not in value.name] == []


def test_megatrons_functions_are_replaced_as_the_page_says() -> None:
    """`training` looks the functions up in its own module, when it calls them."""
    (code,) = (code for code in blocks(MEGATRON_PAGE, "python") if "setattr" in code)
    stock = SimpleNamespace(load_checkpoint=None, save_checkpoint=None, maybe_finalize_async_save=None)
    with mock.patch.dict("sys.modules", {"megatron.training": SimpleNamespace(training=stock)}):
        exec(code, {})
    assert stock == SimpleNamespace(**{name: getattr(drop_in, name) for name in vars(stock)})
    core = find_spec("megatron.core")
    assert core is not None
    source = Path(str(core.origin)).parents[1] / "training" / "training.py"
    if source.is_file():  # the wheels have it since 0.17
        for name in vars(stock):
            assert re.search(rf"import ({name}\b|\((\s+\w+,)*\s+{name},)", source.read_text()), name


def test_the_readme_leads_there() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert INSTALL in [command for code in blocks(readme, "bash") for command in commands(code)]
    assert INSTALL in [command for code in blocks(PAGE, "bash") for command in commands(code)]
    for page in ("plain_loop", "verl", "megatron_lm"):
        assert f"(docs/get_started/{page}.md)" in readme
