"""Runs jobs of the tests of transformer-engine, each on forked ranks: to import TE, megatron and transformers takes
longer than a job. Started by test_transformer_engine.py: the stand-ins that TE needs must not reach other tests.

    python te_server.py     reads a line of JSON for each job, as test_transformer_engine.Job has it, and answers with
                            one: the exit codes of the ranks
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

# What libraries print does not go among the answers.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from tests.te.te_on_cpu import import_transformer_engine  # noqa: E402

import_transformer_engine()

from tests.distributed import forked_ranks  # noqa: E402
from tests.te import expert_adapters, hf_conversion, hf_names, round_trip  # noqa: E402

JOBS = {
    "expert_adapters": expert_adapters.main,
    "hf_conversion": hf_conversion.main,
    "hf_names": hf_names.main,
    "round_trip": round_trip.main,
}


def run(name: str, folder: str, models: list[str], rank: int) -> None:
    JOBS[name](Path(folder), models)


def main() -> None:
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        work = partial(run, job["name"], job["folder"], job["models"])
        codes = forked_ranks.run(job["world"], work, Path(job["log"]))
        _answers.write(json.dumps(codes) + "\n")
        _answers.flush()


if __name__ == "__main__":
    main()
