"""Defines the configuration of a CheckpointManager, and how long ranks wait for each other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mcore_ckpt.errors import InvalidArgumentError, InvalidTypeError
from mcore_ckpt.events import Listener

# How long a rank waits for another rank before it gives up, in seconds, unless the caller chooses.
TIMEOUT_S = 600.0
# The same for the ranks of `mcore-ckpt merge`: one rank can have one more file to write than another, on a slow disk.
# The time can be long, because torchrun notices ranks that die.
MERGE_TIMEOUT_S = 1800.0
# The same for the ranks of `mcore-ckpt convert`: a rank waits while another writes its whole part of the model.
CONVERT_TIMEOUT_S = 6 * 3600.0
# The same for ranks that wait until one rank of each node has downloaded a model from the HuggingFace hub.
DOWNLOAD_TIMEOUT_S = 6 * 3600.0

CONTENT_WORDS = ("model", "optimizer", "extra", "hf_model")

_CHOICES = {
    "async_mode": ("snapshot", "lazy"),
    "if_busy": ("wait", "raise"),
    "if_failed": ("raise", "warn"),
    "load_replicas": ("read", "broadcast"),
}


@dataclass(frozen=True)
class FastTier:
    """Configuration of the fast tier: checkpoints in folders of the nodes, with copies on other nodes.

    With it, `save` writes to the node's own folder, which is memory or a local disk, and every `durable_every`-th step
    is copied to the root beside the training. docs/fast_tier.md says when to use what.

    Attributes:
        folder: a folder of each node's own, with the same path on all nodes, which is not the root. Below `/dev/shm` it
            is memory, which outlives the processes, but not the node. On a local disk it also outlives a restart of the
            node.
        replicas: how many other nodes get a copy of each file. So many nodes can be lost at once without losing a step.
            Bytes that another node's rank has anyway, because it is a data-parallel replica, are not sent.
        keep: how many steps each node keeps.
        durable_every: every how many saved steps one is also saved to the root. None: never. Then the nodes' folders
            are all there is, and no shared file system is needed.
        bytes_per_s: how many bytes a second each node receives at most for the copies of one role. None: no limit.
        domain: returns, on each node, the name of its failure domain, such as its rack. Copies go to nodes of other
            domains. None: each node is a domain of its own.

    Raises:
        InvalidArgumentError: a value is not allowed.

    Example:
        >>> FastTier("/dev/shm/run", replicas=1, keep=2, durable_every=10).replicas
        1
    """

    folder: str | os.PathLike[str]
    replicas: int = 1
    keep: int = 2
    durable_every: int | None = 10
    bytes_per_s: int | None = None
    domain: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not isinstance(os.fspath(self.folder), str):
            raise InvalidTypeError(f"folder of the fast tier is {self.folder!r}: use a path, such as '/dev/shm/run'")
        if not os.path.isabs(os.path.expanduser(os.fspath(self.folder))):
            raise InvalidArgumentError(
                f"folder of the fast tier is {os.fspath(self.folder)!r}: use an absolute path, such as /dev/shm/run, "
                "which is a folder of each node's own"
            )
        for field, least in (("replicas", 0), ("keep", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgumentError(f"{field} of the fast tier is {value!r}: use {least} or more")
        for field in ("durable_every", "bytes_per_s"):
            if not _is_step_count(getattr(self, field)):
                raise InvalidArgumentError(
                    f"{field} of the fast tier is {getattr(self, field)!r}: use 1 or more, or None"
                )
        if self.domain is not None and not callable(self.domain):
            raise InvalidTypeError(
                f"domain of the fast tier is {self.domain!r}: use a function without arguments that returns a name"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """Configuration of one CheckpointManager.

    Attributes:
        save_contents: what to save: `model`, `optimizer` (with the LR scheduler), `extra` (random state and the
            trainer's extra state), `hf_model` (the model in HuggingFace's format, in `huggingface/`; needs the
            manager's `hf_config`).
        load_contents: what to load, as a list of the same words. The checkpoint must contain all of them. With `model`,
            `hf_model` adds nothing. Without `model`, `hf_model` loads the weights from `huggingface/`.
        async_save: whether `save` returns as soon as the training state may change again. The save then finishes in the
            background. The manager starts to prepare host memory for the copies when it is constructed.
        async_mode: when an async `save` returns. "snapshot": after the state has been copied. "lazy": immediately. The
            state on a GPU is then copied during the next forward and backward pass. Megatron's methods that change the
            state (`optimizer.step()`, parameter gathers, loading) make their CUDA stream wait for the copy. Other code
            that changes the state must call `manager.before_step()` first. In both modes, state in CPU memory is copied
            before `save` returns.
        if_busy: what `save` does while an earlier save is under way: "wait" for it, or "raise" BusyError.
        if_failed: what happens after a background save has failed. "raise": the next call of the manager raises the
            error of that save on every rank. "warn": the error is only logged.
        shared_writes: whether the data-parallel and context-parallel replicas of a file each write a part of it. If
            not, the first replica writes the whole file.
        load_replicas: how ranks load tensors that are the same on several ranks: those of the model, which data and
            context parallelism replicate, and those of an optimizer that is not distributed. "read": each rank reads
            them. "broadcast": one rank reads them and sends them to the other ranks, which is faster if the network is
            faster than the file system.
        max_host_bytes: the largest number of bytes of host memory that this rank uses for copies of its state. None: no
            limit.
        max_to_keep: how many complete steps to keep on disk, including those of earlier runs. None: all. After each
            commit, older steps are deleted in the background. Pinned steps (`mcore_ckpt.pin`) are never deleted.
        keep_every: steps that are multiples of this number are also kept, however old they are. Requires max_to_keep.
        remote: the URL of a remote store that fsspec supports: s3://bucket/prefix, gs://..., hdfs://host/path,
            file:///folder. Committed checkpoints are uploaded to it in the background. `load` takes a checkpoint from
            the store if it is newer than the local ones, or if the local ones are gone. None: no remote store.
            Credentials are read from the environment, in the same way as by the store's own tools. In file://~/folder,
            `~` is the home folder.
        prune_remote: whether `max_to_keep` and `keep_every` also apply to the remote store. If not, the store keeps all
            checkpoints.
        upload_timeout_s: how long `wait` and `close` wait for unfinished uploads, in seconds. Only rank 0 waits. If
            training continues after `wait`, this time must be shorter than the process group's timeout.
        roles: the roles that every step consists of. A step is complete once all of them are committed. None: only this
            manager's role.
        vocab_size: the number of tokens, without the rows that megatron adds to embeddings as padding. It is needed
            only if the saved embeddings have another number of rows and padding alone does not explain the difference.
            None: the value in the HuggingFace config.
        timeout_s: how long a rank waits for another rank before it gives up, in seconds.
        assume_optimizer_step: the optimizer's step count to assume for checkpoints of other programs that do not store
            it (verl up to 0.4). None: the optimizer state of such a checkpoint is refused.
        skip_frozen: whether to leave parameters that are not trained (the base model under LoRA adapters) out of saves
            and loads. The trainer must then get them from elsewhere. `hf_model` then writes only the adapters, in
            PEFT's form, into `huggingface/adapter/`.
        strict_dtypes: whether `load` refuses to round values because model or optimizer keep them in dtypes of fewer
            bits than the checkpoint. If not, it rounds each once and says so in its report.
        strict_model: whether `load` refuses a checkpoint whose model computes something else with the same tensors: it
            has other heads, another activation, other rotary embeddings, ... If not, it says so in a warning and in its
            report, by field.
        reset_moments: whether `load` may start an optimizer with new moments if it needs others than the checkpoint has
            (Muon after Adam), and take over only its main parameters. If not, such a load is refused.
        strict: whether `load` raises an error if the checkpoint that it reads is damaged. If not, it loads the next
            older one.
        listeners: what to call with the events of saves, loads, deletions and uploads (`mcore_ckpt.events`): functions,
            or objects of `mcore_ckpt.integrations.listeners`. They run on a thread of their own, and nothing that they
            do affects a save. Each rank calls its own, so ranks may have different ones, or none.
        fast: the fast tier, for which each node has a folder of its own. None: every step is saved to the root.

    Raises:
        InvalidArgumentError: a value is not allowed, or two values contradict each other.
        InvalidTypeError: something in `listeners` cannot be called with an event.

    Example:
        >>> CheckpointConfig(save_contents=("model", "optimizer", "extra"), max_to_keep=2).max_to_keep
        2
    """

    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    load_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    async_save: bool = False
    async_mode: str = "snapshot"
    if_busy: str = "wait"
    if_failed: str = "raise"
    shared_writes: bool = True
    load_replicas: str = "read"
    max_host_bytes: int | None = None
    max_to_keep: int | None = None
    keep_every: int | None = None
    remote: str | None = dataclasses.field(default=None, repr=False)  # the URL can contain a password
    prune_remote: bool = True
    upload_timeout_s: float = 300.0
    roles: tuple[str, ...] | None = None
    vocab_size: int | None = None
    timeout_s: float = TIMEOUT_S
    skip_frozen: bool = False
    strict_dtypes: bool = False
    strict_model: bool = False
    reset_moments: bool = False
    strict: bool = False
    assume_optimizer_step: int | None = None
    listeners: tuple[Listener, ...] = dataclasses.field(default=(), hash=False)  # listeners need not be hashable
    fast: FastTier | None = None

    def __post_init__(self) -> None:
        for field in ("save_contents", "load_contents"):
            object.__setattr__(self, field, _contents(field, getattr(self, field)))
        object.__setattr__(self, "listeners", _callable(self.listeners))
        if self.fast is not None and not isinstance(self.fast, FastTier):
            raise InvalidTypeError(f"fast is {self.fast!r}: use a FastTier, or None")
        if self.max_to_keep is not None and (not isinstance(self.max_to_keep, int) or self.max_to_keep < 1):
            raise InvalidArgumentError(
                f"max_to_keep is {self.max_to_keep!r}: use 1 or more, or None to keep every checkpoint"
            )
        if not _is_step_count(self.keep_every):
            raise InvalidArgumentError(f"keep_every is {self.keep_every!r}: use 1 or more, or None")
        if self.keep_every is not None and self.max_to_keep is None:
            raise InvalidArgumentError(
                "keep_every is given without max_to_keep, but without max_to_keep every step is kept: give both"
            )
        if self.vocab_size is not None and (not isinstance(self.vocab_size, int) or self.vocab_size < 1):
            raise InvalidArgumentError(f"vocab_size is {self.vocab_size!r}: use the number of tokens, or None")
        if not self.timeout_s > 0:
            raise InvalidArgumentError(f"timeout_s is {self.timeout_s}: use a positive number of seconds")
        if not self.upload_timeout_s >= 0:
            raise InvalidArgumentError(
                f"upload_timeout_s is {self.upload_timeout_s}: use a number of seconds, or 0 not to wait for uploads"
            )
        if not _is_step_count(self.assume_optimizer_step):
            raise InvalidArgumentError(
                f"assume_optimizer_step is {self.assume_optimizer_step!r}: use 1 or more, or None"
            )
        if self.remote is not None and self.remote.startswith("file://~"):
            # fsspec does not expand "~", and would make a folder with that name.
            object.__setattr__(self, "remote", "file://" + os.path.expanduser(self.remote.removeprefix("file://")))
        if self.roles is not None:
            object.__setattr__(self, "roles", _unique_roles(self.roles))
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise InvalidArgumentError(
                    f"{field} is {getattr(self, field)!r}: use one of {', '.join(map(repr, choices))}"
                )
        if self.max_host_bytes is not None and (not isinstance(self.max_host_bytes, int) or self.max_host_bytes < 1):
            raise InvalidArgumentError(
                f"max_host_bytes is {self.max_host_bytes!r}: use 1 or more, or None for no limit"
            )


def _is_step_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _unique_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """Removes repeated roles. `checkpoint.file_names.check_roles` checks later that roles can be folder names."""
    if isinstance(roles, str):
        raise InvalidArgumentError(f"roles is the string {roles!r}: use a list of roles, such as [{roles!r}]")
    return tuple(dict.fromkeys(roles))


def _callable(listeners: object) -> tuple[Listener, ...]:
    """Returns the listeners as a tuple. Raises InvalidTypeError if one is not what a listener must be."""
    if callable(listeners) or isinstance(listeners, str) or not isinstance(listeners, Iterable):
        raise InvalidTypeError(f"listeners is {listeners!r}: use a list of listeners, such as [LoggingListener()]")
    found = tuple(listeners)
    for number, listener in enumerate(found):
        if isinstance(listener, type):
            raise InvalidTypeError(
                f"listeners[{number}] is the class {listener.__name__}: use an object of it, {listener.__name__}(...)"
            )
        if not callable(listener):
            raise InvalidTypeError(
                f"listeners[{number}] is {listener!r}, which cannot be called: use a function with one argument, the "
                "event (mcore_ckpt.events), or an object with such a method __call__"
            )
    return found


def _contents(field: str, words: tuple[str, ...] | list[str] | str) -> tuple[str, ...]:
    if isinstance(words, str):
        raise InvalidArgumentError(
            f"{field} is the string {words!r}: use a list of words, such as ['model', 'optimizer']"
        )
    words = tuple(words)
    for word in words:
        if word not in CONTENT_WORDS:
            raise InvalidArgumentError(f"{field} has {word!r}: the allowed words are {', '.join(CONTENT_WORDS)}")
    if not words:
        raise InvalidArgumentError(f"{field} is empty: name at least one of {', '.join(CONTENT_WORDS)}")
    return words
