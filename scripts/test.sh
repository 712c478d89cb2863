#!/usr/bin/env bash
# Installs and builds what the tests need, then runs the linters and the tests. docs: CONTRIBUTING.md.
#
#     scripts/test.sh [--quick | --full | --part PART] [--coverage] [--browser] [arguments of pytest]
#
#     (nothing)     what CI runs: one case for each reason, and a quarter of the examples of hypothesis
#     --quick       for the loop while one writes: linters, and the tests of one process that are over in a moment
#     --full        all there is, and on the disk: every case, 200 kills, five minutes of the soak, fuzzing, the sanitizers
#     --part PART   one of PARTS of --full, below. It takes half an hour on a quiet machine of two cores, and notes in
#                   build/full.txt when it ran, of which commit, for how long, and its exit status
#     --browser     first installs Chromium from Debian, if this is root; without a browser, tests of pages are skipped
#     --coverage    measures, with every process and rank, which lines and branches of the package the tests run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The folders and files of each part of --full. `rest` has what no other part has, and `chaos` what scripts do.
declare -A folders=(
    [ranks]="tests/distributed"
    [saves]="tests/save tests/load tests/fast tests/state tests/steps tests/doors tests/io tests/ranks tests/preemption tests/faults/crash"
    [files]="tests/checkpoint tests/formats tests/models tests/sharding tests/faults/hostile"
    [tools]="tests/tools tests/cli tests/faults/disks"
    [frameworks]="tests/integrations tests/verl tests/swift tests/bridge tests/skyrl tests/te"
    [native]="tests/cuda tests/native tests/gpu"
    [power]="tests/faults/power"
    [versions]="tests/test_versions.py"
)
PARTS=(ranks saves files tools frameworks native power versions rest chaos)

tier=ci coverage= browser= parts=("${PARTS[@]}")
while [ $# -gt 0 ]; do
    case $1 in
        --quick | --full) tier=${1#--} ;;
        --part)
            shift
            [[ " ${PARTS[*]} " == *" ${1-} "* ]] || { echo "--part is one of: ${PARTS[*]}" >&2; exit 2; }
            tier=full parts=("$1")
            ;;
        --coverage) coverage=yes ;;
        --browser) browser=yes ;;
        *) break ;;
    esac
    shift
done

# The tests start hundreds of processes. With this variable set, each of them would compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# torch's TCPStore asks the name servers for the name of 127.0.0.1 at each connection. A lost answer would cost 5 s.
export RES_OPTIONS="timeout:1 attempts:1"
# On a CPU nothing is compiled (megatron_on_cpu.py), but without this each process that imports megatron imports the
# compiler, too: 2 of 8 seconds.
export TORCHDYNAMO_DISABLE=1
# The workers have two cores. Threads that wait for each other spin.
export OMP_NUM_THREADS=1

bash scripts/install.sh --only-venv

# Linters and installations run beside each other and beside the tests. Each one's output is shown when it has ended.
logs=$(mktemp -d)
names=() pids=() memory=
cleanup() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    rm -rf "$logs" ${memory:+"$memory"}
}
trap cleanup EXIT

beside() { # beside NAME COMMAND...
    local name=$1
    shift
    "$@" >"$logs/$name" 2>&1 &
    names+=("$name") pids+=($!)
}

# Waits for what runs beside, shows the output, and returns whether all went well.
wait_beside() {
    local failed=0 number
    for number in "${!pids[@]}"; do
        if wait "${pids[$number]}"; then
            tail -n 3 "$logs/${names[$number]}"
        else
            echo "${names[$number]} failed:"
            cat "$logs/${names[$number]}"
            failed=1
        fi
    done
    names=() pids=()
    return "$failed"
}

# All tests run with the newest megatron-core, and some with the other versions (tests/test_versions.py).
newest=megatron-0.19
wanted=("$newest" triton emerging)
# Frameworks are tested beside the environment: they want other versions of what it has.
frameworks=(verl verl-0.6 verl-0.7 verl-0.8 areal bridge skyrl swift)
[ "$tier" = quick ] || wanted+=(megatron-0.15 megatron-0.16 megatron-0.17 megatron-0.18 te transformers4 quantized remote monitoring transferqueue "${frameworks[@]}")
[ "$tier" != full ] || wanted+=(wandb docs)
for name in "${wanted[@]}"; do
    beside "packages-$name" bash scripts/side_packages.sh "$name"
