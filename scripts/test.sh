#!/usr/bin/env bash
# Installs and builds everything, then runs the linters and the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh

# beside NAME: what requirements-NAME.txt lists, in .venv/NAME, for tests that put that folder on their path.
beside() {
    local wanted=requirements-$1.txt stamp=.venv/$1.installed
    if ! cmp -s "$wanted" "$stamp"; then
        rm -rf ".venv/$1"
        .venv/bin/pip install -qq --disable-pip-version-check --no-deps --target ".venv/$1" -r "$wanted"
        cp "$wanted" "$stamp"
    fi
}
beside te
beside transformers4
beside remote
beside verl
beside areal

.venv/bin/ruff check .
.venv/bin/mypy mcore_ckpt
# Two at a time, file by file: the launches of several ranks, a third of the whole, run beside the rest.
.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
