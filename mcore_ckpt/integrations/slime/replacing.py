"""Replaces the functions with which slime's actors save and load. miles, a fork of slime, has the same functions.

slime has no hook for checkpoints. `slime.backends.megatron_utils` imports Megatron-LM's functions into its modules
`checkpoint` and `model`, and calls them from there. `--custom-megatron-init-path` names a function that each rank calls
before the model exists (`initialize.init`), and that function can replace the imported functions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import MANIFEST_FILE, step_dir
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointMismatchError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.integrations.kit.arguments import COUNTERS, Arguments
from mcore_ckpt.integrations.kit.loop import Loaded, LoopCheckpoints, Training, restore_counters
from mcore_ckpt.integrations.kit.options import refuse_fast, refuse_skip
from mcore_ckpt.integrations.kit.published import published_config, published_tokenizer
from mcore_ckpt.integrations.kit.together import decided_by_rank_0
from mcore_ckpt.integrations.megatron.refusals import refuse_partial_loads
from mcore_ckpt.integrations.slime.data_position import newest_with_data
from mcore_ckpt.integrations.slime.rollout_role import (
    ROLLOUT_ROLE,
    has_rollout_role,
    models_of_step,
    read_options,
)
from mcore_ckpt.steps import complete_steps, uncommit_earlier_save

logger = logging.getLogger(__name__)

# The arguments that slime sets for a run without a checkpoint (`slime_validate_args`).
_FROM_THE_BEGINNING = {"finetune": True, "no_load_optim": True, "no_load_rng": True}


def replace_functions(package: str, args: Any, kind: type[ActorCheckpoints] | None = None) -> None:
    """Lets the actors of slime, or of a fork of slime, save and load with this package.

    `args` are the arguments of slime or the fork, and `kind` is the class that saves and loads.

    Raises:
        ImportError: the package is not installed.
        InvalidArgumentError: `args.mcore_ckpt` has an unknown option or a value that is not allowed.
    """
    try:
        checkpoint: Any = import_module(f"{package}.backends.megatron_utils.checkpoint")
        model: Any = import_module(f"{package}.backends.megatron_utils.model")
        async_utils: Any = import_module("megatron.training.async_utils")
    except ImportError as error:
        raise ImportError(f"mcore_ckpt.integrations.{package} needs {package} and Megatron-LM: {error}") from error
    ours = (kind or ActorCheckpoints)(checkpoint, args)
    checkpoint.save_checkpoint = model.save_checkpoint = ours.save_checkpoint
    # The package's `load_checkpoint` calls this function, unless it takes the folder for a HuggingFace folder.
    checkpoint._load_checkpoint_megatron = ours.load_checkpoint
    checkpoint._is_megatron_checkpoint = ours.is_megatron_checkpoint(checkpoint._is_megatron_checkpoint)
    # `save_model` imports this function from `async_utils` at each call.
    async_utils.maybe_finalize_async_save = ours.maybe_finalize_async_save
    ours.replace_more(model)


class ActorCheckpoints:
    """Saves and loads the model of one actor or critic. Each rank has one such object, for the life of its process.

    `checkpoint` is the module `backends.megatron_utils.checkpoint` of the package. The package changes its arguments
    (`args`) between loads.
    """

    _has_rollout_role = False

    def __init__(self, checkpoint: Any, args: Any) -> None:
        self._checkpoint = checkpoint
        self._args = args
        self._has_rollout_role = has_rollout_role(args)
        self._config = self._read_config()
        self._checkpoints = LoopCheckpoints()
        self._hf_config = published_config(args.hf_checkpoint, needed="hf_model" in self._config.save_contents)
        self._tokenizer = published_tokenizer(args.hf_checkpoint)
        # The folder where the driver looks for the data position. Keep it, because miles later changes --load for the
        # critic.
        self._data_root = args.load
        # The step that was loaded from each folder. --keep-old-actor loads the same folder once more, and must then get
        # the same step.
        self._resumed: dict[str, int] = {}

    def save_checkpoint(
        self,
        iteration: int,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        num_floating_point_operations_so_far: float = 0,
        checkpointing_context: dict[str, Any] | None = None,
        non_persistent_ckpt: bool = False,
        train_data_iterator: Any = None,
        preprocess_common_state_dict_fn: Any = None,
    ) -> None:
        """Saves to `<args.save>/global_steps_{rollout id}/{role}`. Takes the place of Megatron-LM's function.

        Raises:
            UnsupportedError: an argument cannot be honoured.
            CheckpointError: see CheckpointManager.save.
        """
        _refuse_in_memory(non_persistent_ckpt, checkpointing_context)
        args, training = Arguments(self._args), self._training(model, optimizer, opt_param_scheduler)
        args.refuse_unsupported()

        roles, root = self._roles(training.role, iteration), Path(args.folder("save"))

        def state() -> dict[str, Any]:
            counters = {name: args[name] for name in COUNTERS}
            return {"num_floating_point_operations_so_far": num_floating_point_operations_so_far, **counters}

        def undo_earlier_save() -> None:
            # This runs after all checks, because a save that is refused must leave the earlier save as it is.
            if ROLLOUT_ROLE in roles:
                uncommit_earlier_save(step_dir(root, iteration), training.role, ROLLOUT_ROLE)

        config = replace(self._config, roles=roles)
        self._checkpoints.save(iteration, training, args, config, state, prepared=undo_earlier_save)

    def load_checkpoint(
        self,
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        checkpointing_context: dict[str, Any] | None = None,
        skip_load_to_model_and_opt: bool = False,
    ) -> tuple[int, float]:
        """Loads from `args.load`. Takes the place of Megatron-LM's function.

        Returns:
            The rollout id that was saved (0 with `args.finetune`) and the number of floating-point operations so far.

        Raises:
            UnsupportedError: an argument cannot be honoured.
            CheckpointError: see LoopCheckpoints.load.
        """
        refuse_partial_loads(True, skip_load_to_model_and_opt)
        _refuse_in_memory(False, checkpointing_context)
        args, training = Arguments(self._args), self._training(ddp_model, optimizer, opt_param_scheduler)
        args.refuse_unsupported()
        if self._only_critic_was_trained(training):
            logger.warning("%s has only steps of the critic, so the actor starts from the beginning", self._args.load)
            return self._load_beginning(training)
        return self._load_ours(training, args)

    def _load_ours(self, training: Training, args: Arguments) -> tuple[int, float]:
        try:
            loaded = self._load_whole(training, args)
        except CheckpointMismatchError as error:
            if training.role != "critic" or not args["finetune"]:
                raise
            logger.warning(
                "the critic keeps the head that it was made with, because the checkpoint has another head: %s", error
            )
            with _without_head(training.model):
                loaded = self._load_whole(training, args, skip_frozen=True)
        if loaded is None:
            raise CheckpointNotFoundError(f"{args['load']}: there is no checkpoint")
        if args["finetune"]:
            return 0, loaded.operations
        restore_counters(loaded, args)
        self._resumed[str(args["load"])] = loaded.iteration
        return loaded.iteration, loaded.operations

    def _load_whole(self, training: Training, args: Arguments, **options: Any) -> Loaded | None:
        def choose_step(root: Path) -> int | None:
            if args["finetune"]:
                return self._resumed.get(str(root))
            needs_data = self._args.rollout_global_dataset and self._data_root is not None
            if not needs_data:
                return None
            return newest_with_data(root, training.role, Path(self._data_root), self._has_rollout_role)

        return self._checkpoints.load(training, args, replace(self._config, **options), choose_step=choose_step)

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        """Waits for an async save. Takes the place of Megatron-LM's function. See LoopCheckpoints.finalize."""
        self._checkpoints.finalize(blocking, terminate)

    def is_megatron_checkpoint(self, stock: Any) -> Any:
        """Returns a function that says whether a folder is a checkpoint, and not a HuggingFace folder.

        The function returns True for a checkpoint that slime or the fork wrote, and for a folder of our roles or steps.
        """
        names = (MANIFEST_FILE, f"*/{MANIFEST_FILE}")
        return lambda path: any(any(Path(path).glob(name)) for name in names) or stock(path)

    def replace_more(self, model: Any) -> None:
        """Replaces functions that only a fork has, in its module `backends.megatron_utils.model`."""

    def _read_config(self) -> CheckpointConfig:
        config = read_options(self._args)
        refuse_fast(config, "args.mcore_ckpt", "the driver looks for the data position of each step in --load")
        refuse_skip(config, "args.mcore_ckpt", "the driver writes the data position of each step after the save")
        if self._has_rollout_role:
            if config.remote is not None:
                raise UnsupportedError(
                    "args.mcore_ckpt has a remote store, but steps there would lack the files of "
                    f"{self._args.data_source_path}: leave out remote, or --data-source-path"
                )
            return config
        retains = config.max_to_keep is not None or Arguments(self._args)["save_retain_interval"] is not None
        if retains and self._args.rollout_global_dataset:
            # Keep two steps. The driver writes the newest step's data position after the step's weights, so a run that
            # dies in between resumes from the second newest step.
            config = replace(config, max_to_keep=max(2, config.max_to_keep or 1))
        if config.optimizer_for_last is not None and self._args.rollout_global_dataset:
            # Keep two optimizers, because a run resumes from the second newest step if the newest has no data position.
            config = replace(config, optimizer_for_last=max(2, config.optimizer_for_last))
        return config

    def _training(self, model: Any, optimizer: Any, scheduler: Any) -> Training:
        # `initialize_model_and_optimizer` sets the role before it loads.
        return Training(
            list(model), optimizer, scheduler, getattr(model[0], "role", "actor"), self._hf_config, self._tokenizer
        )

    def _shares_folder(self) -> bool:
        """True if actor and critic save to the same folder. (With `megatron_config_path`, the folders can differ.)"""
        return bool(self._args.use_critic) and getattr(self._args, "megatron_config_path", None) is None

    def _roles(self, role: str, rollout_id: int) -> tuple[str, ...]:
        """Returns the roles that a step consists of. The driver saves the actor only from a certain rollout on."""
        models = models_of_step(self._args, rollout_id, self._shares_folder())
        if role not in models:  # this role is saved to another folder
            return (role,)
        return (*models, ROLLOUT_ROLE) if self._has_rollout_role else models

    def _only_critic_was_trained(self, training: Training) -> bool:
        """True if all complete steps are from the time when only the critic was trained (`--num-critic-only-steps`)."""
        args = self._args
        if training.role != "actor" or args.finetune or not self._shares_folder():
            return False
        topic, timeout_s = "looking for steps of the actor", self._config.timeout_s
        return bool(decided_by_rank_0("slime/load", topic, str(args.load), self._sees_critic_alone, timeout_s))

    def _sees_critic_alone(self) -> bool:
        steps = complete_steps(Path(self._args.load))
        last = self._args.num_critic_only_steps
        return bool(steps) and all(step.committed == {"critic"} and step.step < last for step in steps)

    def _load_beginning(self, training: Training) -> tuple[int, float]:
        """Loads the weights that the training starts from, as if there were no checkpoint."""
        args = self._args
        folder = args.ref_load or args.hf_checkpoint
        beginning = {"load": folder, "ckpt_step": args.ref_ckpt_step if args.ref_load else None}
        before = {name: getattr(args, name) for name in (*beginning, *_FROM_THE_BEGINNING)}
        vars(args).update(beginning | _FROM_THE_BEGINNING)
        try:
            return self._checkpoint.load_checkpoint(
                training.model,
                training.optimizer,
                training.lr_scheduler,
                checkpointing_context={},
                skip_load_to_model_and_opt=False,
            )
        finally:
            vars(args).update(before)


@contextmanager
def _without_head(chunks: Sequence[Any]) -> Iterator[None]:
    """Freezes the head of a model, so that a load with `skip_frozen` leaves the head as it is.

    slime starts a critic from the actor's weights, whose head has one row per token, and then initializes the critic's
    head again (`_critic_output_layer_needs_reinit`).
    """
    named = [(f".{name}", parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    heads = [parameter for name, parameter in named if ".output_layer." in name and parameter.requires_grad]
    for head in heads:
        head.requires_grad_(False)
    try:
        yield
    finally:
        for head in heads:
            head.requires_grad_(True)


def _refuse_in_memory(non_persistent_ckpt: bool, context: dict[str, Any] | None) -> None:
    """Raises UnsupportedError if a checkpoint in memory is asked for. miles makes such checkpoints for healing."""
    if non_persistent_ckpt or "local_checkpoint_manager" in (context or {}):
        raise UnsupportedError(
            "checkpoints in memory (--non-persistent-ckpt-type local) are not supported: leave the argument out, and "
            "save more often with --async-save"
        )
