#!/usr/bin/env bash
# Draws the plots of the benchmarks, and builds the documentation as a site. Open build/site/index.html: it needs neither
# a server nor a network. What a build needs is installed first; then it needs no network either.
#
#     scripts/docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh --only-venv
bash scripts/side_packages.sh docs
export PYTHONPATH=$PWD/.venv/docs
.venv/bin/python benchmarks/charts.py
# mkdocs-material prints a notice about versions of mkdocs that it does not take.
NO_MKDOCS_2_WARNING=true .venv/bin/python -m mkdocs build --strict --quiet
echo "the site is in ${PWD}/build/site"
