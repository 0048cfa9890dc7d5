#!/usr/bin/env bash
# Writes the API reference, which pdoc makes of the docstrings, to docs/api or the folder named:
# open index.html there. Needs the extra `docs`, in the Python that is found first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-docs/api}
rm -rf "$out"
exec python -m pdoc --docformat numpy --template-directory docs/pdoc --output-directory "$out" \
    cupyrec cupyrec.embedding.row_log cupyrec.hardware cupyrec.migrate cupyrec.parallel \
    cupyrec.plan cupyrec.serving cupyrec.sim
