#!/usr/bin/env bash
# Stops ranks, freezes disks, slows and cuts connections and lets another user interfere, at random moments of a
# training, and checks that nothing is lost, torn, or hung; see docs/reliability.md. It needs root's rights.
#
#     scripts/fault_chaos.sh [--faults 100] [--seed 1] [--chains 3] [--log FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# With the megatron-core that scripts/test.sh has put on the path, or else that of requirements.txt.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -W ignore tests/faults/kills/faults.py "$@"
