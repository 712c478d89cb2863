"""Configuration of a CheckpointManager."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt.errors import InvalidArgumentError

CONTENT_WORDS = ("model", "optimizer", "extra", "hf_model")

_CHOICES = {
    "async_mode": ("snapshot", "lazy"),
    "if_busy": ("wait", "raise"),
    "if_failed": ("raise", "warn"),
    "load_replicas": ("read", "broadcast"),
}


@dataclass(frozen=True)
class CheckpointConfig:
    """Configuration of one CheckpointManager.

    Attributes:
        save_contents: what to save: `model`, `optimizer` (with the LR scheduler), `extra` (random state and the
            trainer's extra state), `hf_model` (the model in HuggingFace's format, in `huggingface/`; needs the
            manager's `hf_config`).
        load_contents: what to load, in the same words. The checkpoint must have all of it. `hf_model` adds nothing to
            `model`; without `model` it loads the weights in `huggingface/`.
        async_save: `save` returns as soon as the training state may change again; the rest of the save goes on beside
            the training. The manager then prepares host memory for the copies from the moment it is made.
        async_mode: when an async `save` returns. "snapshot": when the state has been copied. "lazy": at once; a state
            on a GPU is copied during the next forward and backward pass, and megatron's methods that change it
            (`optimizer.step()`, parameter gathers, loading) wait for the copy on their stream. Other code that changes
            it must call `manager.before_step()` first. In both modes a state in CPU memory is copied before `save`
            returns.
        if_busy: what `save` does while an earlier save is under way: "wait" for it, or "raise" BusyError.
        if_failed: what the next call does if a save has failed beside the training: "raise" its error on every rank,
            or "warn" in the log and go on.
        shared_writes: whether each replica of data and context parallelism writes a part of each replicated file. If
            not, the first replica writes all of it.
        load_replicas: how ranks load what is the same on several ranks (the model, over data and context parallelism;
            the state of an optimizer that is not distributed). "read": each rank reads it. "broadcast": one rank reads
            it and sends it to the others, which is faster if the network is faster than the file system.
        max_host_bytes: the most bytes of host memory that this rank keeps for copies of its state; None: no limit.
        max_to_keep: how many complete steps stay on disk, counted on disk; None keeps all. Older steps are deleted
            after the commit, beside the training. Pinned steps (`mcore_ckpt.pin`) stay.
        keep_every: steps that are multiples of this number stay too, whatever their age; needs max_to_keep.
        remote: the URL of a remote store that fsspec knows: s3://bucket/prefix, gs://..., hdfs://host/path,
            file:///folder. Committed checkpoints are uploaded to it beside the training. They are loaded from it if
            they are newer than the local ones, or the local ones are gone. None: there is no store. Credentials come
            from the environment, as for the store's own tools. `~` in file://~/folder is the home folder.
        prune_remote: whether `max_to_keep` and `keep_every` apply to the remote store, too. If not, it keeps all.
        upload_timeout_s: how long `wait` and `close` wait for uploads under way, in seconds. Only rank 0 waits, so keep
            it below the process group's timeout if training goes on after `wait`.
        roles: the roles that every step consists of. A step is complete when all have committed. None: this manager's
            role alone.
        vocab_size: the number of tokens, without the rows that megatron pads embeddings with. It is needed only to load
            under another tensor-parallel size, if padding alone does not explain the difference. None: the value in the
            HuggingFace config.
        timeout_s: the deadline of every wait for another rank, in seconds.
        assume_optimizer_step: how many steps the optimizer had done, for checkpoints of other programs that do not say
            it (verl up to 0.4). None: the optimizer state of such a checkpoint is refused.
        skip_frozen: parameters that do not train (the model below LoRA adapters) are neither saved nor loaded, because
            the trainer has them from elsewhere.
        strict: raise if a checkpoint turns out to be damaged while it is read, instead of loading the next older one.

    Raises:
        InvalidArgumentError: a value is not allowed, or two values contradict each other.

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
    remote: str | None = dataclasses.field(default=None, repr=False)  # the URL may hold a password
    prune_remote: bool = True
    upload_timeout_s: float = 300.0
    roles: tuple[str, ...] | None = None
    vocab_size: int | None = None
    timeout_s: float = 600.0
    skip_frozen: bool = False
    strict: bool = False
    assume_optimizer_step: int | None = None

    def __post_init__(self) -> None:
        for field in ("save_contents", "load_contents"):
            object.__setattr__(self, field, _contents(field, getattr(self, field)))
        if self.max_to_keep is not None and (not isinstance(self.max_to_keep, int) or self.max_to_keep < 1):
            raise InvalidArgumentError(
                f"max_to_keep is {self.max_to_keep!r}: use 1 or more, or None to keep every checkpoint"
            )
        if not _is_step_count(self.keep_every):
            raise InvalidArgumentError(f"keep_every is {self.keep_every!r}: use 1 or more, or None")
        if self.keep_every is not None and self.max_to_keep is None:
            raise InvalidArgumentError("keep_every is given without max_to_keep, which keeps every step: give both")
        if self.skip_frozen and "hf_model" in self.save_contents:
            raise InvalidArgumentError(
                "save_contents has 'hf_model', whose parameters skip_frozen leaves out: drop one of them"
            )
        if self.vocab_size is not None and (not isinstance(self.vocab_size, int) or self.vocab_size < 1):
            raise InvalidArgumentError(f"vocab_size is {self.vocab_size!r}: use the number of tokens, or None")
        if not self.timeout_s > 0:
            raise InvalidArgumentError(f"timeout_s is {self.timeout_s}: use a positive number of seconds")
        if not self.upload_timeout_s >= 0:
            raise InvalidArgumentError(
                f"upload_timeout_s is {self.upload_timeout_s}: use seconds, or 0 to wait for no upload"
            )
        if not _is_step_count(self.assume_optimizer_step):
            raise InvalidArgumentError(
                f"assume_optimizer_step is {self.assume_optimizer_step!r}: use 1 or more, or None"
            )
        if self.remote is not None and self.remote.startswith("file://~"):
            # fsspec would make a folder called "~".
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
    """The roles, each once. `checkpoint.file_names.check_roles` checks that they can be folder names."""
    if isinstance(roles, str):
        raise InvalidArgumentError(f"roles is the string {roles!r}: use a list of roles, such as [{roles!r}]")
    return tuple(dict.fromkeys(roles))


def _contents(field: str, words: tuple[str, ...] | list[str] | str) -> tuple[str, ...]:
    if isinstance(words, str):
        raise InvalidArgumentError(
            f"{field} is the string {words!r}: use a list of words, such as ['model', 'optimizer']"
        )
    words = tuple(words)
    for word in words:
        if word not in CONTENT_WORDS:
            raise InvalidArgumentError(f"{field} has {word!r}: the words are {', '.join(CONTENT_WORDS)}")
    if not words:
        raise InvalidArgumentError(f"{field} is empty: name at least one of {', '.join(CONTENT_WORDS)}")
    return words
