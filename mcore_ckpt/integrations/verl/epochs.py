"""Lets an SFT run that was saved at the end of an epoch resume with the next epoch (verl-project/verl issue 7401)."""

from __future__ import annotations

from typing import Any


class ResumesAtEpochEnd:
    """A mixin that corrects how verl's SFTTrainer resumes at the end of an epoch. The mixin must be the first base.

    The mixin is for verl 0.9.1, `verl.trainer.sft_trainer` and `sft_trainer_ray`. The data loader's state at the end of
    an epoch records that all batches have been used. verl's CheckpointHandler loads that state into the loader of the
    next epoch, which then ends before its first batch. So the run skips an epoch, or ends immediately and reports
    success.
    """

    # Attributes of SFTTrainer.
    resume_global_step: int
    steps_per_epoch: int
    total_training_steps: int
    train_dataloader: Any
    ckpt_handler: Any
    _build_dataloader: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        step = self.resume_global_step
        # After the very last step the exhausted loader must stay. With a new loader the trainer would train one more
        # step, because the trainer checks only after a step whether it has reached the last step.
        if 0 < step < self.total_training_steps and step % self.steps_per_epoch == 0:
            # A new loader is enough, because the trainer computes the epoch from the step.
            self._build_dataloader()
            self.ckpt_handler.train_dataloader = self.train_dataloader
