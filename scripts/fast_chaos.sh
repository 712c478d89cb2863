#!/usr/bin/env bash
# Kills trainings in the fast tier, and simulated hosts of theirs, at random points of save, copies, drain and recovery,
# and checks that nothing is lost beyond what the replicas promise, and nothing torn; see docs/reliability.md.
#
#     scripts/fast_chaos.sh [--kills 100] [--seed 1] [--log FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# With the megatron-core that scripts/test.sh has put on the path, or else that of requirements.txt.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python -W ignore tests/hosts/fast_chaos.py "$@"
