#!/usr/bin/env bash
# Every lint and every test, in a .venv made for them, then under mpirun those that any number of
# ranks must pass. Arguments go to pytest, and then there is no mpirun: scripts/test.sh -k adam
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
install docs,plot,serve,tensorboard,test,sim,mpi

# Tests start hundreds of processes, each of which would compile all modules for itself.
unset PYTHONDONTWRITEBYTECODE

.venv/bin/ruff check
.venv/bin/ruff format --check
find kernels -name '*.cu' -o -name '*.cuh' | xargs -r .venv/bin/clang-format --dry-run -Werror
# A file stays with one process: its fixtures are made once. There is a process more than cores, since
# many tests wait for servers and ranks that they start.
.venv/bin/python -m pytest -q -n "$(($(nproc) + 1))" --maxprocesses 4 --dist loadfile "$@"

if (($# == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    files=$(grep -l 'pytest.mark.ranks' tests/test_*.py)
    for ranks in 1 2 4; do
        echo "$ranks ranks" >&2
        # Simulated devices, which are slow, need ranks to speak to, and to train no more than two.
        case $ranks in
            1) those='not sim' ;;
            2) those='' ;;
            *) those='not (sim and training)' ;;
        esac
        # shellcheck disable=SC2086
        .venv/bin/mpirun -n "$ranks" --oversubscribe \
            .venv/bin/python -m pytest -q -p no:cacheprovider -m ranks -k "$those" $files
    done
fi
