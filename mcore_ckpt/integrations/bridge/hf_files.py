"""Reads the config of the model that Megatron-Bridge's configuration names, and writes Bridge's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import InvalidArgumentError, RemoteError
from mcore_ckpt.integrations.kit.published import published_config
from mcore_ckpt.integrations.kit.together import on_all_ranks


class PublishedConfig:
    """Keeps the config of the HuggingFace model that was requested last. Every rank calls the same methods."""

    def __init__(self) -> None:
        self._source: str | None = None
        self._config: Any = None

    def get(self, cfg: Any, timeout_s: float) -> Any:
        """Returns the config of the model that Bridge's configuration names; None if the configuration names no model.

        Raises:
            RemoteError, InvalidArgumentError: a rank cannot read the config. All ranks raise the error, and the next
                call tries again.
            AgreementError: a rank is missing.
        """
        source = _hf_source(cfg)
        if source is not None and source != self._source:
            on_all_ranks("bridge/hf_config", f"reading the config of {source}", lambda: self._read(source), timeout_s)
            self._source = source
        return self._config if source is not None else None

    def _read(self, source: str) -> None:
        try:
            self._config = published_config(source, needed=True)
        except (OSError, ValueError) as error:
            kind = InvalidArgumentError if isinstance(error, ValueError) else RemoteError
            raise kind(
                f"{source}: its config, which checkpoint.also_save_hf_checkpoint needs, cannot be read: {error}. Set "
                "checkpoint.hf_source_path to a folder that all nodes share, or call configure(hf_config=...)"
            ) from None


def _hf_source(cfg: Any) -> str | None:
    """Returns the HuggingFace model that a configuration names, as Bridge's `_resolve_hf_source` (0.6.2) chooses it."""
    named = (
        getattr(cfg.checkpoint, "hf_source_path", None),
        getattr(cfg.model, "hf_model_id", None),
        getattr(cfg.tokenizer, "tokenizer_model", None),
    )
    return next((str(each) for each in named if each), None)


@dataclass(frozen=True, eq=False)
class BridgeTokenizer:
    """Wraps a tokenizer of Bridge, of any kind, and adds the one method that a save calls.

    `config` is `cfg.tokenizer`, which names the files that the tokenizer was made from.
    """

    tokenizer: Any
    config: Any

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tokenizer files that Bridge's own checkpoints have. Rank 0 calls this method.

        If the writing fails, Bridge logs the error and does not raise it.
        """
        from megatron.bridge.training.checkpointing import save_tokenizer_assets

        save_tokenizer_assets(self.tokenizer, self.config, str(folder))
        written = folder / "tokenizer"
        for path in sorted(written.iterdir()) if written.is_dir() else ():
            path.rename(folder / path.name)
        if written.is_dir():
            written.rmdir()
