#!/usr/bin/env bash
# Preempts trainings at random moments, and checks that all ranks stop at one step, in time, and that it is saved; see
# docs/how_to/preemption.md.
#
#     scripts/preemptions.sh [--preemptions 50] [--ranks 8] [--seed 1]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# With the megatron-core that scripts/test.sh has put on the path, or else that of requirements.txt.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -W ignore tests/faults/kills/preemptions.py "$@"
