#!/usr/bin/env bash
# The checks that every change must pass: environment, ruff, tests.
#
#     bash scripts/test.sh            the core, in minutes; arguments go to pytest, e.g. -k packing
#     bash scripts/test.sh --all      the slow ones too, with DeepSpeed, as continuous integration
set -euo pipefail
CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
requirements=(requirements-dev.txt)
selection=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
    shift
    requirements+=(requirements-deepspeed.txt)
    selection=()
fi
use_environment "${requirements[@]}"

"$PYTHON" -m ruff check .
# loadgroup: tests that share launches of several processes go to the same worker.
"$PYTHON" -m pytest -n 2 --dist loadgroup --durations=5 ${selection[@]+"${selection[@]}"} "$@"
