#!/usr/bin/env bash
# Kills trainings at random points of save, commit, retention and load, and checks that nothing is lost or torn; see
# docs/reliability.md.
#
#     scripts/chaos.sh [--kills 200] [--seed 1] [--chains 3] [--part-megabytes 0] [--log FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# With the megatron-core that scripts/test.sh has put on the path, or else that of requirements.txt.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -W ignore tests/faults/kills/chaos.py "$@"
