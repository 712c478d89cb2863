#!/bin/sh
# Checks csrc/: its format with clang-format, its code with clang-tidy, and its behaviour under AddressSanitizer and UndefinedBehaviorSanitizer,
# then under ThreadSanitizer. The programs under sanitizers do not use Python: they run random jobs that write and read
# and, if CUDA's headers are installed, everything that uses a GPU on a fake CUDA and on an emulated one, 200 rounds. The
# exit status is 77 if the compiler has no sanitizers.
#
#     scripts/sanitize.sh [seconds for each kind of job and sanitizer]
set -eu
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH  # for clang-format and clang-tidy of requirements.txt
seconds=${1:-5}
compiler=${CXX:-g++}
folder=$(mktemp -d)
memory=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$folder" "$memory"' EXIT

if command -v clang-format >/dev/null; then
    clang-format --dry-run -Werror csrc/*.h csrc/*.cpp csrc/*.cu tests/native/*.cpp tests/native/fake_cuda/* tests/cuda/*.cpp tests/cuda/*.h
else
    echo "clang-format is not installed: the format is not checked (pip install -r requirements.txt installs it)"
fi
if command -v clang-tidy >/dev/null; then
    includes=$(python -c 'import pybind11, sysconfig; print(pybind11.get_include(), sysconfig.get_path("include"))')
    # shellcheck disable=SC2086
    printf '%s\n' csrc/*.cpp | xargs -P "$(nproc)" -I SOURCE clang-tidy --quiet SOURCE -- -std=c++17 \
        '-DMCORE_CKPT_NO_CUDA_REASON="this is a check"' $(printf -- '-isystem %s ' $includes)
else
    echo "clang-tidy is not installed: the code is not checked (pip install -r requirements.txt installs it)"
fi

sanitizers="address,undefined thread"
for sanitizer in $sanitizers; do
    if ! echo 'int main() {}' | "$compiler" -x c++ - "-fsanitize=$sanitizer" -o "$folder/empty" 2>"$folder/why"; then
        echo "$compiler has no -fsanitize=$sanitizer: $(head -n 1 "$folder/why")" >&2
        exit 77
    fi
    mkdir "$folder/$sanitizer"
done

common="csrc/buffer_cache.cpp csrc/crc32.cpp csrc/file.cpp csrc/file_layout.cpp csrc/host_buffer.cpp"
common="$common csrc/host_copy.cpp csrc/huge_extent.cpp csrc/parallel.cpp csrc/read_job.cpp csrc/write_job.cpp"
write_stress="tests/native/write_stress.cpp csrc/device_copy_none.cpp"
read_stress="tests/native/read_stress.cpp csrc/device_copy_none.cpp"
device_test=""
emulated_test=""
headers=.
for home in "${CUDA_HOME:-}" /usr/local/cuda; do
    [ -e "$home/include/cuda_runtime_api.h" ] || continue
    device_test="tests/native/fake_cuda/device_copy_test.cpp tests/native/fake_cuda/fake_cuda.cpp"
    device_test="$device_test csrc/device_copy.cu csrc/device_copier.cu"
    gather=$folder/emulated_gather.cpp
    bash scripts/emulated_gather.sh >"$gather"
    emulated_test="tests/cuda/stress.cpp tests/cuda/emulated_cuda.cpp $gather csrc/device_copy.cu csrc/device_copier.cu"
    headers=$home/include
    break
done
[ -n "$device_test" ] || echo "there are no CUDA headers in CUDA_HOME or /usr/local/cuda: no test on a fake GPU"

for sanitizer in $sanitizers; do
    for source in $common $write_stress $read_stress $device_test $emulated_test; do
        echo "$sanitizer" "$source" "$folder/$sanitizer/$(basename "$source").o"
    done
done | sort -u | xargs -P "$(nproc)" -L 1 sh -c '
    exec "$0" -std=c++17 -O1 -g -pthread "-fsanitize=$2" -fno-sanitize-recover=all -Icsrc -Itests/cuda -isystem "$1" \
        "-DMCORE_CKPT_NO_CUDA_REASON=\"this is a test\"" -x c++ -c "$3" -o "$4"' "$compiler" "$headers"

# check SANITIZER "SOURCES" [ARGUMENT ...]: links them with what is common, and runs that.
check() {
    sanitizer=$1
    objects=""
    for source in $common $2; do
        objects="$objects $folder/$sanitizer/$(basename "$source").o"
    done
    shift 2
    # shellcheck disable=SC2086
    "$compiler" -pthread "-fsanitize=$sanitizer" $objects -ldl -o "$folder/program"
    mkdir "$folder/files"
    # ThreadSanitizer cannot place its shadow memory where the kernel randomizes addresses in more than 28 bits.
    TSAN_OPTIONS=halt_on_error=1 setarch -R "$folder/program" "$folder/files" "$@"
    rm -r "$folder/files"
}

for sanitizer in $sanitizers; do
    check "$sanitizer" "$write_stress" "$seconds" "$memory"
    check "$sanitizer" "$read_stress" "$seconds"
    [ -z "$device_test" ] || check "$sanitizer" "$device_test"
    [ -z "$emulated_test" ] || EMULATED_DELAY_US=500 check "$sanitizer" "$emulated_test" 200
done
