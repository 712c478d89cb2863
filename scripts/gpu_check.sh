#!/usr/bin/env bash
# On a machine with a GPU, with or without network: builds mcore_ckpt with CUDA in place, runs the GPU tests and the GPU
# benchmark, and prints a table for docs/benchmarks.md. Nothing is downloaded or installed.
#
#     scripts/gpu_check.sh [PYTHON]        # else $PYTHON, else .venv/bin/python, else python3; it must have torch with CUDA
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    echo "gpu_check: $1" >&2
    exit 1
}

python=${1:-${PYTHON:-}}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
command -v "$python" >/dev/null || stop "there is no Python at $python."
"$python" -c 'import torch' 2>/dev/null || stop "$python has no torch: name a Python that has it (gpu_check.sh PYTHON)."
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    stop "torch in $python sees no GPU (built for CUDA: $("$python" -c 'import torch; print(torch.version.cuda)'))."
for module in pybind11 setuptools pytest hypothesis; do
    "$python" -c "import $module" 2>/dev/null || stop "$python has no $module, which the build and the tests need."
done
command -v "${CXX:-g++}" >/dev/null || stop "the C++ compiler ${CXX:-g++} is missing."

"$python" setup.py -q build_ext --inplace --force
"$python" -c 'import sys; from mcore_ckpt.io import _native; sys.exit(not _native.built_with_cuda)' ||
    stop "the build has found no CUDA (its reason is above): set CUDA_HOME to a toolkit that has nvcc."

"$python" -m pytest -q tests/gpu tests/native
if "$python" -c 'import megatron.core' 2>/dev/null; then
    # Whole trainings, saved in every mode while they go on, in every world size for which there is a GPU for each rank.
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    for world in 1 2 4 8; do
        [ "$world" -le "$gpus" ] || break
        echo "gpu_check: $world of $gpus GPUs, a rank on each, over NCCL"
        OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc_per_node "$world" \
            -m pytest -q -p no:cacheprovider --durations=20 --full tests/distributed
    done
else
    echo "gpu_check: $python has no megatron-core: trainings on the GPU are not tested."
fi

results=$(mktemp)
trap 'rm -f "$results"' EXIT
PYTHONPATH=. "$python" benchmarks/gpu.py --json >"$results"
"$python" - "$results" <<'TABLE'
import json
import sys

with open(sys.argv[1]) as file:
    measured = json.load(file)
print(f"\n{measured['gpu']}, torch {measured['torch']}, medians of {measured['pairs']} interleaved pairs\n")
print("| GPU state | tensors | stall, ms (worst) | copy, GB/s | one cudaMemcpyAsync, GB/s | ratio |")
print("|---|---|---|---|---|---|")
for name, r in measured["results"].items():
    print(
        f"| {name} | {r['tensors']:,} | {r['stall_ms']:.2f} ({r['worst_stall_ms']:.2f}) | {r['ours_gb_per_s']:.1f} "
        f"| {r['reference_gb_per_s']:.1f} | {r['ratio']:.2f} |"
    )
TABLE
