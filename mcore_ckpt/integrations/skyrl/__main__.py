"""Starts a training of SkyRL whose steps this package saves.

python -m mcore_ckpt.integrations.skyrl trainer.strategy=megatron trainer.ckpt_path=/shared/run ...
"""

from __future__ import annotations

import sys
from typing import Any

from mcore_ckpt.integrations.skyrl.trainer import checkpointed


def run(cfg: Any) -> None:
    """Runs SkyRL's own experiment with our checkpoints, in the process that ray has chosen for the driver."""
    from skyrl.train.entrypoints.main_base import BasePPOExp

    class CheckpointExp(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            return checkpointed(super().get_trainer(*args, **kwargs))

    CheckpointExp(cfg).run()


def main() -> None:
    """Does what `skyrl.train.entrypoints.main_base.main` does. The arguments are SkyRL's.

    Raises ImportError: SkyRL is not installed.
    """
    try:
        import ray
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.utils import validate_cfg
        from skyrl.train.utils.utils import initialize_ray
    except ImportError as error:
        raise ImportError(f"mcore_ckpt.integrations.skyrl needs SkyRL: {error}") from error

    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(run).remote(cfg))


if __name__ == "__main__":
    main()
