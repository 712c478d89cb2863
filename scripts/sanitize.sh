#!/bin/sh
# The engine in csrc/ under AddressSanitizer and UndefinedBehaviorSanitizer, then under ThreadSanitizer: some 15 s of random
# jobs each, without Python. Exit status 77 where the compiler has no sanitizers.
#
#     scripts/sanitize.sh [seconds each]
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-5}
compiler=${CXX:-g++}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

sources="tests/native/engine_stress.cpp"
for name in crc32 file file_image host_buffer parallel write_job; do
    sources="$sources csrc/$name.cpp"
done

for sanitizer in address,undefined thread; do
    if ! echo 'int main() {}' | "$compiler" -x c++ - "-fsanitize=$sanitizer" -o "$folder/empty" 2>"$folder/why"; then
        echo "$compiler has no -fsanitize=$sanitizer: $(head -n 1 "$folder/why")" >&2
        exit 77
    fi
    # shellcheck disable=SC2086
    "$compiler" -std=c++17 -O1 -g -pthread "-fsanitize=$sanitizer" -fno-sanitize-recover=all -Icsrc $sources -o "$folder/stress"
    mkdir "$folder/files"
    # ThreadSanitizer cannot place its shadow memory where the kernel randomizes addresses in more than 28 bits.
    TSAN_OPTIONS=halt_on_error=1 setarch -R "$folder/stress" "$folder/files" "$seconds"
    rm -r "$folder/files"
done
