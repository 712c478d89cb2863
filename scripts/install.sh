#!/usr/bin/env bash
# Installs requirements.txt into .venv and builds mcore_ckpt in place. Returns at once if nothing has changed since then.
#
#     scripts/install.sh [--only-venv]      --only-venv makes .venv and installs nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    echo "$1" >&2
    exit 1
}

if [ ! -x .venv/bin/pip ]; then
    command -v python3 >/dev/null || stop "Python is missing: install Python 3.11 or newer (apt install python3 python3-venv python3-dev)."
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "The versions pinned in requirements.txt need Python 3.11 or newer, and python3 here is $(python3 -V)."
    python3 -c 'import ensurepip, venv' 2>/dev/null || stop "Python's venv module is missing: install it (apt install python3-venv)."
    python3 -m venv .venv
fi
[ "${1-}" != --only-venv ] || exit 0

# The stamp says what was installed last. scripts/test.sh is run often, and a build takes half a minute.
stamp=.venv/mcore_ckpt.installed
wanted=$({ pwd; echo "cuda=${MCORE_CKPT_CUDA-} $(command -v nvcc)"; cat requirements.txt pyproject.toml setup.py csrc/*; } | sha256sum)
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && compgen -G "mcore_ckpt/io/_native.*.so" >/dev/null; then
    exit 0
fi

compiler=${CXX:-g++}
command -v "${compiler%% *}" >/dev/null || stop "The C++ compiler ${compiler} is missing: install g++ (apt install g++)."
.venv/bin/python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    stop "Python's headers are missing: install them (apt install python3-dev)."

# pip takes for installed what this variable shows, and would remove another version of megatron-core from its folder.
unset PYTHONPATH
pip=(.venv/bin/pip install -qq --disable-pip-version-check)
# pip takes a minute to compile all modules. Python compiles those that it imports, unless this variable forbids it.
[ -n "${PYTHONDONTWRITEBYTECODE-}" ] || pip+=(--no-compile)
# The build needs no more than these two. The rest is installed beside it.
"${pip[@]}" -c requirements.txt pybind11 setuptools
"${pip[@]}" --no-build-isolation --no-deps -e . &
build=$!
trap 'kill "$build" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
status=0
# requirements.txt lists all that is needed, so that nothing has to be resolved.
"${pip[@]}" --no-deps -r requirements.txt || status=$?
wait "$build" || status=$?
[ "$status" -eq 0 ] || exit "$status"
echo "$wanted" >"$stamp"
