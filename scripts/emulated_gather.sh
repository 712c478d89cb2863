#!/usr/bin/env bash
# Prints csrc/gather.cu as C++ for the emulated CUDA: only the line that launches the kernel is another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo '#include "cuda_keywords.h"'
sed -E 's/gather<<<BLOCKS, THREADS, 0, stream>>>\((\w+)\);/EMULATED_LAUNCH(gather, BLOCKS, THREADS, stream, \1);/' csrc/gather.cu |
    awk '/EMULATED_LAUNCH/ { found = 1 } { print } END { exit !found }'
