#!/usr/bin/env bash
# Takes the power from a disk at every point of saves and of all else that writes, and opens what is left; see
# docs/reliability.md.
#
#     scripts/power_loss.sh saves|outputs [--states N] [--seed 1] [--syncs REGEX] [--json FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# With the megatron-core that scripts/test.sh has put on the path, or else that of requirements.txt.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -W ignore tests/faults/power/power.py "$@"
