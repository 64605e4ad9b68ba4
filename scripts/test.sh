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
    check python scripts/fetch.py smollm2-135m gemma3-270m smollm2-135m-gguf gemma3-270m-gguf data
    # A process a core, of one thread each: tiny models gain nothing from a second. One alone where they share a GPU.
    cores="$(python -c 'import torch; print(0 if torch.accelerator.is_available() else "auto")')"
    set -- --numprocesses "$cores" --maxprocesses 8
    # On a machine without a GPU the kernels run under Triton's interpreter, in a run of their own.
    TRITON_INTERPRET=1 check python -m pytest "$@" tests/kernels tests/test_recompute.py
    check python -m pytest -m timed
    set -- "$@" --dist loadfile -m "not timed" # what a file's tests share is made once
fi
check python -m pytest "$@"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
