#!/usr/bin/env bash
# Installs what requirements-NAME.txt lists into .venv/NAME, for programs that put that folder on their path. It takes
# no time, and needs no network, if that is there already.
#
#     scripts/side_packages.sh NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted=requirements-$1.txt stamp=.venv/$1.installed
if ! cmp -s "$wanted" "$stamp"; then
    rm -rf ".venv/$1"
    .venv/bin/pip install -qq --disable-pip-version-check --no-compile --no-deps --ignore-requires-python \
        --target ".venv/$1" -r "$wanted"
    cp "$wanted" "$stamp"
fi
