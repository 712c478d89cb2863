"""A run of slime or miles: its driver's loop around its actor, with a real megatron training on each rank.

The actor and the rollouts' data source are those of the stand-ins (tests/integrations/slime_stand_in). Where
SLIME_SOURCE or MILES_SOURCE names a checkout, its own `checkpoint` and `model` are run, which call what the integration
replaces. Ray and sglang have no part in this.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import megatron_lm
from tests.distributed.training import Layout, Step, Training, build, train

STAND_INS = Path(__file__).parents[1] / "integrations"
from tests.verl import absent  # noqa: E402

_NONE = "the wheel of megatron-core 0.16 has nothing of Megatron-LM, whose functions slime calls"
async_utils = pytest.importorskip("megatron.training.async_utils", reason=_NONE)
checkpointing = pytest.importorskip("megatron.training.checkpointing", reason=_NONE)
global_vars = pytest.importorskip("megatron.training.global_vars", reason=_NONE)

SAMPLES = 8  # of one rollout


def arguments(layout: Layout, root: Path, fork: str = "slime", **more: Any) -> Namespace:
    """What a launch script gives, and what the fork's own validation makes of it."""
    args = megatron_lm.arguments(
        layout,
        root,
        **{
            "async_save": False,
            "custom_megatron_init_path": f"mcore_ckpt.integrations.{fork}.install",
            "data_source_path": f"{fork}.rollout.data_source.RolloutDataSourceWithBuffer",
            "hf_checkpoint": None,
            "mcore_ckpt": {"timeout_s": 40.0},
            "ci_test": False,
            "num_critic_only_steps": 0,
            "num_rollout": 9,
            "overlap_param_gather": False,
            "global_batch_size": SAMPLES,
            "use_checkpoint_opt_param_scheduler": True,
            "offload_train": False,
            "ref_ckpt_step": None,
            "ref_load": None,
            "rollout_global_dataset": True,
            "save_interval": 1,
            "use_critic": False,
            "lora_adapter_path": None,
            **more,
        },
    )
    if not (root / "latest_checkpointed_iteration.txt").exists():
        args.no_load_optim = args.no_load_rng = args.finetune = True
        args.load = args.ref_load
    return args


@contextmanager
def installed(fork: str) -> Iterator[pytest.MonkeyPatch]:
    """The fork's package, which is gone afterwards, and whatever has been replaced in Megatron-LM's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(STAND_INS / f"{fork}_stand_in")
        if source := os.environ.get(f"{fork.upper()}_SOURCE"):
            _take_real_modules(fork, Path(source), patched)
        patched.setattr(async_utils, "maybe_finalize_async_save", async_utils.maybe_finalize_async_save)
        # Megatron-LM remembers the version of the first checkpoint that a process loads, and refuses others.
        patched.setattr(checkpointing, "_CHECKPOINT_VERSION", None)
        try:
            yield patched
        finally:
            global_vars.unset_global_variables()
            ours = f"mcore_ckpt.integrations.{fork}.data_source"
            for name in [name for name in sys.modules if name == ours or name.partition(".")[0] == fork]:
                del sys.modules[name]


def _take_real_modules(fork: str, source: Path, patched: pytest.MonkeyPatch) -> None:
    """Puts modules of the fork in the place of the stand-in's. What they import beside stays empty."""
    patched.setattr(sys, "meta_path", [*sys.meta_path, absent._Finder((fork, "tqdm", "ray"))])
    for name in ("initialize", "lora_utils") if fork == "miles" else ("initialize",):
        stand_in: Any = import_module(f"{fork}.backends.megatron_utils.{name}")
        stand_in.__getattr__ = absent._anything  # what the real modules import from it and no test comes near
    small = ("utils.misc", *(("utils.lora", "utils.multi_lora") if fork == "miles" else ()))
    for name in (*small, "backends.megatron_utils.checkpoint", "backends.megatron_utils.model"):
        qualified = f"{fork}.{name}"
        spec = spec_from_file_location(qualified, source / f"{qualified.replace('.', '/')}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[qualified] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[qualified])


@dataclass
class Run:
    """One life of a run. Used within `parallel(layout)` and `installed(fork)`.

    Attributes:
        args: the fork's.
        seed: of the model that is built.
        spoil: called with the new training before the fork loads.
        samples: what each rollout was given, on rank 0.
    """

    layout: Layout
    args: Namespace
    patched: pytest.MonkeyPatch
    fork: str = "slime"
    role: str = "actor"
    seed: int = 1
    spoil: Any = None
    with_ref: bool = False
    training: Training = field(init=False)
    actor: Any = field(init=False)
    samples: list[list[int]] = field(default_factory=list)

    def start(self) -> int:
        """Makes the actor, and returns the first rollout."""
        module = import_module(f"{self.fork}.backends.megatron_utils.model")
        self.patched.setattr(module, "setup_model_and_optimizer", self._build)
        self.actor = import_module(f"{self.fork}.backends.megatron_utils.actor").MegatronTrainRayActor()
        more = {"indep_dp_info": None} if self.fork == "miles" else {}
        first = self.actor.init(self.args, self.role, with_ref=self.with_ref, **more)
        # `miles_validate_args` and `slime_validate_args`
        first = 0 if self.args.finetune else first
        module_name, _, name = self.args.data_source_path.rpartition(".")
        self.source = getattr(import_module(module_name), name)(self.args)
        self.source.load(first - 1)
        return first

    def go(self, first: int, last: int, num_rollout: int | None = None) -> list[Step]:
        """The driver's loop, from one rollout to before another."""
        steps = []
        for rollout_id in range(first, last):
            self.samples.append(self.source.get_samples(SAMPLES))
            steps += train(self.training, rollout_id, rollout_id + 1)
            if (rollout_id + 1) % self.args.save_interval == 0:
                self.actor.save_model(rollout_id, force_sync=rollout_id + 1 == num_rollout)
                if dist.get_rank() == 0:
                    self.source.save(rollout_id)
        return steps

    def finish(self) -> None:
        """What the driver does for the last save: it waits."""
        async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
        dist.barrier()  # rank 0 deletes old steps

    def _build(self, args: Namespace, role: str = "actor") -> tuple[Any, Any, Any]:
        self.training = build(self.layout, seed=self.seed)
        if self.spoil is not None:
            self.spoil(self.training)
        return self.training.model, self.training.optimizer, self.training.scheduler
