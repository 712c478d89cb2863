"""An SFT run that was saved at the end of an epoch goes on with the next one (verl-project/verl issue 7401)."""

from __future__ import annotations

from typing import Any


class ResumesAtEpochEnd:
    """Goes before verl's SFTTrainer (0.9.1, of `verl.trainer.sft_trainer` or `sft_trainer_ray`) among the bases.

    There the state of the data loader says that all batches of its sampler have been taken. verl's CheckpointHandler
    gives it to the loader that is to run the next epoch, which so ends before its first batch: the run skips an epoch,
    or ends at once, and calls it a success.
    """

    # Of SFTTrainer.
    resume_global_step: int
    steps_per_epoch: int
    total_training_steps: int
    train_dataloader: Any
    ckpt_handler: Any
    _build_dataloader: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        step = self.resume_global_step
        # At the last step of all the exhausted loader is what ends the run: the trainer looks for its end after a step.
        if 0 < step < self.total_training_steps and step % self.steps_per_epoch == 0:
            # The epoch itself the trainer counts by the step.
            self._build_dataloader()
            self.ckpt_handler.train_dataloader = self.train_dataloader
