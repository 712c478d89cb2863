"""Parses the command line: suggests a known word for an unknown one, and takes options with `-` or `_`.

The help of a command ends with examples.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from mcore_ckpt.redaction import redacted

_EXAMPLES = "examples:"


class Parser(argparse.ArgumentParser):
    """A parser whose messages quote arguments without their secrets, and suggest what an unknown argument may mean."""

    def error(self, message: str) -> NoReturn:
        super().error(redacted(message))

    def refuse(self, unknown: Sequence[str], otherwise: str = "") -> NoReturn:
        """Complains about unknown arguments. Suggests a similar option, or ends with `otherwise` if there is none."""
        names = {each.strip("-").replace("_", "-"): each for each in self._options()}
        given = (word.partition("=")[0].strip("-").replace("_", "-") for word in unknown if word.startswith("--"))
        meant = next((names[close] for word in given for close in _alike(word, list(names))), None)
        # The advice is added after redaction, because some secrets are recognized by the end of their line.
        complaint = redacted(f"unrecognized arguments: {' '.join(unknown)}")
        self.error(complaint + (otherwise if meant is None else _did_you_mean(meant)))

    def _options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


class TopParser(Parser):
    """The parser of all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments. Before a command's name, only the options of `mcore-ckpt --help` are known."""
        args = sys.argv[1:] if args is None else args
        before = takewhile(lambda word: word.startswith("-"), args)
        known = tuple(self._option_string_actions)
        if unknown := [word for word in before if not any(each.startswith(word) for each in known)]:
            self.refuse(unknown, ": name a command first")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            names = list(action.choices)
            close = _alike(str(value), names)
            advice = _did_you_mean(close[0]) if close else f": use one of {', '.join(names)}"
            raise argparse.ArgumentError(None, redacted(f"there is no command {value!r}") + advice)
        super()._check_value(action, value)


class CommandParser(Parser):
    """The parser of one command, whose complaints show the usage of this command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments, which argparse itself would leave to the parser of all commands."""
        found, unknown = super().parse_known_args(self._as_shown(args), namespace)
        if unknown:
            self.refuse(unknown)
        return found, unknown

    def _as_shown(self, args: Sequence[str]) -> list[str]:
        """Returns arguments with options spelled as in the help. Users may type `_`, as in verl, or `-`.

        As in argparse, the beginning of an option's name is enough.
        """
        end = args.index("--") if "--" in args else len(args)
        return [self._spelled(word) if word.startswith("--") else word for word in args[:end]] + list(args[end:])

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        plain = name.replace("_", "-")
        shown = next((each for each in self._options() if each.replace("_", "-").startswith(plain)), name)
        return shown[: len(name)] + equals + value


def _alike(word: str, known: Sequence[str]) -> list[str]:
    """Returns a list with the known word that is most like a given word; an empty list if no word is similar enough."""
    # At 0.7, --jsno is similar to --json, but --step is not similar to --tp.
    return difflib.get_close_matches(word, known, 1, cutoff=0.7)


def _did_you_mean(word: str) -> str:
    return f": did you mean {word}?"


class _HelpFormatter(argparse.HelpFormatter):
    """Folds descriptions to the width of the terminal, but leaves examples unchanged, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


def add_examples(parser: argparse.ArgumentParser, examples: Sequence[str]) -> None:
    """Ends a command's help with examples. The text after " # " in an example is its explanation."""
    lines = [example.partition(" # ") for example in examples]
    width = max(len(line) for line, _, _ in lines)
    shown = [f"  mcore-ckpt {line:{width}}  # {what}" if what else f"  mcore-ckpt {line}" for line, _, what in lines]
    parser.epilog = "\n".join((_EXAMPLES, *shown))
    parser.formatter_class = _HelpFormatter
