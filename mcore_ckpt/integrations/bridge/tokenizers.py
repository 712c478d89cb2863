"""Writes the files of Megatron-Bridge's tokenizers into the model's folder, as Bridge's own checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class BridgeTokenizer:
    """A tokenizer of any kind that Bridge has, with the one method that a save calls.

    Attributes:
        tokenizer: the tokenizer.
        config: `cfg.tokenizer`, which names the files that it was made of.
    """

    tokenizer: Any
    config: Any

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tokenizer's files. Rank 0 calls it. Bridge only logs what goes wrong."""
        from megatron.bridge.training.checkpointing import save_tokenizer_assets

        save_tokenizer_assets(self.tokenizer, self.config, str(folder))
        written = folder / "tokenizer"
        for path in sorted(written.iterdir()) if written.is_dir() else ():
            path.rename(folder / path.name)
        if written.is_dir():
            written.rmdir()
