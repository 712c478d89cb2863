"""What a trainer may choose."""

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
    """Choices of one CheckpointManager.

    Attributes:
        save_contents: of `model`, `optimizer` (with the LR scheduler), `extra` (RNG and the trainer's extra state),
            `hf_model` (the model as HuggingFace has it, in `huggingface/`; needs the manager's `hf_config`).
        load_contents: the same words; what is asked for must be in the checkpoint. With `model`, `hf_model` asks for
            nothing more; without it, the weights are those in `huggingface/`.
        async_save: `save` returns as soon as the training state may change again; the rest goes on beside training.
        async_mode: with async_save, when that is. "snapshot": when the state has been copied. "lazy": at once; a state
            on a GPU is copied under the next forward and backward pass, and what changes it next (`optimizer.step()`,
            a parameter gather, loading) waits for that on its stream. What else changes it must call
            `manager.before_step()` first. A state in CPU memory is copied before `save` returns in both modes.
        if_busy: what `save` does while an earlier one is still under way: "wait" for it, or "raise" BusyError.
        if_failed: what the next call does when a save that was under way has failed: "raise" its error on every rank,
            or "warn" in the log and go on.
        shared_writes: replicas of data and context parallelism write a part of each replicated file; off, the first
            replica writes it all.
        load_replicas: what ranks load alike (the model, over data and context parallelism; the state of an optimizer
            that is not distributed): each may "read" it, or one of them does and they "broadcast" it, which is faster
            where the network between ranks is, and the file system is not.
        max_host_bytes: most host memory this rank may keep for copies of its state; None for as much as it takes.
        max_to_keep: how many complete steps stay on disk, counted on disk; None keeps all. Older ones are deleted after
            the commit, beside the training; pinned ones (`mcore_ckpt.pin`) stay.
        keep_every: steps that are multiples of this stay too, whatever their age; needs max_to_keep.
        remote: where checkpoints are copied to once they are committed, beside the training, and loaded from where they
            are newer than the local ones, or these are gone: a URL that fsspec knows, such as s3://bucket/prefix,
            gs://..., hdfs://host/path, file:///folder. None: nowhere. Credentials come from the environment, as the
            store's own tools have them.
        prune_remote: whether `max_to_keep` and `keep_every` count there, too; off, it keeps all.
        upload_timeout_s: how long `wait` and `close` wait for uploads under way, in seconds. Only rank 0 does: keep it
            below the process group's timeout where training goes on after `wait`.
        roles: the roles every step is made of; a step counts when all have committed. None: this manager's role alone.
        vocab_size: how many tokens there are, without the rows that megatron pads embeddings with; needed only to load
            under another tensor-parallel size what padding alone does not explain. None: the HuggingFace config's.
        timeout_s: deadline of every wait for another rank, in seconds.
        assume_optimizer_step: for checkpoints of other programs that do not say it (verl up to 0.4): how many steps the
            optimizer had done when it was saved. None: such a checkpoint's optimizer state is refused.
        skip_frozen: parameters that do not train (the model below LoRA adapters) are neither saved nor loaded: the
            trainer has them from elsewhere.
        strict: raise on a checkpoint that turns out bad while it is read, instead of loading the next older one.

    Raises:
        InvalidArgumentError: a value is outside what it may be.

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
    remote: str | None = dataclasses.field(default=None, repr=False)  # it may hold a password
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
    """The roles, each once. Whether they can be folder names, `checkpoint.file_names.check_roles` says."""
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
        raise InvalidArgumentError(f"{field} is empty: nothing would be done")
    return words
