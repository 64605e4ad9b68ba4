# Sourced by demo.sh and test.sh, in the root of the repository: makes sure that .venv holds what pyproject.toml asks for,
# and puts it first on PATH. PYTHON=... chooses the interpreter. The stamp is written last, so a set-up that was
# interrupted, or was for another pyproject.toml or another folder, is gone through again.

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if is_recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "lorarun needs Python 3.10 or newer, and none of ${PYTHON:-python3 python3.13 ... python3.10} is:" \
        "install one, or say PYTHON=/path/to/python3" >&2
    return 1
}

set_up_venv() {
    # In one call with everything else, this settles which torch there will be: nothing that is installed beside it can
    # bring another one.
    local torch="torch==2.13.0" kind="no NVIDIA GPU: torch 2.13.0, for the CPU where pip offers such a build"
    if nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then
        torch="torch" kind="NVIDIA GPU found: the newest torch"
    fi
    if ! { is_recent .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
        local python
        python=$(find_python)
        echo "== making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
    fi
    local stamp
    stamp="$torch $(.venv/bin/python -c 'import hashlib, os, sys
print(sys.version.split()[0], hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest(), os.getcwd())')"
    if [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
        rm -f .venv/stamp
        echo "== installing what lorarun and its tests need into .venv ($kind); the first time takes some minutes"
        .venv/bin/python -m pip install --disable-pip-version-check "$torch" --editable ".[test,plot,gguf]"
        echo "$stamp" >.venv/stamp
        echo "== .venv is ready"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

set_up_venv
