#!/usr/bin/env bash
# The checks that every change must pass: environment, ruff, the core tests.
#
#     bash scripts/test.sh            arguments go to pytest, e.g. -k packing
set -euo pipefail
CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment requirements-dev.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m pytest -n 2 --durations=5 "$@"
