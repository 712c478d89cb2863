"""docs/get_started/verl.md, from beginning to end: its line of configuration, and its commands in their order."""

import shlex
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.support.shells import in_this_process
from tests.support.walk import REPOSITORY, all_blocks, assert_prints, blocks, commands
from tests.verl.sft import OURS, STEPS, SFTRun

PAGE = (REPOSITORY / "docs" / "get_started" / "verl.md").read_text()
ROOT = "trainer.default_local_dir=checkpoints"
TENSOR_PARALLEL = "engine.tensor_model_parallel_size=2"


def test_the_line_of_the_page_is_the_one_that_the_other_tests_have() -> None:
    assert OURS in blocks(PAGE, "text")[0].split()


def test_a_verl_run(model: Path, tmp_path: Path) -> None:
    assert ROOT in PAGE
    assert TENSOR_PARALLEL in PAGE
    root = tmp_path / ROOT.partition("=")[2]
    killed = SFTRun(2, model, tmp_path / "killed", root, (OURS,), killed_at=5)
    assert -9 in killed.start(), killed.log
    printed = ""
    for block in all_blocks(PAGE):
        for command in commands(block.code) if block.language == "bash" else ():
            ended = in_this_process(shlex.split(command)[1:], tmp_path)
            assert ended.status == 0, f"{command}\n{ended.stdout}{ended.stderr}"
            printed = ended.stdout
        if block.language == "text" and printed:
            assert_prints(block.code, printed, tmp_path)
    for each in ("merged", "back/global_step_4/model/huggingface"):
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / each, output_loading_info=True)
        assert not any(info.values()), info
    resumed = replace(killed, folder=tmp_path / "resumed", overrides=(OURS, TENSOR_PARALLEL), killed_at=None)
    assert resumed.start() == [0, 0], resumed.log
    assert sorted(resumed.losses) == list(range(5, STEPS + 1))