done
[ -z "$browser" ] || beside browser bash scripts/install_browser.sh
bash scripts/install.sh
wait_beside
export PYTHONPATH=$PWD/.venv/$newest:$PWD/.venv/triton${PYTHONPATH:+:$PYTHONPATH}

# Tests wait for the disk thousands of times. With their folders in memory they take two thirds of the time. They use up
# to 3 GiB, and load a library that they compile there.
free=$(df --output=avail --block-size=1G /dev/shm 2>/dev/null | tail -n 1) || free=0
if [ "$tier" != full ] && [ "$free" -ge 6 ] && ! grep -q ' /dev/shm .*noexec' /proc/mounts; then
    memory=$(mktemp -d /dev/shm/mcore_ckpt.XXXXXX)
    chmod 1777 "$memory" # some tests run as another user
    export TESTS_DISK=${TMPDIR:-/tmp} TMPDIR=$memory
fi

export TESTS_MODELS=${memory:-$logs}/models # tests/support/tiny_models.py
mkdir "$TESTS_MODELS"

beside ruff .venv/bin/ruff check .
beside lint-imports .venv/bin/lint-imports
beside mypy .venv/bin/mypy mcore_ckpt

# Four workers for two cores, because tests wait for disks and for each other: with three, a sixth of the cores' time was
# left. Each takes a whole file at a time, or its tests of one world size (tests/conftest.py).
command=(-m pytest -n 4 --dist loadgroup --no-loadscope-reorder --durations=20)
[ "$tier" = ci ] || command+=("--$tier")
if [ -n "$coverage" ]; then
    export COVERAGE_FOLDER=$PWD/build/coverage
    rm -rf "$COVERAGE_FOLDER"
    mkdir -p "$COVERAGE_FOLDER"
    command=(-m coverage run "${command[@]}")
fi
run_scripts() {
    local failed=0
    bash scripts/chaos.sh --kills 200 || failed=1
    bash scripts/fault_chaos.sh --faults 100 || [ $? -eq 77 ] || failed=1 # 77: no root's rights
    bash scripts/fast_chaos.sh --kills 100 || [ $? -eq 77 ] || failed=1 # 77: hosts cannot be simulated
    bash scripts/soak.sh --minutes 5 || [ $? -eq 77 ] || failed=1 # 77: no C compiler
    .venv/bin/python scripts/fuzz.py || failed=1
    bash scripts/docs.sh || failed=1
    return "$failed"
}

run_part() { # run_part PART [arguments of pytest]
    local part=$1 paths=()
    shift
    case $part in
        chaos) run_scripts ;;
        rest)
            for path in ${folders[*]}; do
                paths+=("--ignore=$path")
            done
            .venv/bin/python "${command[@]}" "${paths[@]}" "$@"
            ;;
        *)
            read -ra paths <<<"${folders[$part]}"
            .venv/bin/python "${command[@]}" "${paths[@]}" "$@"
            ;;
    esac
}

# The workers start together. Each of them, and its server of ranks, would rewrite the assertions of all tests.
[ "$tier" = quick ] || .venv/bin/python scripts/compile_tests.py

status=0
if [ "$tier" = full ]; then
    mkdir -p build
    for part in "${parts[@]}"; do
        begun=$SECONDS result=0
        run_part "$part" "$@" || result=$? status=1
        echo "$(date -u +%FT%TZ) $(git describe --always --dirty) $part: exit status $result after $(((SECONDS - begun + 59) / 60)) min" | tee -a build/full.txt
    done
else
    .venv/bin/python "${command[@]}" "$@" || status=$?
fi
wait_beside || status=1

if [ -n "$coverage" ]; then
    .venv/bin/python -m coverage combine -q
    .venv/bin/python -m coverage json -q -o "$COVERAGE_FOLDER/report.json"
    .venv/bin/python - "$COVERAGE_FOLDER/report.json" <<'REPORT'
import json
import sys

with open(sys.argv[1]) as file:
    totals = json.load(file)["totals"]
for what, covered, of in (("lines", "covered_lines", "num_statements"), ("branches", "covered_branches", "num_branches")):
    print(f"coverage of {what}: {totals[covered]} of {totals[of]}, {100 * totals[covered] / totals[of]:.2f} %")
REPORT
fi
exit "$status"
