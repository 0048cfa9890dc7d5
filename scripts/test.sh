#!/usr/bin/env bash
# Every lint and every test, in a .venv made for them. Arguments go to pytest: scripts/test.sh -k adam
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
install plot,test,sim

.venv/bin/ruff check
.venv/bin/ruff format --check
find kernels -name '*.cu' -o -name '*.cuh' | xargs -r .venv/bin/clang-format --dry-run -Werror
# A file stays with one process: its fixtures are made once.
exec .venv/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile "$@"
