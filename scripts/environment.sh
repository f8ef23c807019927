# Sourced by the other shell scripts: makes the virtual environment, once for each state of the
# requirement files, and sets $PYTHON. VENV=folder uses another folder than .venv.

# use_environment FILE...   installs the given requirement files under constraints.txt
use_environment() {
    local venv="${VENV:-.venv}" candidate base="" stamp file flags=()
    PYTHON="$venv/bin/python"
    # pip as well: an environment whose making was interrupted has a python without it.
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
                base="$candidate"
                break
            fi
        done
        if [ -z "$base" ]; then
            echo "no Python 3.10 or newer found; expected python3, python3.10 ... on the PATH" >&2
            exit 2
        fi
        echo "making a virtual environment in $venv with $("$base" --version)"
        if ! "$base" -m venv "$venv"; then
            echo "venv failed; on Debian and Ubuntu: apt install python3-venv, then again" >&2
            exit 2
        fi
        rm -f "$venv/installed"
    fi
    # The stamp names what is installed; it is written last, so a half-made environment is redone.
    stamp="$("$PYTHON" --version) $(cat constraints.txt requirements.txt "$@" | cksum) $*"
    if ! grep -qxF "$stamp" "$venv/installed" 2>/dev/null; then
        echo "installing $* (the first time this downloads torch: a few minutes or more)"
        for file in "$@"; do flags+=(-r "$file"); done
        "$PYTHON" -m pip install --quiet --progress-bar on "${flags[@]}" -c constraints.txt
        echo "$stamp" >>"$venv/installed"
    fi
}
