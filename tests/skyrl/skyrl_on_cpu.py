"""SkyRL's real trainers and Megatron strategy without CUDA and ray: what cannot be had here is stood in for, as said.

Packages that SkyRL imports and no test comes near are empty (tests/verl/absent.py). A real WorkerDispatch calls actors
of ray; `Dispatch` calls the worker of this process.
"""

import typing
from collections.abc import Sequence
from typing import Any

import typing_extensions

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from tests.verl import absent

# Megatron-Bridge makes models from HuggingFace, which the tests do not.
ABSENT = (*absent.ABSENT, "vllm", "httpx", "msgpack", "requests", "megatron.bridge")


def import_skyrl() -> None:
    """Makes SkyRL importable. Call it once in a process, before anything imports SkyRL."""
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # pydantic wants it below Python 3.12
    absent.stand_in(ABSENT)
    import ray

    ray.is_initialized = lambda: False
    enable_cpu()


class Dispatch:
    """Calls the one worker of this process as WorkerDispatch calls all workers by ray, without offloading."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None, model_id: Any = None) -> None:
        assert model == "policy"
        self._worker.save_checkpoint(ckpt_dir=ckpt_dir, tokenizer=tokenizer)

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        model_id: Any = None,
    ) -> None:
        self._worker.load_checkpoint(ckpt_dir, load_optimizer_states, load_lr_scheduler_states)

    def get_node_ids(self) -> Sequence[str]:
        return []
