"""Defines the configuration of a CheckpointManager, and how long ranks wait for each other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any

from mcore_ckpt.errors import InvalidArgumentError, InvalidTypeError
from mcore_ckpt.events import Listener
from mcore_ckpt.field_checks import check_fields, checked, limited, one_of, options_of
from mcore_ckpt.keep_best import KeepBest, keep_best_rules
from mcore_ckpt.urls import checked_url, local_path

# How long a rank waits for another rank before it gives up, in seconds, unless the caller chooses another time.
TIMEOUT_S = 600.0
# How long the processes of a command wait until all of them have started, in seconds.
START_TIMEOUT_S = 300.0
# How long, in seconds, a rank of `mcore-ckpt merge` waits for another rank, which may have to write one more file to a
# slow disk. The time can be long, because torchrun notices ranks that die.
MERGE_TIMEOUT_S = 1800.0
# How long, in seconds, a rank of `mcore-ckpt convert` waits for another rank, which writes its whole part of the model.
CONVERT_TIMEOUT_S = 6 * 3600.0
# How long ranks wait until one rank of each node has downloaded a model from the HuggingFace hub, in seconds.
DOWNLOAD_TIMEOUT_S = 6 * 3600.0

CONTENT_WORDS = ("model", "optimizer", "extra", "hf_model")


@checked
@dataclass(frozen=True)
class FastTier:
    """Configuration of the fast tier: checkpoints in folders of the nodes, with copies on other nodes.

    With a fast tier, `save` writes to the node's own folder, which is in memory or on a local disk. Every
    `durable_every`-th step is copied to the root while the training goes on. docs/fast_tier.md says when to use which
    options.

    Attributes:
        folder: a folder that each node has for itself, with the same path on all nodes. It must not be the root. The
            files of a folder below `/dev/shm` are in memory: they outlive the processes, but not the node. Files on a
            local disk also outlive a restart of the node. A folder that another user has made or can write to is
            refused.
        replicas: how many other nodes get a copy of each file. This many nodes can be lost at once without losing a
            step. Bytes that a node has anyway, because one of its ranks is a data-parallel replica, are not sent to
            this node.
        keep: how many steps each node keeps.
        durable_every: how often a saved step is also saved to the root: 10 means every tenth saved step. None: no step
            is saved to the root. Then all checkpoints are in the nodes' folders, and no shared file system is needed.
        bytes_per_s: how many bytes a second each node receives at most for the copies of one role. None: no limit.
        domain: a function that returns, on each node, the name of this node's failure domain, such as its rack. Copies
            go to nodes of other domains. None: each node is its own domain.
        tls: a folder with `cert.pem`, `key.pem` and `ca.pem`. With `tls`, all data between nodes are encrypted, and
            each node must show a certificate that the authority in `ca.pem` has signed. None: nothing is encrypted, as
            in the job's other traffic (gloo, NCCL).

    Raises:
        InvalidArgumentError: a value is not allowed.

    Example:
        >>> FastTier("/dev/shm/run", replicas=1, keep=2, durable_every=10).replicas
        1
    """

    folder: str | os.PathLike[str]
    replicas: int = limited(1, least=0)
    keep: int = limited(2, least=1)
    durable_every: int | None = limited(10, least=1)
    bytes_per_s: int | None = limited(None, least=1)
    domain: Callable[[], str] | None = None
    tls: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not local_path(self.folder, "folder of the fast tier").is_absolute():
            raise InvalidArgumentError(
                f"folder of the fast tier is {os.fspath(self.folder)!r}: use an absolute path, such as /dev/shm/run, "
                "of a folder that each node has for itself"
            )
        if self.tls is not None:
            local_path(self.tls, "tls of the fast tier")
        check_fields(self, " of the fast tier")
        if self.domain is not None and not callable(self.domain):
            raise InvalidTypeError(
                f"domain of the fast tier is {self.domain!r}: use a function without arguments that returns a name"
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | FastTier | None, where: str = "fast") -> FastTier | None:
        """Returns the fast tier that a mapping of these fields describes.

        Args:
            given: the fields by name, in a dict or OmegaConf's DictConfig. `domain` may be the path of a function, such
                as "my_training.racks.rack". A FastTier or None is returned unchanged.
            where: what the mapping is called, for messages.

        Raises:
            InvalidArgumentError: a field is unknown or has a value that is not allowed, or the function is not found.

        Example:
            >>> FastTier.from_dict({"folder": "/dev/shm/run", "durable_every": 5}).durable_every
            5
        """
        if given is None or isinstance(given, FastTier):
            return given
        known = [field.name for field in dataclasses.fields(cls)]
        options = options_of(given, known, where, {"domain": partial(_function, where=where)})
        if "folder" not in options:
            raise InvalidArgumentError(f"{where} has no folder: name one, such as '/dev/shm/run'")
        return cls(**options)


@checked
@dataclass(frozen=True)
class CheckpointConfig:
    """Configuration of one CheckpointManager.

    Attributes:
        save_contents: what to save: `model`, `optimizer` (with the LR scheduler), `extra` (random state and the
            trainer's extra state), `hf_model` (the model in HuggingFace's format, in `huggingface/`; needs the
            manager's `hf_config`).
        load_contents: what to load, as a list of the words for `save_contents`. The checkpoint must contain all of
            these contents. With `model`, `hf_model` adds nothing. Without `model`, `hf_model` loads the weights from
            `huggingface/`.
        async_save: whether `save` returns as soon as the training state may change again. The save then finishes in the
            background. The constructor of the manager starts to prepare host memory for the copies.
        async_mode: when an async `save` returns. "snapshot": after the state has been copied. "lazy": immediately. The
            state on a GPU is then copied during the next forward and backward pass. Megatron's methods that change the
            state (`optimizer.step()`, parameter gathers, loading) make their CUDA stream wait for the copy. Other code
            that changes the state must call `manager.before_step()` first. If the model is trained and the manager has
            no optimizer, "lazy" acts like "snapshot". In both modes, state in CPU memory is copied before `save`
            returns.
        if_busy: what `save` does while an earlier save is under way. "wait": wait until that save has ended. "raise":
            raise BusyError. "skip": do nothing, and return a handle that says so (`SaveHandle.skipped`). With "skip", a
            save that is due in the root is also skipped while an earlier step is still being copied to the root.
        if_failed: what happens after a background save has failed. "raise": the next call of the manager raises the
            error of that save on every rank. "warn": the error is only logged.
        shared_writes: whether all data-parallel and context-parallel replicas write a file together, each replica a
            part. If not, the first replica writes the whole file.
        verify_replicas: whether each save compares all bytes of all tensors that several ranks hold as replicas, and
            warns if replicas differ. The training waits for this comparison. If not, each save compares small parts of
            a few tensors, at no measurable cost. The next save chooses other tensors.
        load_replicas: how ranks load tensors that are the same on several ranks: the tensors of the model, which data
            and context parallelism replicate, and the tensors of an optimizer that is not distributed. "read": each
            rank reads these tensors. "broadcast": one rank reads the tensors and sends them to the other ranks. This is
            faster if the network is faster than the file system.
        max_host_bytes: the largest number of bytes of host memory that this rank uses for copies of its state. None: no
            limit.
        max_to_keep: how many complete steps to keep on disk, including steps that were saved before a restart. None:
            all. After each commit, older steps are deleted in the background. Pinned steps (`mcore_ckpt.pin`) are never
            deleted.
        keep_every: steps whose number is a multiple of this value are also kept, however old they are. Requires
            max_to_keep.
        keep_best: ("reward", 3, "max"): the three complete steps with the largest `reward` are also kept; "min": the
            three steps with the smallest `reward`. Several such rules may be given as a list. Each rule may also be a
            text, "reward:3:max". `save` gets the metrics. Of steps with equal values, the step that was committed last
            counts as the best. A step without the metric and an abandoned step never count. Requires max_to_keep.
        keep_for: complete steps that were saved less than this many seconds ago are also kept. Requires max_to_keep.
        optimizer_for_last: how many of the newest complete steps keep their optimizer. Older steps that are kept lose
            the optimizer's files after each commit, unless they are pinned; their weights and their extra state stay
            loadable. None: all steps keep their optimizer. The remote store keeps the optimizers that were uploaded.
        remote: the URL of a remote store that fsspec supports: s3://bucket/prefix, gs://..., hdfs://host/path,
            file:///folder. Committed checkpoints are uploaded to this store in the background. `load` takes a
            checkpoint from the store if it is newer than the local ones, or if the local ones are gone. None: no remote
            store. Credentials are read from the environment, in the same way as by the store's own tools. In
            file://~/folder, `~` is the home folder.
        prune_remote: whether `max_to_keep`, `keep_every`, `keep_best` and `keep_for` also apply to the remote store. If
            not, the store keeps all checkpoints.
        upload_timeout_s: how long `wait` and `close` wait for unfinished uploads, in seconds. Only rank 0 waits. If
            training continues after `wait`, this time must be shorter than the process group's timeout.
        parts: the parts that every step must have (`CheckpointManager.attach`). A save that lacks one of these parts
            fails. Empty: each step has the parts that are attached when the step is saved.
        roles: the roles that every step consists of. A step is complete once all of these roles are committed. None:
            only this manager's role.
        vocab_size: the number of tokens, without the rows that megatron adds to embeddings as padding. `vocab_size` is
            needed only if the saved embeddings have more or fewer rows than the model's, and padding alone does not
            explain the difference. None: the value in the HuggingFace config.
        timeout_s: how long a rank waits for another rank before it gives up, in seconds.
        assume_optimizer_step: the optimizer's step count to assume for a checkpoint of another program that does not
            store the count (verl up to 0.4). None: the optimizer state of such a checkpoint is refused.
        skip_frozen: whether to leave parameters that are not trained (the base model under LoRA adapters) out of saves
            and loads. The trainer must then get these parameters from elsewhere. `hf_model` then writes only the
            adapters, in PEFT's form, into `huggingface/adapter/`.
        strict_dtypes: whether `load` refuses to round values if model or optimizer keep the values in dtypes of fewer
            bits than the checkpoint. If not, `load` rounds each value once and says so in its report.
        strict_model: whether `load` refuses a checkpoint whose model computes something else with the same tensors: for
            example, the model has other heads, another activation or other rotary embeddings. If not, `load` names the
            fields that differ in a warning and in its report.
        reset_moments: whether `load` may start an optimizer with new moments if the optimizer needs other moments than
            the checkpoint has (Muon after Adam). Then only the main parameters are taken over. If not, such a load is
            refused.
        shared_with_group: whether the files' Unix group may read and write the files, as far as the umask allows. True:
            new folders have mode 0770 and files 0660, restricted by the umask. False: 0700 and 0600. None: if the root
            exists already, new folders and files are as open as the root. A new root and the fast tier are treated as
            with True if the umask lets the group write, otherwise as with False. Existing folders keep their modes.
        strict: whether `load` raises an error if the checkpoint that it reads is damaged. If not, `load` loads the next
            older checkpoint.
        listeners: what to call with the events of saves, loads, deletions and uploads (`mcore_ckpt.events`): functions,
            or objects of `mcore_ckpt.integrations.listeners`. The listeners run on their own thread, and nothing that
            they do affects a save. Each rank calls its own listeners, so ranks may have different listeners, or none.
        fast: the fast tier, which needs a folder on each node. None: every step is saved to the root.

    Raises:
        InvalidArgumentError: a value is not allowed, or two values contradict each other.
        InvalidTypeError: a field is unknown, or something in `listeners` cannot be called with an event.

    Example:
        >>> CheckpointConfig(save_contents=("model", "optimizer", "extra"), max_to_keep=2).max_to_keep
        2
    """

    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    load_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    async_save: bool = False
    async_mode: str = one_of("snapshot", "lazy")
    if_busy: str = one_of("wait", "raise", "skip")
    if_failed: str = one_of("raise", "warn")
    shared_writes: bool = True
    verify_replicas: bool = False
    load_replicas: str = one_of("read", "broadcast")
    max_host_bytes: int | None = limited(None, least=1, or_none="for no limit")
    max_to_keep: int | None = limited(None, least=1, or_none="to keep every checkpoint")
    keep_every: int | None = limited(None, least=1)
    keep_best: tuple[KeepBest, ...] = ()
    keep_for: float | None = limited(None, above=0, of="seconds")
    optimizer_for_last: int | None = limited(None, least=1)
    remote: str | None = dataclasses.field(default=None, repr=False)  # the URL can contain a password
    prune_remote: bool = True
    upload_timeout_s: float = limited(300.0, least=0, of="seconds (0: do not wait for uploads)")
    roles: tuple[str, ...] | None = None
    parts: tuple[str, ...] = ()
    vocab_size: int | None = limited(None, least=1, of="tokens")
    timeout_s: float = limited(TIMEOUT_S, above=0, of="seconds")
    skip_frozen: bool = False
    strict_dtypes: bool = False
    strict_model: bool = False
    reset_moments: bool = False
    strict: bool = False
    assume_optimizer_step: int | None = limited(None, least=1)
    shared_with_group: bool | None = None
    listeners: tuple[Listener, ...] = dataclasses.field(default=(), hash=False)  # listeners need not be hashable
    fast: FastTier | None = None

    def __post_init__(self) -> None:
        if self.remote is not None:
            object.__setattr__(self, "remote", checked_url(self.remote))
        check_fields(self)
        for field in ("save_contents", "load_contents"):
            object.__setattr__(self, field, _contents(field, getattr(self, field)))
        if self.roles is not None:
            object.__setattr__(self, "roles", tuple(dict.fromkeys(_texts("roles", self.roles, "actor"))))
            if not self.roles:
                raise InvalidArgumentError(
                    "roles is empty: name the roles of a step, or use None if the manager's role is the only one"
                )
        object.__setattr__(self, "parts", tuple(dict.fromkeys(_texts("parts", self.parts, "replay_buffer"))))
        if self.parts and "extra" not in self.save_contents:
            raise InvalidArgumentError(
                f"parts names {self.parts[0]!r}, but save_contents has no 'extra': add the word, or leave parts empty"
            )
        object.__setattr__(self, "listeners", _callable(self.listeners))
        if self.fast is not None and not isinstance(self.fast, FastTier):
            raise InvalidTypeError(
                f"fast is {self.fast!r}: use a FastTier, or None. CheckpointConfig.from_dict also takes a mapping"
            )
        object.__setattr__(self, "keep_best", keep_best_rules(self.keep_best))
        for field in ("keep_every", "keep_best", "keep_for"):
            if getattr(self, field) not in (None, ()) and self.max_to_keep is None:
                raise InvalidArgumentError(
                    f"{field} is given without max_to_keep, but without max_to_keep every step is kept: give both"
                )

    @classmethod
    def from_dict(
        cls, given: Mapping[str, Any], where: str = "CheckpointConfig", but: Collection[str] = ()
    ) -> CheckpointConfig:
        """Returns the configuration that a mapping of these fields describes, such as a mapping from YAML or OmegaConf.

        Args:
            given: the fields by name, in a dict or OmegaConf's DictConfig. Lists stand for tuples. `listeners` may have
                paths of classes or functions, such as "my_training.monitoring.make_listener". Each class or function is
                called without arguments, once in a process, and returns the listener. `fast` may be a mapping of
                FastTier's fields, whose `domain` may be the path of a function.
            where: what the mapping is called, for messages.
            but: fields that must not be in `given`, because a framework has its own options for these fields, or cannot
                honour them.

        Raises:
            InvalidArgumentError: a field is unknown or has a value that is not allowed, or a path leads nowhere.
            InvalidTypeError: a listener, or another object, has a type that is not allowed.

        Example:
            >>> CheckpointConfig.from_dict({"max_to_keep": 2, "fast": {"folder": "/dev/shm/run"}}).fast.replicas
            1
        """
        known = [field.name for field in dataclasses.fields(cls) if field.name not in but]
        if isinstance(given, Mapping) and (elsewhere := sorted(set(given) & set(but))):
            raise InvalidArgumentError(
                f"{where} has {', '.join(map(repr, elsewhere))}, which the framework decides or refuses: leave "
                "it out, and use the framework's own option, if it has one"
            )
        read = {
            "listeners": partial(named_listeners, where=where),
            "fast": partial(FastTier.from_dict, where=f"fast of {where}"),
        }
        return cls(**options_of(given, known, where, read))


def _callable(listeners: object) -> tuple[Listener, ...]:
    """Returns the listeners as a tuple. Raises InvalidTypeError if a listener cannot be called with an event."""
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


def _contents(field: str, words: object) -> tuple[str, ...]:
    found = _texts(field, words, "model")
    for word in found:
        if word not in CONTENT_WORDS:
            raise InvalidArgumentError(f"{field} has {word!r}: the allowed words are {', '.join(CONTENT_WORDS)}")
    if not found:
        raise InvalidArgumentError(f"{field} is empty: name at least one of {', '.join(CONTENT_WORDS)}")
    return found


def _texts(field: str, words: object, example: str) -> tuple[str, ...]:
    """Returns a list of texts as a tuple. Refuses a set: it has no order, and the ranks need the same order."""
    if isinstance(words, str):
        raise InvalidArgumentError(f"{field} is the string {words!r}: use a list, such as {[words or example]!r}")
    if not isinstance(words, Sequence) or isinstance(words, bytes):
        raise InvalidTypeError(f"{field} is {words!r}: use a list, such as {[example]!r}")
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise InvalidArgumentError(f"{field} has {wrong[0]!r}: use only texts, such as {example!r}")
    return tuple(words)


# -- objects given by their import path --------------------------------------------------------------------


def named_listeners(names: Any, where: str) -> Any:
    """Returns the listeners that paths of classes or functions name. Values that are not texts stay unchanged.

    Raises InvalidArgumentError: a path leads nowhere, or to something that cannot be called.

    Example:
        >>> named_listeners(["mcore_ckpt.integrations.listeners.LoggingListener"], "options")  # doctest: +ELLIPSIS
        (<...LoggingListener object at ...>,)
    """
    if not isinstance(names, (list, tuple)):
        return names
    return tuple(_named(name, where) if isinstance(name, str) else name for name in names)


def _function(name: Any, where: str) -> Any:
    if not isinstance(name, str):
        return name
    what = f"{where} names the function of failure domains {name!r}"
    return _resolved(name, what, "a function, such as 'my_training.racks.rack'")


def _named(name: str, where: str) -> Any:
    what = f"{where} has the listener {name!r}"
    make = _resolved(name, what, "a class or function, such as 'mcore_ckpt.integrations.listeners.LoggingListener'")
    if not callable(make):
        raise InvalidArgumentError(
            f"{what}, which is {make!r}: use the path of a class or function that returns a listener"
        )
    try:
        return _made_by(make)
    except Exception as error:
        raise InvalidArgumentError(
            f"{what}, which cannot be made without arguments ({error}): make it in Python, and pass the object"
        ) from error


def _resolved(path: str, what: str, instead: str) -> Any:
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"{what}, which cannot be imported ({error}): use the path of {instead}") from error


@cache  # make each listener only once, although frameworks read their options again and again
def _made_by(make: Callable[[], Any]) -> Any:
    return make()
