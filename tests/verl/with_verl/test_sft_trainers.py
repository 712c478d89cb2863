"""verl's SFT trainer of one driver: where its data goes on. Its workers are in other processes, and not here. And the
command line, which both of its trainers have."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.integrations.verl import sft_trainer, sft_trainer_ray
from tests.verl import sft


class Workers:
    """Do nothing with the model."""

    def save_checkpoint(self, **_: Any) -> None:
        pass

    def load_checkpoint(self, path: str) -> None:
        pass


class Driver(sft_trainer_ray.SFTTrainer):
    def _build_engine(self) -> None:
        self.training_client = Workers()


# CI has an epoch's end, and the middle of one.
@pytest.mark.parametrize(
    ("step", "left"),
    [pytest.param(3, 1, marks=pytest.mark.full), (4, 4), (5, 3), pytest.param(8, 4, marks=pytest.mark.full)],
)
def test_where_the_data_goes_on(step: int, left: int, model: Path, tmp_path: Path) -> None:
    config = sft.configuration(tmp_path, model, ("data.train_batch_size=16", "trainer.total_training_steps=16"))
    trainer = Driver(config)
    assert trainer.steps_per_epoch == 4
    for first in range(0, step, 4):
        batches = iter(trainer.train_dataloader)
        assert len(list(islice(batches, min(4, step - first)))) > 0
    trainer.ckpt_handler.save_checkpoint(step)
    resumed = Driver(config)
    assert resumed.resume_global_step == step
    assert len(list(resumed.train_dataloader)) == left
    assert resumed.ckpt_handler.train_dataloader is resumed.train_dataloader


def test_a_run_that_has_ended_stays_so(model: Path, tmp_path: Path) -> None:
    """Its trainer looks for its end after a step, not before."""
    config = sft.configuration(tmp_path, model, ("data.train_batch_size=16", "trainer.total_training_steps=4"))
    trainer = Driver(config)
    assert len(list(islice(iter(trainer.train_dataloader), 4))) == 4
    trainer.ckpt_handler.save_checkpoint(4)
    assert list(Driver(config).train_dataloader) == []


@pytest.mark.parametrize("module", [sft_trainer, sft_trainer_ray])
def test_it_runs_our_trainer(module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = []

    class Trainer:
        def __init__(self, config: Any) -> None:
            done.append(config.trainer.save_freq)

        def fit(self) -> None:
            done.append("fit")

    monkeypatch.setattr(module, "SFTTrainer", Trainer)
    if module is sft_trainer:
        monkeypatch.setattr(module, "initialize_global_process_group", lambda: done.append("begin"))
        monkeypatch.setattr(module, "destroy_global_process_group", lambda: done.append("end"))
    else:
        monkeypatch.setattr(module.ray, "init", lambda: done.append("begin"))
    monkeypatch.setattr("sys.argv", ["sft", "trainer.save_freq=7", "trainer.device=cpu", f"hydra.run.dir={tmp_path}"])
    module.main()
    assert done == ["begin", 7, "fit", *(["end"] if module is sft_trainer else [])]


@pytest.mark.parametrize("module", [sft_trainer, sft_trainer_ray])
def test_the_command_line_is_verls(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sft", "trainer.save_freq=7", sft.OURS, "--cfg", "job"])
    module.main()
    shown = capsys.readouterr().out
    assert "save_freq: 7" in shown
    assert "mcore_ckpt.integrations.verl.McoreCkptConfig" in shown
