#!/usr/bin/env bash
# Installs and builds everything, then runs `mcore-ckpt demo`: it trains a small model, kills it and brings it back.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/install.sh"
exec "$root/.venv/bin/mcore-ckpt" demo "$@"
