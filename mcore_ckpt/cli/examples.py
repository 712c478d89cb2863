"""Shows examples at the end of a command's `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_HEADING = "examples:"


class HelpFormatter(argparse.HelpFormatter):
    """Folds descriptions to the width of the terminal, but leaves examples as they are, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_HEADING) else super()._fill_text(text, width, indent)


def add_examples(parser: argparse.ArgumentParser, examples: Sequence[str]) -> None:
    """Adds examples to a command's help.

    Args:
        parser: the command's parser.
        examples: command lines as they are typed, without "mcore-ckpt"; the text after " # " is an explanation.
    """
    lines = [example.partition(" # ") for example in examples]
    width = max(len(line) for line, _, _ in lines)
    shown = [f"  mcore-ckpt {line:{width}}  # {what}" if what else f"  mcore-ckpt {line}" for line, _, what in lines]
    parser.epilog = "\n".join((_HEADING, *shown))
    parser.formatter_class = HelpFormatter
