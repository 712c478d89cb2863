#!/usr/bin/env bash
# On a machine with GPUs, with or without network: builds mcore_ckpt with CUDA in place, runs the checks of
# scripts/gpu_checks, one line each, and prints a block for docs/benchmarks.md. Nothing is downloaded or installed.
# The exit status is 1 if a check has failed. Each check has a time limit; all together take two to five hours.
#
#     scripts/gpu_check.sh [PYTHON [CHECK ...]]    # else $PYTHON, else .venv/bin/python, else python3; all checks
#
# The Python must have torch with CUDA. Checks for which it lacks megatron-core, transformers or transformer-engine are
# "not possible here".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    echo "gpu_check: $1" >&2
    exit 1
}

python=${1:-${PYTHON:-}}
[ $# -eq 0 ] || shift
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
command -v "$python" >/dev/null || stop "there is no Python at $python."
# A driver that hangs must not hang this script.
timeout -k 10 600 "$python" -c '
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} has no torch ({error}): name a Python that has it (gpu_check.sh PYTHON).")
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch in {sys.executable} sees no GPU (built for CUDA: {torch.version.cuda}).")' ||
    stop "without a GPU there is nothing to check."
for module in pybind11 setuptools pytest hypothesis; do
    "$python" -c "import $module" 2>/dev/null || stop "$python has no $module, which the build and the tests need."
done
command -v "${CXX:-g++}" >/dev/null || stop "the C++ compiler ${CXX:-g++} is missing."

timeout -k 10 3600 "$python" setup.py -q build_ext --inplace --force || stop "the build has failed."
"$python" -c 'import sys; from mcore_ckpt.io import _native; sys.exit(not _native.built_with_cuda)' ||
    stop "the build has found no CUDA (its reason is above): set CUDA_HOME to a toolkit that has nvcc."

PYTHONPATH=$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m gpu_checks "$@"
