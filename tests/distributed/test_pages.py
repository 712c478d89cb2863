"""The Python of README.md and of docs/how_to runs as it is written, in a training that has the names that it uses."""

import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.cli.demo.huggingface import byte_tokenizer
from mcore_ckpt.steps import complete_steps
from tests.distributed.hf_words import hf_config
from tests.distributed.layouts import LAYOUTS
from tests.distributed.training import build, parallel, train
from tests.support.walk import REPOSITORY, blocks

PLAIN = LAYOUTS["plain"]
DOCUMENTS = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs" / "how_to").glob("*.md")))
PAGES = [path.relative_to(REPOSITORY).as_posix() for path in DOCUMENTS if blocks(path.read_text(), "python")]


def names_of(folder: Path) -> dict[str, Any]:
    """What a page's Python uses and does not make: a training, managers, and a checkpoint."""
    training, other = build(PLAIN, seed=1), build(PLAIN, seed=2)
    names: dict[str, Any] = {
        "model": training.model,
        "optimizer": training.optimizer,
        "lr_scheduler": training.scheduler,
        "critic_model": other.model,
        "critic_optimizer": other.optimizer,
        "hf_config": hf_config(PLAIN),
        "tokenizer": byte_tokenizer(),
        "folder": folder,
        "text": SimpleNamespace(position=1),
        "steps": 200,
        "train_step": lambda *training: None,
    }
    train(training, 0, 1)
    train(other, 0, 1)
    everything = CheckpointConfig(save_contents=("model", "optimizer", "extra", "hf_model"))
    state = training.model, training.optimizer, training.scheduler
    names["manager"] = CheckpointManager(
        "checkpoints", *state, hf_config=names["hf_config"], processing_class=names["tokenizer"], config=everything
    )
    names["manager"].save(100, extra_state={"data_position": 7})
    shutil.copytree("checkpoints/global_steps_100/actor/huggingface", "Qwen2.5-7B")
    together = CheckpointConfig(roles=("actor", "critic"))
    for role, each in (("actor", training), ("critic", other)):
        names[role] = CheckpointManager("of_both", each.model, each.optimizer, role=role, config=together)
    for role in ("actor", "critic"):
        names[role].save(100)
    return names


@pytest.mark.world(1)
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared_path)
    with parallel(PLAIN):
        names = names_of(shared_path)
        if page.endswith("roles.md"):  # another run, whose steps have both roles from the beginning
            shutil.rmtree("checkpoints")
        if page.endswith("preemption.md"):  # its machine is about to go
            names["train_step"] = lambda *training: signal.raise_signal(signal.SIGTERM)
        for code in blocks((REPOSITORY / page).read_text(), "python"):
            with pytest.raises(SystemExit, match="75") if "sys.exit" in code else nullcontext():
                exec(code, names)
        for manager in (each for each in names.values() if isinstance(each, CheckpointManager)):
            manager.close()
    # One page loses its disk.
    more = {
        "README.md": [100, 200],
        "docs/how_to/remote.md": [],
        "docs/how_to/preemption.md": [100, 101],
        "docs/how_to/rl_step.md": [100, 200, 300],
    }
    saved = more.get(page, [100])
    assert [status.step for status in complete_steps(shared_path / "checkpoints")] == saved
    if page == "README.md":
        assert (names["step"], names["text"].position) == (200, 7)
    if page.endswith("rl_step.md"):
        assert complete_steps(shared_path / "with_a_driver")[0].committed == {"actor", "driver"}
        assert names["state"] == {"data_loader": {"position": 80}}
    if page.endswith("remote.md"):
        assert names["recovery"].step == 100
    if page.endswith("roles.md"):
        assert complete_steps(shared_path / "checkpoints")[0].committed == {"actor", "critic"}
