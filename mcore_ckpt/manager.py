"""Defines the CheckpointManager, the object through which a trainer saves and loads."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import CheckpointError, HungDiskError, InvalidArgumentError, InvalidTypeError
from mcore_ckpt.fast.found import found_on_nodes, own_held, why_not_whole
from mcore_ckpt.fast.saves import open_fast_saves
from mcore_ckpt.fast.tier import promise_space
from mcore_ckpt.formats.huggingface.assets import check_assets
from mcore_ckpt.io.access import top_mode
from mcore_ckpt.io.disk_watch import DiskWatch
from mcore_ckpt.io.store import Store
from mcore_ckpt.load.candidates import remote_steps
from mcore_ckpt.load.load import VERIFY_WORDS, load_state
from mcore_ckpt.load.load_events import LoadEvents
from mcore_ckpt.load.report import LoadResult
from mcore_ckpt.processes import Home
from mcore_ckpt.ranks.meeting import rendezvous
from mcore_ckpt.ranks.rounds import Agreement, Record, agree, decide
from mcore_ckpt.save.background import BackgroundSaves, SaveHandle
from mcore_ckpt.save.context import Closing, context_of
from mcore_ckpt.save.destination import Destination
from mcore_ckpt.save.file_contents import estimated_bytes
from mcore_ckpt.save.guards import Guards, methods_to_delay
from mcore_ckpt.save.hf_export import check_exportable, warn_of_config
from mcore_ckpt.save.host_images import HostImages
from mcore_ckpt.save.nodes import Nodes
from mcore_ckpt.save.request import check_step, read_request
from mcore_ckpt.save.root import Root
from mcore_ckpt.save.save import save_step
from mcore_ckpt.save.save_control import SaveControl
from mcore_ckpt.save.save_events import SaveEvents
from mcore_ckpt.state.attached_parts import Load, part_of
from mcore_ckpt.state.model import as_chunks, has_weights_on_gpu
from mcore_ckpt.state.thread_settings import settings_for_state, settings_here
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.trainer_setup import complete_together, read_trainer
from mcore_ckpt.steps import leftovers
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.choice import choose, oldest_first
from mcore_ckpt.steps.history import RunHistory
from mcore_ckpt.steps.node_steps import NodeStep, node_steps
from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.tools.examine.doctor.start_line import log_root
from mcore_ckpt.urls import local_path

logger = logging.getLogger(__name__)

_SETTING_UP = "setting up a CheckpointManager"


class CheckpointManager:
    """Saves and loads one role's training state.

    Construct a manager on every rank with the same arguments, after megatron's setup. The constructor waits for the
    other ranks.

    With `async_save` the constructor starts a low-priority thread that prepares host memory for the copies of the
    state. A `save` that is called before all of the memory is ready copies only the files that fit into the ready part,
    and writes the other files to the disk before it returns. If the state is on a GPU, such an early `save` waits for
    all of the memory, because copies from a GPU need pinned memory. If the model is on a GPU, the constructor also
    copies a few bytes from that GPU. If the copy fails, the constructor raises an error, so the training does not begin
    without a working `save`.

    Args:
        root: the folder of all steps. It must be the same shared folder on every rank, unless a fast tier has
            `durable_every=None`, because then nothing is written to the root. `~` is the home folder.
        model: a megatron-core model or the list of its virtual chunks, bare or wrapped in DistributedDataParallel.
        optimizer: the optimizer that `get_megatron_optimizer` returned, or None.
        lr_scheduler: an `OptimizerParamScheduler`, another object with state_dict and load_state_dict, or None.
        role: the name of the trained model in its job, such as actor or critic. The role's folder in each step has this
            name.
        hf_config: a transformers config to write into the checkpoint, or None. A save with `hf_model` needs this
            config.
        processing_class: a transformers tokenizer or processor to write into the checkpoint, or None.
        config: the configuration. None: CheckpointConfig().

    Raises:
        UnsupportedError: the model or the optimizer has something that cannot be saved completely. Nothing has been
            changed.
        InvalidArgumentError, InvalidTypeError: an argument has a value or a type that is not allowed.
        InvalidStateError: torch.distributed is initialized, but megatron's parallel state is not, and the model has no
            `pg_collection`.

    Example:
        >>> manager = CheckpointManager("checkpoints", model, optimizer, lr_scheduler)  # doctest: +SKIP
        >>> manager.save(100, extra_state={"samples_seen": 51200}).wait()  # doctest: +SKIP
        >>> result = manager.load()  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | Path,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        *,
        role: str = "actor",
        hf_config: Any = None,
        processing_class: Any = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        config = CheckpointConfig() if config is None else config
        if not isinstance(config, CheckpointConfig):
            raise InvalidTypeError(
                f"config is a {type(config).__name__}: use a CheckpointConfig. CheckpointConfig.from_dict makes "
                "one of a mapping"
            )
        objects = {
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "hf_config": hf_config,
            "processing_class": processing_class,
        }
        self._home, self._closed = Home(), False
        self._guards_made = itertools.count(1)
        # Meet first, so that all ranks learn of later failures.
        agreement = rendezvous(f"{role}/trainer", config.timeout_s, _SETTING_UP)
        with ExitStack() as failed:
            failed.callback(agreement.close)
            try:
                with agreement.call(_SETTING_UP):
                    self._set_up(agreement, failed, root, role, model, config, objects)
            except BaseException as error:
                # Another rank may have its manager already. Make the first call of that manager fail, because the call
                # would otherwise wait for this rank.
                with suppress(RuntimeError):  # the key-value store is gone
                    agreement.fail_next_round(_SETTING_UP, error)
                raise
            failed.pop_all()

    def _set_up(
        self,
        agreement: Agreement,
        failed: ExitStack,
        root: str | Path,
        role: str,
        model: Any,
        config: CheckpointConfig,
        objects: Mapping[str, Any],
    ) -> None:
        """Makes the manager's objects together with the other ranks.

        `failed` gets the objects that must be closed if this method fails.
        """
        trainer = read_trainer(
            agreement, local_path(root, "root").absolute(), role, as_chunks(model), config, dict(objects)
        )
        check_assets(objects["hf_config"])
        images = HostImages(config.timeout_s, trainer.gpu, config.max_host_bytes)
        failed.callback(images.close)
        if has_weights_on_gpu(trainer.chunks):
            images.try_gpu()
        # Open the store now, so that a missing package is noticed now and not at the first upload.
        store = None if config.remote is None else Store(config.remote, config.shared_with_group)
        remote = None if store is None else RemoteSteps(store, trainer.root)
        settings, who = partial(settings_here, trainer.gpu, config.timeout_s), f"rank {agreement.rank}: "
        self._disk = agreement.runner = DiskWatch(config.timeout_s, settings, who)
        lock = TrainerLock(trainer.root, role, top_mode(config.shared_with_group))
        trainer = _set_up_together(trainer, remote, lock)
        fast = None if config.fast is None else open_fast_saves(trainer, config.fast)
        if fast is not None:
            failed.callback(fast.close)
            promise_space(trainer.agreement, fast.tier, partial(estimated_bytes, trainer, fast.tier.writers_of))
        if agreement.is_coordinator:
            self._disk.run(partial(log_root, trainer.root))
        self._trainer = trainer
        self._remote = remote
        self._context = context_of(trainer, images, lock, remote, fast, self._disk)
        self._delivery = self._context.delivery
        self._closing, self._tier = Closing.of(self._context, fast), None if fast is None else fast.tier
        in_root = Root(self._context)
        self._destination: Destination = in_root if fast is None else Nodes(self._context, fast, in_root)
        self._background = BackgroundSaves(self._context.commits, config.if_failed == "warn", config.async_save)
        self._guards = Guards(methods_to_delay(trainer), images.hold)
        self._prepare_host_images()

    def save(
        self,
        step: int,
        extra_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        *,
        roles: Sequence[str] | None = None,
        path: str | Path | None = None,
        max_to_keep: int | None = None,
        metrics: Mapping[str, float] | None = None,
        prepared: Callable[[], object] | None = None,
    ) -> SaveHandle:
        """Saves the state that `save_contents` names. Every rank calls `save`, at the same point of training.

        Returns when the checkpoint is committed. With `async_save`, returns as soon as the training state may change
        again. With a fast tier, the checkpoint is committed on the nodes. If the step is durable and `async_save` is
        off, `save` returns only when the step is in the root, too, or when the machine is about to go
        (`PreemptionGuard`).

        Args:
            step: the step's number, at least 0. An older checkpoint of the same step stays until the new one is
                committed.
            extra_state: this rank's data position, counters and so on: containers, numbers, strings, tensors and NumPy
                arrays (docs/format.md lists the types). Values come back with their types. The extra state may differ
                between ranks. A `ShardedPosition` in the extra state is divided anew under another data-parallel size.
                `extra_state` may also be a function that returns this state. If the function raises on one rank, all
                ranks raise a CommitError. If code before the call of `save` raises on one rank instead, the other ranks
                wait for this rank until `timeout_s`.
            roles: the roles that this step consists of. None: `config.roles`.
            path: the folder to write. None: `<root>/global_steps_{step}/{role}`. Folders of two other forms are also
                part of a step: `<root>/global_step_{step}/{role}` and, for steps with one role,
                `<root>/global_step_{step}`. Both forms may have `checkpoint-{step}` in place of `global_step_{step}`. A
                checkpoint in any other folder is equally safe, but is not part of a step: the tracker does not name it,
                `load()` and `max_to_keep` ignore it, and it is not uploaded to the remote store. Files that a trainer
                has put into the folder stay, unless the save writes a file or folder with the same name
                (docs/format.md).
            max_to_keep: how many steps to keep after this save. None: `config.max_to_keep`.
            metrics: numbers by name, such as {"reward": 0.7}, for `config.keep_best` and `mcore-ckpt list`. Only the
                metrics of rank 0 count. A metric that is not finite counts as missing, with a warning.
                `mcore_ckpt.set_metrics` adds metrics that are known only later.
            prepared: a function that rank 0 calls once the save to the root is sure to begin: the trainer lock is held,
                and the files fit. Nothing has been written yet. The save does not return before the function does, not
                even with `async_save`. If the function raises, all ranks raise. The function may run on another thread.
                With a fast tier, rank 0 calls the function before the step is copied to the root.

        Returns:
            The save's handle. Without `async_save`, the save has ended and is committed. With `if_busy="skip"`, the
            save may have been skipped: see `SaveHandle.skipped`.

        Raises:
            CommitError: a rank failed, died or was late. All ranks raise this error, and the previous checkpoint stays.
            InvalidStateError: this process is a forked child of the process that has made the manager, or `save` is
                called by a function that was attached with a part.
            NoRoomError: the files would not fit on the disk or into a quota, so nothing has been written. A NoRoomError
                is also a CommitError. With `async_save` and `if_failed="warn"` the error is not raised but logged, and
                the returned handle has the error.
            UnsupportedError: a value cannot be stored without pickling a class. The message names the field.
            BusyError: an earlier save is under way, and `if_busy` is "raise".
            LockedError: another trainer, or a tool, writes this role below this root. Nothing has been done.
            InvalidArgumentError: an argument has a value that is not allowed. For example, `path` is the folder of
                another step or of all steps, or the names of two ranks' parts differ only in upper and lower case.
            MemoryError: this rank has too little host memory to copy its state. The other ranks raise a CommitError.
            CheckpointError: an earlier background save failed, and its error had not been raised yet. Nothing has been
                saved by this call.
        """
        self._check_process()
        self._trainer.parts.refuse("save")
        started = time.perf_counter()
        events = SaveEvents(self._delivery, step, self._trainer.role, self._trainer.agreement.rank, started)
        topic = f"saving step {step} of {self._trainer.role}"
        with self._trainer.agreement.call(topic), events.telling_of_failure(), self._settings():
            self._check_open()
            self._check_contents("save_contents")
            request = read_request(
                self._trainer, step, extra_state, roles, path, max_to_keep, metrics, prepared, started
            )
            return save_step(self._context, self._destination, self._background, request, events)

    def attach(self, name: str, *, save: Any = None, load: Load | None = None, optional: bool = False) -> None:
        """Attaches a part: state outside the model that belongs to each step, such as a replay buffer.

        From now on, each `save` also saves the part, and each `load` loads the part from the step whose weights it
        loads, never from another step. All ranks may attach parts, or only some of them. Parts need the word 'extra' in
        `save_contents` and `load_contents`.

        Args:
            name: the part's name, which is the name of its folder: letters, digits, '_', '-' and '.'.
            save: what this rank saves: bytes; the path of a file or folder, which is copied; or a `HandOver` of a file
                or folder, which is moved. `save` can also be a function that gets a new folder, may write files into
                it, and returns None or one of these values. `CheckpointManager.save` calls the function on the
                trainer's thread, and training waits for it. If the function returns a second function, the second
                function is called without arguments while the training continues. The second function may return None
                or one of these values. Files that are copied must not change before the save is committed. Functions
                must return within `CheckpointConfig.timeout_s`, because the other ranks do not wait longer. None: this
                rank saves nothing.
            load: a function that `CheckpointManager.load` calls on the trainer's thread, after model and optimizer have
                been loaded. The function gets the saved part (`state.SavedPart`), which has what each rank has saved.
                None: this rank loads nothing.
            optional: whether a load may leave the part out, because the step does not have it or because
                `load_contents` does not have the word 'extra'. The function `load` is then not called. A checkpoint of
                another program has no parts. Such a checkpoint is loaded in any case, with a warning that names the
                parts that are not optional.

        Raises:
            InvalidArgumentError: the name cannot be used or is used already, or neither `save` nor `load` is given.
            InvalidTypeError: `save` or `load` has a type that is not allowed.

        Example:
            >>> def load(saved):
            ...     buffer.restore(saved.folder())
            >>> manager.attach("replay_buffer", save=buffer.dump, load=load)  # doctest: +SKIP
        """
        self._check_process()
        self._check_open()
        self._trainer.parts.attach(part_of(name, save, load, optional))

    def detach(self, name: str) -> None:
        """Detaches a part. Later saves and loads leave the part out.

        Raises InvalidArgumentError if no part has this name.
        """
        self._check_process()
        self._trainer.parts.detach(name)

    def load(
        self,
        *,
        step: int | None = None,
        path: str | Path | None = None,
        verify: str = "read",
        check_extra: Callable[[Mapping[str, Any] | None], object] | None = None,
    ) -> LoadResult:
        """Loads the contents that `load_contents` names. Every rank calls `load`.

        Args:
            step: the step to load.
            path: the role's folder to load, instead of a step. Without `step` and `path`, the newest complete step is
                loaded, or the next older complete step if the newest is damaged.
            verify: "read": the CRC of each block is checked before the block's bytes are used. "full": the CRCs of all
                files of the checkpoint are checked first, even of files that no rank needs, so that a damaged
                checkpoint changes nothing. "off": no CRC of a tensor is checked, only sizes, indexes and small files.
                Checkpoints of other programs have no CRCs, so `verify` makes no difference for them.
            check_extra: a function that is called with this rank's extra state (None if there is none) before anything
                changes. The function may run on another thread. If the function raises a CheckpointError on one rank,
                all ranks raise this error. The function is not called for a checkpoint of another program.

        Returns:
            The step, the extra state that this rank gave to `save`, and a report.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            InvalidArgumentError: an argument has a value that is not allowed, or a part that is not optional is
                attached, and `load_contents` has no 'extra'.
            CheckpointMismatchError: the checkpoint does not fit this model, optimizer or layout. Nothing has changed.
            CheckpointCorruptError: the checkpoint is damaged, and there is no other checkpoint to load. The message
                says whether model and optimizer have changed.
            CheckpointError: an earlier background save failed, and its error had not been raised yet. Nothing has been
                loaded.
        """
        self._check_process()
        self._trainer.parts.refuse("load")
        with self._trainer.agreement.call("finding a checkpoint"), self._background.raising_earlier_failure():
            self._check_open()
            self._background.wait_until_idle()
            self._check_contents("load_contents")
            if step is not None:
                check_step(step)
            if step is not None and path is not None:
                raise InvalidArgumentError("step and path are both given: use one")
            if verify not in VERIFY_WORDS:
                raise InvalidArgumentError(f"verify is {verify!r}: use one of {', '.join(map(repr, VERIFY_WORDS))}")
            folder, failure = None if path is None else local_path(path, "path"), self._background.failure()
            events = LoadEvents(self._delivery, self._trainer.role, self._trainer.agreement.rank)
            with self._settings(), events.telling_of_failure(step, folder or self._trainer.root):
                result = load_state(
                    self._trainer, self._remote, step, folder, failure, verify, self._tier, self._loaded, check_extra
                )
            events.loaded(result)
            return result

    def _loaded(self, manifest: Manifest, place: Path | str) -> None:
        """Notes that the training goes on from a checkpoint."""
        self._destination.loaded(manifest)
        if self._trainer.agreement.is_coordinator:
            self._disk.run(partial(self._context.history.loaded, manifest.head, place))
            if self._trainer.optimizer is not None:  # this manager trains its model
                self._context.history.hold()
                self._disk.run(self._context.history.warn_of_pins)

    @property
    def history(self) -> RunHistory:
        """The checkpoint that training goes on from. Another manager can go on from it once this manager is closed."""
        return self._context.history

    @property
    def root(self) -> Path:
        """The folder of all steps."""
        return self._trainer.root

    @property
    def role(self) -> str:
        """The name of this manager's folder in each step."""
        return self._trainer.role

    @property
    def load_contents(self) -> tuple[str, ...]:
        """The contents that a load reads (`CheckpointConfig.load_contents`)."""
        return self._trainer.config.load_contents

    def agree(self, topic: str, request: Record | Callable[[], Record], answer: Callable[[], Record]) -> Record:
        """Returns rank 0's answer on every rank. Every rank calls `agree` with the same request.

        Args:
            topic: what is being agreed on, for messages.
            request: plain JSON values that are the same on all ranks, or a function that returns such values. The
                function can first check conditions that may fail on a single rank.
            answer: returns plain JSON values. `answer` is called only on rank 0.

        Raises:
            AgreementError: the requests differ, a rank is missing, or `request` or `answer` raised something other than
                a CheckpointError.
            CheckpointError: `request` raised this error on some rank, or `answer` raised it on rank 0. All ranks raise
                an error of the same type.
        """
        self._check_process()
        return agree(self._trainer.agreement, topic, request, answer)

    def save_control(self) -> SaveControl:
        """Returns what a new `PreemptionGuard` needs from this manager. Every rank calls this method equally often."""
        agreement = self._trainer.agreement
        open_own = partial(agreement.for_thread, f"preemption-{next(self._guards_made)}")
        return SaveControl(self.role, agreement, self._context.commits, self._background, self._destination, open_own)

    def _call(self, topic: str) -> AbstractContextManager[None]:
        """Returns a context in which all that happens counts as one call of all ranks (`Agreement.call`)."""
        self._check_process()
        return self._trainer.agreement.call(topic)

    def latest_step(self) -> int | None:
        """Returns the newest complete step of this role, local or in the remote store; None if there is none.

        The result is what this rank sees. The ranks do not agree on the result, and the checkpoint's bytes are not
        checked.

        Raises:
            RemoteError: there is no local step, and the remote store, which may have a step, does not answer.
        """
        self._check_process()
        roles, here = (self._trainer.role,), steps.list_steps(self._trainer.root)
        there = self.remote_steps(None, required=not choose(here, roles).steps)
        everywhere: list[steps.StepStatus | RemoteStep] = [*there, *here]
        return next((each.step for each in choose(everywhere, roles).steps), None)

    def remote_steps(self, step: int | None, required: bool) -> list[RemoteStep]:
        """Returns the steps that this rank sees in the remote store, the oldest first; an empty list without a store.

        Args:
            step: the only step to look for. None: all steps.
            required: whether to raise an error if the store does not answer.

        Raises:
            RemoteError: the store does not answer, and `required` is true.
        """
        self._check_process()
        return remote_steps(self._remote, self._trainer.root, step, required)

    def fast_steps_found(self, roles: Sequence[str], step: int | None) -> tuple[list[NodeStep], list[NodeStep]]:
        """Returns the steps of the fast tier that are whole with all these roles, and the remains of newer steps.

        In both lists, the newest step is first. Every rank calls this method, and all ranks get the same result.
        Without a fast tier, both lists are empty.

        Args:
            roles: the roles that a step must have.
            step: the only step to look for. None: all steps.
        """
        self._check_process()
        tier = self._tier
        if tier is None:
            return [], []

        def combine(records: Sequence[Record]) -> Record:
            found = [each for each in found_on_nodes(tier, records) if step in (None, each.step)]
            return {"steps": [each.to_record() for each in node_steps(found, roles, partial(why_not_whole, tier))]}

        def work() -> Record:
            return {"held": [held.to_record() for held in own_held(tier)]}

        outcome = decide(self._trainer.agreement, "finding steps on the nodes", work, combine)
        last_first = oldest_first([NodeStep.of(each) for each in outcome["steps"]], roles)[::-1]
        whole = [each for each in last_first if each.is_complete]
        return whole, [each for each in last_first if each not in whole]

    def before_step(self) -> None:
        """Makes later work of the current CUDA stream wait until a lazy save has copied the state.

        Call this method before your own code changes parameters. `optimizer.step()`, parameter gathers and loading
        already call it. If no copy is under way, nothing happens. The host does not wait, unless the stream is being
        captured into a CUDA graph. A graph that changes parameters must be replayed after a call of `before_step`.

        Raises:
            CommitError: the host had to wait, and the GPU hangs.
        """
        self._check_process()
        self._context.host_images.hold()

    def wait(self) -> None:
        """Waits until no save is under way and no old step is being deleted. Every rank calls `wait`.

        With a fast tier, every rank also waits until no step is being copied to other nodes or to the root. Rank 0 also
        waits for uploads, for at most `upload_timeout_s`. Every rank with listeners waits until its listeners have got
        all events, for at most ten seconds.

        Raises:
            CheckpointError: a background save failed, and its error had not been raised yet.
        """
        self._check_process()
        self._check_open()
        self._background.wait_until_idle()
        self._destination.wait()
        uploads = self._context.uploads
        if uploads is not None and not uploads.wait(self._trainer.config.upload_timeout_s):
            logger.warning("an upload is still under way after upload_timeout_s, and continues in the background")
        self._delivery.drain(is_last=False)
        self._background.raise_failure()

    def close(self) -> None:
        """Waits for a save that is under way, and frees the host memory. The manager cannot be used afterwards.

        Rank 0 also waits for uploads, for at most `upload_timeout_s`. After a restart, the next manager uploads the
        checkpoints that the store lacks. Every rank waits for listeners as `wait` does. In a forked child of the
        process that has made the manager, `close` does nothing.

        Raises:
            CheckpointError: a background save failed, and its error had not been raised yet. The manager is closed
                nevertheless.
        """
        if self._closed or not self._home.is_here:
            return
        self._background.wait_until_idle()
        self._guards.remove()
        self._closed = True
        with ExitStack() as last:  # the last callback runs first, and all callbacks run even if one fails
            last.callback(self._background.raise_failure)
            last.callback(self._closing.close)
            last.callback(self._remove_interrupted)
            last.callback(self._destination.wait)

    def _remove_interrupted(self) -> None:
        with suppress(HungDiskError):  # the next start of a trainer removes the leftovers
            self._disk.run(self._destination.remove_interrupted)

    def _settings(self) -> AbstractContextManager[None]:
        return settings_for_state(self._trainer.gpu, self._trainer.config.timeout_s)

    def _prepare_host_images(self) -> None:
        """Starts to allocate host memory for the first async save, so that this save need not wait for the memory."""
        if not self._trainer.config.async_save:
            return
        try:
            nbytes = estimated_bytes(self._trainer, self._destination.writers_of)
            self._context.host_images.prepare(nbytes, has_weights_on_gpu(self._trainer.chunks))
        except CheckpointError as error:
            # If the trainer saves, the save raises this error on all ranks. A trainer that only loads need not see the
            # error.
            logger.debug("host memory is not prepared: %s", error)

    def _check_contents(self, field: str) -> None:
        if self._trainer.optimizer is None and "optimizer" in getattr(self._trainer.config, field):
            raise InvalidArgumentError(
                f"{field} has 'optimizer', but the manager has no optimizer: pass one, or leave the word out"
            )

    def _check_process(self) -> None:
        self._home.check(f"this CheckpointManager of {self._trainer.role}")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("this CheckpointManager is closed: make a new one")


def _set_up_together(trainer: Trainer, remote: RemoteSteps | None, lock: TrainerLock) -> Trainer:
    """Checks the model and the arguments on all ranks together. Returns the completed trainer."""

    def look_at_root() -> None:
        leftovers.remove_leftovers(trainer.root, trainer.role, alone=False)
        lock.look()

    remote_url = None if remote is None else remote.store.url
    known, shards = complete_together(trainer, _SETTING_UP, remote_url, look_at_root)
    if "hf_model" in known.config.save_contents:

        def check() -> Record:
            check_exportable(known, shards)
            return {}

        decide(known.agreement, _SETTING_UP, check, lambda _: {})
    else:
        warn_of_config(known)
    return known
