"""Runs verl's SFT trainer with Ray, and correctly resumes a run that was saved at the end of an epoch.

The configuration and the command line are verl's, except that this module replaces `verl.trainer.sft_trainer_ray`:

    python -m mcore_ckpt.integrations.verl.sft_trainer_ray ...
"""

from __future__ import annotations

from typing import Any

try:
    import hydra
    import ray
    from verl.trainer import sft_trainer_ray as stock
    from verl.utils.device import auto_set_device
except ImportError as error:
    raise ImportError(f"this trainer needs verl 0.9 and ray: pip install verl ray ({error})") from error

from mcore_ckpt.integrations.verl.epochs import ResumesAtEpochEnd


class SFTTrainer(ResumesAtEpochEnd, stock.SFTTrainer):
    """verl's trainer, corrected for runs that resume at the end of an epoch."""


@hydra.main(config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None)
def main(config: Any) -> None:
    auto_set_device(config)
    ray.init()
    SFTTrainer(config).fit()


if __name__ == "__main__":
    main()
