"""What `merge`, `test` and `convert` share: flags that verl's users type, and torchrun's variables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt.cli import UsageError


def add_accepted(parser: argparse.ArgumentParser) -> None:
    """What users of verl's merger type, and what changes nothing here."""
    parser.add_argument(
        "--use_cpu_initialization",
        "--use-cpu-initialization",
        action="store_true",
        help="accepted: no model is made, so none is initialized",
    )
    parser.add_argument(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="accepted: no code of the model is run, nor needed",
    )


@contextmanager
def torchruns_variables() -> Iterator[None]:
    """Around what reads them: a job's scheduler may set some of them, and not the others."""
    try:
        yield
    except ValueError as error:
        raise UsageError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}, without what torchrun sets beside it: {error}: use "
            "torchrun, or unset it to work alone"
        ) from None
