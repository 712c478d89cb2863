#!/usr/bin/env bash
# Installs and builds everything, then runs the linters and the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh

stamp=.venv/te.installed
if ! cmp -s requirements-te.txt "$stamp"; then
    rm -rf .venv/te
    .venv/bin/pip install -qq --disable-pip-version-check --no-deps --target .venv/te -r requirements-te.txt
    cp requirements-te.txt "$stamp"
fi

.venv/bin/ruff check .
.venv/bin/mypy mcore_ckpt
.venv/bin/python -m pytest "$@"
