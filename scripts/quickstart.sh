#!/usr/bin/env bash
# From a fresh clone to a trained model: installs cupyrec and Open MPI into .venv, fetches
# MovieLens-100k, trains DLRM on two ranks that exchange rows and gradients in int8, saves a
# checkpoint and report.html in runs/quickstart. The last line of stdout is
# {"test_auc": ..., "test_logloss": ..., "samples_per_second": ..., "seconds": ...}.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
install plot,mpi,serve

wheel=data/recbole-1.2.1-py3-none-any.whl
hash=9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407
movielens=data/movielens-100k
run=runs/quickstart

if ! sha256sum --check --status <<<"$hash  $wheel" 2>/dev/null; then
    echo "fetching MovieLens-100k, inside the recbole 1.2.1 wheel" >&2
    rm -f "$wheel"
    .venv/bin/python -m pip download --quiet --no-deps --dest data --require-hashes \
        --requirement <(echo "recbole==1.2.1 --hash=sha256:$hash") >&2
fi
rm -rf "$movielens"
.venv/bin/cupyrec data movielens-100k --wheel "$wheel" --out "$movielens" >&2

# Open MPI asks twice whether root is meant, and refuses more ranks than cores unless told to.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
.venv/bin/mpirun -n 2 --oversubscribe \
    .venv/bin/cupyrec train --model dlrm --config scripts/configs/movielens_100k.toml --codec int8 \
    --train "$movielens/train.tsv" --valid "$movielens/valid.tsv" --test "$movielens/test.tsv" \
    --schema "$movielens/schema.toml" --out "$run" --overwrite
.venv/bin/cupyrec report "$run" >&2
echo "checkpoint, metrics and report.html are in $run" >&2
