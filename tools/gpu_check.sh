#!/usr/bin/env bash
# The checks that need a GPU, from the root of a checkout on a machine that has one: tests, compute-sanitizer, benchmark.
#
#   tools/gpu_check.sh [--tests] [--ptx] [--sanitizer] [--bench] [OUT]
#
# Without a switch: tests and sanitizer. --ptx runs the tests of the paths with the wheels in ./wheelhouse-ptx*, built for
# one older architecture's PTX each (FP4LINEAR_CUDA_ARCHITECTURES=75-virtual, 80-virtual). Logs go to OUT (default build/gpu-check); a summary is printed last. Where
# fp4linear can't be imported, it is installed from ./wheelhouse, which holds its wheel and those it needs. Exit status 0:
# all of what was asked for passed.
#
#   PYTHON        the interpreter (python3)
#   PYTEST_ARGS   more arguments for pytest
#   BENCH_ARGS    arguments for `fp4linear bench` (--device cuda --suite decode); --suite qwen-step and a sweep over M run too
#   SANITIZER     compute-sanitizer, where it is not on PATH
#   TOOL_TIMEOUT  seconds for one sanitizer tool (300)
#   TOOLS         which of them: kernels memcheck memcheck-ptx80 memcheck-borrowed racecheck initcheck (all). kernels runs the
#                 same calls without the tool and asks their graphs whether every kernel of the library is among them
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

tests=0 ptx=0 sanitizer=0 bench=0 out=
for argument in "$@"; do
    case $argument in
        --tests) tests=1 ;;
        --ptx) ptx=1 ;;
        --sanitizer) sanitizer=1 ;;
        --bench) bench=1 ;;
        -h | --help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "unknown switch $argument (--help lists them)" >&2; exit 2 ;;
        *) [ -z "$out" ] || { echo "two output folders: $out and $argument" >&2; exit 2; }; out=$argument ;;
    esac
done
[ $((tests + ptx + sanitizer + bench)) -gt 0 ] || { tests=1 sanitizer=1; }
out=${out:-build/gpu-check}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

summary=()
failed=0
note() {  # NAME STATUS DETAIL
    summary+=("$(printf '%-22s %-7s %s' "$1" "$2" "$3")")
    case $2 in passed | skipped) ;; *) failed=1 ;; esac
}

installed() { (cd / && "$python" -c 'import fp4linear') > /dev/null 2>&1; }
if ! installed; then
    "$python" -m pip --disable-pip-version-check install --no-index --find-links wheelhouse --no-compile fp4linear \
        > "$out/install.log" 2>&1
    if ! installed; then
        tail -20 "$out/install.log"
        (cd / && "$python" -c 'import fp4linear')
        echo "FAILED: fp4linear can't be imported, and ./wheelhouse does not install it (install.log)" >&2
        exit 1
    fi
fi

"$python" - > "$out/machine.log" 2>&1 << 'EOF'
import fp4linear
info = fp4linear._core.cuda_info()
for key, value in info.items():
    print(f"{key}: {value}")
raise SystemExit(0 if info["devices"] else f"no GPU to check on: {info['reason']}")
EOF
machine=$?
nvidia-smi >> "$out/machine.log" 2>&1
cat "$out/machine.log" | head -12
if [ $machine -ne 0 ]; then
    echo "FAILED: no GPU that this build can use; a skipped check is no passed one" >&2
    exit 1
fi

run_tests() {  # NAME ARGUMENTS...
    local name=$1 status last
    shift
    # A test that hangs tells where it is; many failures are one fault, and what they say is printed at the end.
    "$python" -m pytest -p no:cacheprovider -m "gpu and not build" -o faulthandler_timeout=120 --durations=15 --maxfail=25 \
        --junitxml="$out/$name.xml" "$@" ${PYTEST_ARGS:-} > "$out/$name.log" 2>&1
    status=$?
    grep -E '^(FAILED|ERROR)' "$out/$name.log" | cut -c1-220 | head -40
    last=$(tail -1 "$out/$name.log")
    # A run that collected nothing, or skipped everything, has shown nothing.
    if [ $status -eq 0 ] && grep -qE '[0-9]+ passed' <<< "$last"; then note "$name" passed "$last"; else note "$name" FAILED "$last"; fi
}

if [ $tests = 1 ]; then
    run_tests tests tests
    # Alone: it takes all of the GPU's memory.
    FP4LINEAR_TEST_EXHAUSTION=1 run_tests exhaustion tests/gpu/test_gpu_allocation.py
fi

if [ $ptx = 1 ]; then
    found=0
    for wheels in wheelhouse-ptx*/; do
        [ -d "$wheels" ] || continue
        found=1
        name=$(basename "${wheels#wheelhouse-}")
        "$python" -m pip --disable-pip-version-check install --no-deps --no-index --target "$out/$name-site" \
            "$wheels"fp4linear-*.whl > "$out/install-$name.log" 2>&1
        # The driver compiles the PTX at the first use of each kernel.
        PYTHONPATH="$out/$name-site" run_tests "$name" tests/gpu/test_gpu_paths.py tests/gpu/test_gpu_cases.py
        rm -rf "$out/$name-site"
    done
    [ $found = 1 ] || note ptx FAILED "no ./wheelhouse-ptx*"
fi

