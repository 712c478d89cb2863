#!/usr/bin/env bash
# Installs and builds everything, then trains a small model, saves it and brings it back: mcore-ckpt demo.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/install.sh"
exec "$root/.venv/bin/mcore-ckpt" demo "$@"
