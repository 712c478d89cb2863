#!/usr/bin/env bash
# Builds the extension with an emulated CUDA (tests/cuda/emulated_cuda.cpp) from csrc/ as it is, gather kernel included.
# What does not use CUDA is taken from the last build (build/native), so this takes some seconds.
#
#     scripts/emulated_cuda.sh FILE        # FILE: the extension to write. 77: CUDA's headers are missing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to=$1
headers=
for home in "${CUDA_HOME:-}" /usr/local/cuda; do
    [ -e "$home/include/cuda_runtime_api.h" ] && headers=$home/include && break
done
[ -n "$headers" ] || { echo "there are no CUDA headers in CUDA_HOME or /usr/local/cuda" >&2; exit 77; }
objects=(build/native/build/native/bindings.o)
for source in csrc/*.cpp; do
    case $source in *bindings.cpp | csrc/device_copy_none.cpp) continue ;; esac
    object=build/native/${source%.cpp}.o
    [ "$object" -nt "$source" ] || { echo "$object is missing or old: run scripts/install.sh" >&2; exit 1; }
    objects+=("$object")
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp csrc/device_copy.cu "$work/device_copy.cpp"
cp csrc/device_copier.cu "$work/device_copier.cpp"
bash scripts/emulated_gather.sh >"$work/gather.cpp"
cp tests/cuda/emulated_cuda.cpp "$work"
compiler=${CXX:-g++}
printf '%s\n' "$work"/*.cpp | xargs -P 2 -I SOURCE "$compiler" -std=c++17 -O1 -fPIC -fvisibility=hidden -pthread \
    -Icsrc -Itests/cuda -isystem "$headers" -c SOURCE -o SOURCE.o
"$compiler" -shared -pthread "$work"/*.o "${objects[@]}" -ldl -o "$work/extension"
mkdir -p "$(dirname "$to")"
mv "$work/extension" "$to"
