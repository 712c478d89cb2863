"""Finds the folder of a HuggingFace model: a local folder, or the copy of a model of the hub in the hub's cache.

Everything that takes such a folder also takes the name of a model on the hub, as `owner/name` or `owner/name@revision`.
If a folder of that name exists, the folder is used. huggingface_hub downloads the model, so these environment variables
have an effect: HF_HOME and HF_HUB_CACHE (the place of the cache), HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN.

Only files that the caller reads or copies are downloaded: `config.json` and the `.safetensors` files that the index
lists, or the assets, or all of these.

The hub is never asked for a name that can only be a path: `name`, `./owner/name`, `/owner/name`.
`consolidated.safetensors`, `*.bin` and folders such as `original/` hold copies of the same weights, so they are not
downloaded. huggingface_hub has no pattern that matches only files outside of folders, so `_in_other_folders` makes
patterns that exclude the files in folders. Ranks with the same host (`ranks/hosts.py`) and the same cache count as one
node. The first of these ranks downloads. The other ranks of the node wait in the same round, with a deadline of hours
(`DOWNLOAD_TIMEOUT_S`), and then open the cache without the network. A branch can move between two nodes' downloads, so
rank 0 compares the commits. For a branch, each call asks the hub for the branch's commit, as transformers does. For a
commit that is in the cache, huggingface_hub 2 sends no request.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal

from mcore_ckpt.config import DOWNLOAD_TIMEOUT_S
from mcore_ckpt.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    RemoteError,
)
from mcore_ckpt.formats.huggingface.hub_names import HubModel
from mcore_ckpt.formats.huggingface.safetensors_files import INDEX_FILE, SINGLE_FILE, read_weight_map
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE, GENERATION_CONFIG_FILE, LEFT_OUT
from mcore_ckpt.ranks.hosts import this_host
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.redaction import redacted

logger = logging.getLogger(__name__)

Needs = Literal["model", "assets", "all", "config"]
"""The files that a caller reads: "config" is `config.json`, "model" is `config.json` and the weights, "assets" is
everything except the weights, and "all" is everything."""

# An adapter in PEFT's form has these files instead of the files of a model.
_ADAPTER_CONFIG, _ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"

# The suffixes of files that a model may need to work: configuration, tokenizer, code. It is an error if the cache lacks
# a file with one of these suffixes and asking the hub is not allowed. If any other asset is missing, there is only a
# warning.
_NEEDED = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_TEMPLATES = "additional_chat_templates"


def find_folder(name: str | os.PathLike[str], needs: Needs) -> Path:
    """Returns the folder of a model. Downloads the model first if it is on the hub but not in the cache.

    If the folder is local, the caller must check that the folder has the needed files.

    Raises:
        CheckpointNotFoundError: no folder, model or revision has this name; or the model has no weights in safetensors
            files; or the model is not in the cache and HF_HUB_OFFLINE is set; or there is no such folder and
            huggingface_hub is not installed.
        RemoteError: the hub does not answer, refuses access, or answers with an error.
        InvalidArgumentError: the hub cannot have a model of this name.
        CheckpointError: the cache cannot be written.

    Example:
        >>> find_folder("Qwen/Qwen3-0.6B", "model")  # doctest: +SKIP
        PosixPath('/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca')
    """
    model = HubModel.find(name)
    return Path(name) if model is None else _HubFiles(model, needs).run()


def cached_folder(name: str, commit: str | None) -> Path | None:
    """Returns a model's folder in the hub's cache, or None. The folder can lack files. No request goes to the hub."""
    model = HubModel.parse(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    if model is None:
        return None
    found = try_to_load_from_cache(model.repository, CONFIG_FILE, revision=commit or model.revision)
    if not isinstance(found, str):
        return None
    # The cache also records that a model lacks a file. The result None means that nobody has asked for this file yet,
    # so other files of the model may be missing in the cache, too.
    if try_to_load_from_cache(model.repository, GENERATION_CONFIG_FILE, revision=commit or model.revision) is None:
        logger.warning(
            "%s: the cache has only a part of this model, so saves may lack files that belong beside the weights, "
            "such as %s: run `hf download %s --exclude '*.safetensors'` once, or set generation_config on hf_config",
            *(model, GENERATION_CONFIG_FILE, model.repository),
        )
    return Path(found).parent


def find_folder_together(
    agreement: Agreement, name: str | os.PathLike[str], needs: Needs, everywhere: bool = True
) -> Path:
    """Does the same as `find_folder` on all ranks. One rank of each node downloads, and the node's other ranks wait.

    Rank 0 decides whether the name means a folder. Ranks with the same host and the same cache count as one node.

    Args:
        agreement: connects this rank with the other ranks.
        name: the folder, or the name of the model. If `everywhere` is True, all ranks give the same name.
        needs: what the caller reads.
        everywhere: False if only rank 0 reads the folder. In this case only rank 0 downloads, and every rank gets the
            path that the folder has on rank 0. All ranks follow rank 0's value of `everywhere`.

    Raises:
        CheckpointError: `find_folder` has failed on a rank, or nodes have different commits of the model
            (CheckpointMismatchError). All ranks raise the same error.
    """
    model = HubModel.parse(name)

    def look(records: Sequence[Record]) -> Record:
        if HubModel.find(name) is None:
            return {"downloaders": None, "everywhere": everywhere}
        if not everywhere:
            return {"downloaders": [0], "everywhere": False}
        same_everywhere([{"name": record["name"]} for record in records], "the name of the model")
        nodes = [record["node"] for record in records]
        return {"downloaders": sorted({nodes.index(node) for node in nodes}), "everywhere": True}

    own = {"name": os.fspath(name), "node": None if model is None else [this_host(), _cache()]}
    decision = decide(agreement, f"looking for {name}", lambda: own, look)
    found = decision["downloaders"]
    if found is None:
        return Path(name)

    def download() -> Record:
        if agreement.rank not in found:
            return {}
        assert model is not None, "rank 0 has the same name, or is the only one that downloads"
        folder = _HubFiles(model, needs).run()
        return {"folder": str(folder), "commit": folder.name}

    def compare(records: Sequence[Record]) -> Record:
        for rank in found:
            if records[rank]["commit"] != records[0]["commit"]:
                raise CheckpointMismatchError(
                    f"{name}: the node of rank 0 has commit {records[0]['commit']}, but the node of rank {rank} has "
                    f"{records[rank]['commit']}: name the commit to use ({str(name).partition('@')[0]}@COMMIT)"
                )
        return records[0]

    first = decide(agreement, f"downloading {name}", download, compare, timeout_s=DOWNLOAD_TIMEOUT_S)
    if not decision["everywhere"]:
        return Path(first["folder"])
    assert model is not None, "rank 0 has the same name"
    at = HubModel(model.repository, first["commit"])
    folders: list[Path] = []

    def open_own() -> Record:
        folders.append(_HubFiles(at, needs, cached_only=True).run())
        return {}

    decide(agreement, f"opening {name} in the cache", open_own, lambda _: {})
    return folders[0]


@dataclass(frozen=True)
class _HubFiles:
    """The files of a model that a caller needs. With `cached_only`, nothing is downloaded."""

    model: HubModel
    needs: Needs
    cached_only: bool = False

    def run(self) -> Path:
        """Returns the model's folder in the cache; its name is the commit. See `find_folder` for the errors."""
        has_weights = self.needs in ("model", "all")
        wanted = [CONFIG_FILE, *((_ADAPTER_CONFIG, INDEX_FILE, SINGLE_FILE) if has_weights else ())]
        left_out = ["*.bin.index.json", "*.h5.index.json", "*.msgpack.index.json"]
        if self.needs in ("assets", "all"):
            wanted += [f"*{suffix}" for suffix in _NEEDED]
            left_out += _in_other_folders(_TEMPLATES)
        if self.needs == "assets":
            left_out.append(INDEX_FILE)
        folder = self._download(self.model.revision, wanted, left_out)
        if self.needs in ("assets", "all"):
            self._download_others(folder)
        if has_weights and not (folder / SINGLE_FILE).exists():
            self._download_listed(folder)
        return folder

    def _download_others(self, folder: Path) -> None:
        """Downloads the other assets, also those in subfolders."""
        # Small weights of other modules are assets, too, but a pattern cannot limit the size of a file, so no such
        # weights are downloaded.
        names = (*(name for each in LEFT_OUT for name in each.names), "*.safetensors", "*.bin")
        left_out = [prefix + name for name in names for prefix in ("", "*/")]
        try:
            self._download(folder.name, ["*"], [*left_out, "*/.*/*", ".*/*"])
        except CheckpointNotFoundError as error:
            logger.warning("some of the model's files beside the weights were not downloaded: %s", error)

    def _download_listed(self, folder: Path) -> None:
        """Downloads the weights of the adapter, or, for a model, the files that its index lists."""
        if (folder / INDEX_FILE).exists():
            files = sorted(set(read_weight_map(folder / INDEX_FILE).values()))
        elif (folder / _ADAPTER_CONFIG).exists():
            files = [_ADAPTER_FILE]
        else:
            raise CheckpointNotFoundError(
                f"{self.model}: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: name a model that is published as "
                "safetensors. If this model is, the cache has only a part of it: run again with HF_HUB_OFFLINE unset"
            )
        missing = [file for file in files if not (folder / file).exists()]
        lacks = f"{folder / missing[0]} is missing" if missing else ""
        self._download(folder.name, [escape(file) for file in files], [], lacks)
        # If huggingface_hub 0.36 cannot ask the hub, it returns the model's folder in the cache without an error, even
        # if files are missing there.
        if not all((folder / file).exists() for file in missing):
            raise CheckpointNotFoundError(_incomplete(self.model, lacks))

    def _download(self, revision: str | None, wanted: Sequence[str], left_out: Sequence[str], lacks: str = "") -> Path:
        """Downloads files, and returns the model's folder in the cache.

        `lacks` says, for messages, which files are missing in a cache that has other files of the model.
        """
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise CheckpointNotFoundError(
                f"{self.model}: there is no such folder, and models of the hub need huggingface_hub, which is not "
                "installed: pip install huggingface_hub"
            ) from error
        try:
            return Path(
                snapshot_download(
                    self.model.repository,
                    revision=revision,
                    allow_patterns=list(wanted),
                    ignore_patterns=list(left_out),
                    local_files_only=self.cached_only,
                )
            )
        except Exception as error:  # huggingface_hub, its HTTP library and the system raise many types of errors
            raise _explain(self.model, error, lacks) from None  # the URLs in the original error can be signed


