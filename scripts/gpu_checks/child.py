"""Calls one function in this process, and writes how that ended to a file.

    python -m gpu_checks.child MODULE:FUNCTION RESULT [ARGUMENT ...]

The interpreter then exits as a trainer's would, so a process that cannot exit is seen by its parent. After a failure,
and with the variable AT_ONCE, the process is over as soon as the result is there.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name

from gpu_checks.outcome import outcome_of

AT_ONCE = "MCORE_CKPT_GPU_CHECK_ENDS_AT_ONCE"


def main(function: str, result: str, *arguments: str) -> None:
    def call() -> object:
        return resolve_name(function)(*arguments)  # an import that fails is a failure, too

    outcome = outcome_of(call)
    partial = Path(f"{result}.part")
    partial.write_text(json.dumps(asdict(outcome)))
    os.replace(partial, result)
    if outcome.status == "failed" or AT_ONCE in os.environ:
        sys.stdout.flush()
        os._exit(int(outcome.status == "failed"))  # others, which may wait for this rank, are then killed


if __name__ == "__main__":
    main(*sys.argv[1:])
