#!/usr/bin/env bash
# Run every check: style, types, layers, tests. Sets up .venv when needed. Arguments go to pytest:
#   bash scripts/test.sh                    all
#   bash scripts/test.sh tests/test_lora.py -k merge
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

failed=""
check() {
    echo "== $*"
    "$@" || failed="$failed [$*]"
}
check ruff check --output-format concise
check ruff format --check
check mypy
check lint-imports --no-logo --no-cache
if [ $# = 0 ]; then # the tests would fetch these too, but without a word
    check python scripts/fetch.py smollm2-135m gemma3-270m smollm2-135m-gguf gemma3-270m-gguf
    # On a machine without a GPU the kernels run under Triton's interpreter, in a run of their own.
    TRITON_INTERPRET=1 check python -m pytest tests/kernels tests/test_recompute.py
fi
check python -m pytest "$@"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