def _in_other_folders(kept: str) -> Iterator[str]:
    """Yields patterns that match the files in all folders except `kept`.

    The patterns are needed because subfolders hold other copies of a model ("original/", "onnx/"), and "*" in a pattern
    of huggingface_hub matches "/", too. One pattern is not enough: a pattern can exclude a letter, but not a word.
    """
    for position, letter in enumerate(kept):
        yield f"{kept[:position]}[!{letter}/]*/*"
        yield f"{kept[:position]}/*"


def _cache() -> str:
    """Returns the folder of the cache; "" if huggingface_hub is not installed (`_HubFiles` reports this)."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return ""
    return str(constants.HF_HUB_CACHE)


def _incomplete(model: HubModel, what: str, why: str = "the hub was not asked") -> str:
    return (
        f"{model}: the cache {_cache()} has only a part of this model ({what}), and {why}: run once with a connection "
        "to the hub and HF_HUB_OFFLINE unset. If another rank of this node has downloaded the model, give all ranks "
        "of a node the same HF_HOME"
    )


def _explain(model: HubModel, error: Exception, lacks: str) -> CheckpointError:
    """Returns an error that says what to do. See `_HubFiles._download` for `lacks`."""
    from huggingface_hub import constants, errors

    hub = str(constants.ENDPOINT)
    absent = f"{model}: there is no such folder, and"
    if isinstance(error, errors.HFValidationError):
        why = str(error).rstrip(".")
        return InvalidArgumentError(f"{absent} the hub cannot have a model of this name ({why}): check the path")
    if isinstance(error, errors.GatedRepoError):
        return RemoteError(
            f"{absent} {hub} gives this model only to accounts that have accepted its terms: accept them on "
            f"{hub}/{model.repository}, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointNotFoundError(
            f"{absent} {hub} has no such model, or it is private: check the name. For a private model, set HF_TOKEN to "
            "a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointNotFoundError(
            f"{model}: {hub}/{model.repository} has no such revision: name a branch, a tag or a commit of this model"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _explain_not_cached(model, error, lacks, hub)
    if isinstance(error, errors.HfHubHTTPError):
        return RemoteError(f"{model}: {_answer(hub, error)}: {_advice(error)}")
    is_of_network = isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) is None
    if isinstance(error, OSError) and not is_of_network:
        return CheckpointError(
            f"{model}: cannot be downloaded into the cache {_cache()} ({_words(error)}): repair the cache, or set "
            "HF_HOME to a folder with enough space"
        )
    return RemoteError(
        f"{model}: the download from {hub} failed ({_words(error)}): run again; the files that have arrived are kept"
    )


def _explain_not_cached(model: HubModel, error: Exception, lacks: str, hub: str) -> CheckpointError:
    from huggingface_hub import errors

    cause = error.__cause__
    kind: type[CheckpointError] = RemoteError
    if cause is None:
        kind, why, advice = CheckpointNotFoundError, "the hub was not asked", ""
    elif isinstance(cause, errors.OfflineModeIsEnabled):
        kind, why = CheckpointNotFoundError, "HF_HUB_OFFLINE forbids asking the hub"
        advice = f"unset HF_HUB_OFFLINE, or fill the cache (hf download {model.repository})"
    elif isinstance(cause, errors.HfHubHTTPError):
        why, advice = _answer(hub, cause), _advice(cause)
    else:
        why, advice = f"{hub} cannot be reached ({_words(cause)})", "check the network and HF_ENDPOINT"
    # huggingface_hub 0.36 has no IncompleteSnapshotError; `_download_listed` handles this case.
    if type(error).__name__ == "IncompleteSnapshotError":
        missing = re.search(r"\d+ file\(s\) are missing \([^)]*\)", str(error))
        lacks = missing.group() if missing else "files are missing"
    if lacks or cause is None:
        return kind(_incomplete(model, lacks or "nothing of it", why))
    return kind(
        f"{model}: there is no such folder, the cache {_cache()} does not have this model, and {why}: {advice}, or "
        "name a folder"
    )


def _answer(hub: str, error: BaseException) -> str:
    return f"{hub} answers with {_status(error)} ({_words(error)})"


def _advice(error: BaseException) -> str:
    return "check HF_TOKEN" if _status(error) in (401, 403) else "run again later"


def _status(error: BaseException) -> Any:
    return getattr(getattr(error, "response", None), "status_code", "an error")


def _words(error: BaseException) -> str:
    """Returns the first line of an error, without the signatures in download URLs."""
    line = next(iter(str(error).splitlines()), "")
    return redacted(f"{type(error).__name__}: {line}")
