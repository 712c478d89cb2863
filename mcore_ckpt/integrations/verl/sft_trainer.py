"""Runs verl's SFT trainer on every rank, and correctly resumes a run that was saved at the end of an epoch.

The configuration and the command line are verl's, except that this module replaces `verl.trainer.sft_trainer`:

    torchrun --nproc_per_node 8 -m mcore_ckpt.integrations.verl.sft_trainer ...
"""

from __future__ import annotations

from typing import Any

try:
    import hydra
    from verl.trainer import sft_trainer as stock
    from verl.utils.device import auto_set_device
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
except ImportError as error:
    raise ImportError(f"this trainer needs verl 0.7.1 or newer: pip install verl ({error})") from error

from mcore_ckpt.integrations.verl.epochs import ResumesAtEpochEnd


class SFTTrainer(ResumesAtEpochEnd, stock.SFTTrainer):
    """verl's trainer, corrected for runs that resume at the end of an epoch."""


@hydra.main(config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None)
def main(config: Any) -> None:
    auto_set_device(config)
    initialize_global_process_group()
    SFTTrainer(config).fit()
    destroy_global_process_group()


if __name__ == "__main__":
    main()