if [ $sanitizer = 1 ]; then
    checker=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)}
    if [ -z "$checker" ]; then
        note sanitizer FAILED "compute-sanitizer is not installed"
    else
        run_tool() {  # NAME PARTS... -- OPTIONS...
            local name=$1 parts=() log="$out/sanitizer-$1.log"
            shift
            while [ "$1" != -- ]; do parts+=("$1"); shift; done
            shift
            timeout --kill-after=10 "${TOOL_TIMEOUT:-300}" "$checker" --error-exitcode=9 --print-limit=20 "$@" \
                "$python" -m tests.gpu.sanitizer_suite "${parts[@]}" > "$log" 2>&1
            local status=$? last
            last=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
            # The suite must have come to its end as well: a tool that could not attach reports no error.
            if [ $status -eq 0 ] && [ -n "$last" ] && [ "$(grep -cE '^[a-z_]+: [0-9]+ checks' "$log")" -eq "${#parts[@]}" ]; then
                note "$name" passed "$last"
            elif [ $status -eq 124 ] || [ $status -eq 137 ]; then
                note "$name" FAILED "ran past ${TOOL_TIMEOUT:-300} s"
            else
                note "$name" FAILED "exit $status; $last"
                grep -E '^=========|Error' "$log" | head -25
            fi
        }
        wanted() { case " ${TOOLS:-kernels memcheck memcheck-ptx80 memcheck-borrowed racecheck initcheck} " in *" $1 "*) ;; *) false ;; esac; }
        # With the wheel of another build in the place of the installed one.
        with_wheel() {  # FOLDER NAME ARGUMENTS OF run_tool...
            local wheels=$1 name=$2
            shift
            if [ -d "$wheels" ]; then
                "$python" -m pip --disable-pip-version-check install --no-deps --no-index --target "$out/$name-site" \
                    "$wheels"/fp4linear-*.whl > "$out/install-$name.log" 2>&1
                PYTHONPATH="$out/$name-site" run_tool "$@"
                rm -rf "$out/$name-site"
            else
                note "$name" skipped "needs a wheel in ./$wheels"
            fi
        }
        if wanted kernels; then
            "$python" -m tests.gpu.sanitizer_suite --kernels > "$out/kernels.log" 2>&1
            status=$?
            last=$(tail -1 "$out/kernels.log")
            if [ $status -eq 0 ]; then note kernels passed "every kernel is in the suite"; else note kernels FAILED "$last"; fi
        fi
        if wanted memcheck; then
            run_tool memcheck prepare gemv_tensor_core gemv_scalar gemm_fused dequant_cublas native_emulated -- \
                --tool memcheck
        fi
        # gemm_fused's mma.sync tiles: a GPU with wgmma takes them in a build of older PTX alone.
        if wanted memcheck-ptx80; then with_wheel wheelhouse-ptx80 memcheck-ptx80 gemm_fused -- --tool memcheck; fi
        if wanted memcheck-borrowed; then
            if "$python" -c 'import jax; jax.devices("gpu")' > "$out/jax.log" 2>&1; then
                XLA_PYTHON_CLIENT_ALLOCATOR=platform run_tool memcheck-borrowed borrowed -- --tool memcheck
            else
                note memcheck-borrowed skipped "JAX sees no GPU: $(tail -1 "$out/jax.log" | cut -c1-100)"
            fi
        fi
        # Races are looked for in shared memory, which this library's own kernels of these paths use; cuBLAS's are its own.
        # The tool does not follow __syncwarp before an mbarrier arrival, so the kernels are judged in a build in which every
        # lane arrives (CMake option FP4LINEAR_RACECHECK).
        if wanted racecheck; then
            with_wheel wheelhouse-racecheck racecheck prepare gemv_tensor_core gemv_scalar gemm_fused native_emulated -- \
                --tool racecheck --racecheck-report analysis
        fi
        if wanted initcheck; then
            run_tool initcheck prepare gemv_tensor_core gemv_scalar gemm_fused native_emulated -- --tool initcheck
        fi
    fi
fi

if [ $bench = 1 ]; then
    run_bench() {  # NAME OPTIONS...
        local name=$1 status
        shift
        rm -f "$out/$name.jsonl"
        # A table is cut to the terminal's width, and here is none.
        COLUMNS=160 "$python" -c "from fp4linear.cli import main; main()" bench "$@" --json "$out/$name.jsonl" \
            > "$out/$name.log" 2>&1
        status=$?
        tail -60 "$out/$name.log"
        if [ $status -eq 0 ]; then note "$name" passed "$(wc -l < "$out/$name.jsonl") lines"; else note "$name" FAILED "exit $status"; fi
    }
    # shellcheck disable=SC2086
    run_bench bench ${BENCH_ARGS:---device cuda --suite decode}
    run_bench qwen-step --device cuda --suite qwen-step
    run_bench over-m --device cuda --shape 4096x4096 --shape 11008x4096 --dtype bf16 \
        --m 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192 --plot "$out/over_m.png"
    "$python" tools/quantize_bandwidth.py --json "$out/quantize.jsonl" > "$out/quantize.log" 2>&1
    status=$?
    cat "$out/quantize.log"
    if [ $status -eq 0 ]; then note "quantiser" passed ""; else note "quantiser" FAILED "exit $status"; fi
    "$python" tools/host_overhead.py > "$out/host_overhead.log" 2>&1
    status=$?
    cat "$out/host_overhead.log"
    if [ $status -eq 0 ]; then note "host overhead" passed ""; else note "host overhead" FAILED "exit $status"; fi
fi

echo
echo "== $out"
printf '%s\n' "${summary[@]}"
exit $failed
