#!/usr/bin/env bash
# Trains, saves, fails, dies and comes back for an hour, and looks whether memory, threads, descriptors, keys or files
# grow; see docs/reliability.md. tests/faults/soak/publish.py writes the page's section and its picture from a result.
#
#     scripts/soak.sh [--minutes 60] [--seed 1] [--log FILE] [--result FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cc >/dev/null || { echo "the soak needs a C compiler, for the libraries that make system calls fail"; exit 77; }
libraries=$(mktemp -d)
trap 'rm -rf "$libraries"' EXIT
for name in shim delays; do
    cc -shared -fPIC -w "tests/faults/disks/$name.c" -o "$libraries/$name.so" -ldl
done
# With the megatron-core that scripts/test.sh has put on the path, or else that of requirements.txt.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
LD_PRELOAD="$libraries/shim.so $libraries/delays.so" "${PYTHON:-.venv/bin/python}" -W ignore tests/faults/soak/soak.py "$@"
