# Sourced by tools/run and tools/test: makes .venv and installs what is missing.
#
# Nothing is installed that is there already; apt is asked only for what no
# other check finds. All messages go to standard error.

set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
venv=$root/.venv

say() { printf '%s\n' "$*" >&2; }
die() { say "${0##*/}: $*"; exit 1; }

# What the virtual environment was made from: same stamp, nothing to do.
stamp() { # KIND
    local python
    python=$("$venv/bin/python" -c 'import sys; print(sys.version, sys.prefix)' 2>/dev/null) || return 1
    printf '%s %s %s\n' "$1" "$python" "$(sha256sum < "$root/pyproject.toml")"
}

# Whether a Python is new enough, makes virtual environments and can compile pyfuse3.
python_is() { # PYTHON new|complete
    "$1" - "$2" >/dev/null 2>&1 <<'PYTHON'
import os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(1)
if sys.argv[1] == "complete":
    import ensurepip, venv
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        sys.exit(1)
PYTHON
}

# The first that is complete: the system's own, or one that is on the PATH.
find_python() {
    local python
    for python in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do
        if python_is "$python" complete; then
            command -v "$python"
            return
        fi
    done
    return 1
}

apt_install() { # PACKAGE…
    local sudo=() log
    (($# > 0)) || return 0
    command -v apt-get >/dev/null || die "please install what Debian calls: $*; then run this again"
    if ((EUID != 0)); then
        command -v sudo >/dev/null || die "please install as root: apt-get install $*; then run this again"
        sudo=(sudo)
    fi
    say "installing $* (apt)"
    log=$(mktemp)
    if ! { "${sudo[@]}" apt-get update &&
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
        >"$log" 2>&1 </dev/null; then
        die "apt-get could not install $*: $(grep -m1 '^E:' "$log" || tail -n1 "$log") (all of it: $log)"
    fi
    rm -f "$log"
}

# The packages that building and mounting need; prints those that are missing.
missing_packages() {
    command -v fusermount3 >/dev/null || echo fuse3
    command -v gcc >/dev/null || echo gcc libc6-dev
    command -v pkg-config >/dev/null || echo pkg-config
    { command -v pkg-config >/dev/null && pkg-config --exists fuse3; } || echo libfuse3-dev
}

ensure_python() {
    local version packages
    python=$(find_python) && return
    if python_is /usr/bin/python3 new; then
        packages=(python3-dev python3-venv)
    elif ! command -v apt-get >/dev/null; then
        die "Python 3.11 or newer is needed, with its headers (Python.h) and venv"
    else
        packages=(python3 python3-dev python3-venv) # right on Debian 12, Ubuntu 24.04 and later
        for version in 3.13 3.12 3.11; do
            if [[ -e /usr/bin/python3 ]] && apt-cache show "python$version-venv" >/dev/null 2>&1; then
                packages=("python$version" "python$version-dev" "python$version-venv")
                break
            fi
        done
    fi
    apt_install "${packages[@]}"
    python=$(find_python) || die "Python 3.11 or newer is needed, with its headers (Python.h) and venv"
}

pip_install() { # ARGUMENT…
    say "installing ${*: -1} (pip)"
    if ! "$venv/bin/python" -m pip --disable-pip-version-check install "$@" >"$venv/pip.log" 2>&1 </dev/null; then
        die "pip could not install ${*: -1}: $(pip_reason) (all of it: $venv/pip.log)"
    fi
}

# The line of pip's output that says most: the last error that is not about another.
pip_reason() {
    { grep -E '^ *(ERROR|error|fatal error|E): ' "$venv/pip.log" | grep -v subprocess || tail -n1 "$venv/pip.log"; } |
        tail -n1 | sed 's/^ *//'
}

# Make the virtual environment and install cachefs into it.
setup() { # KIND (run or dev)
    local file=$venv/.stamp-$1 packages python
    [[ -f $file && -x $venv/bin/cachefs && $(<"$file") == "$(stamp "$1")" ]] && return
    read -r -d '' -a packages < <(missing_packages && printf '\0')
    apt_install "${packages[@]}"
    # An environment that is there is kept: it may hold what took long to build.
    if ! python_is "$venv/bin/python" complete; then
        ensure_python
        say "making $venv with $python"
        rm -rf "$venv"
        "$python" -m venv "$venv" >&2 || die "$python could not make $venv"
    fi
    exec 9>"$venv/.lock"
    flock 9 # two at once would spoil each other's installation
    if [[ $1 == dev ]]; then
        pip_install -e "$root[dev]"
    else
        pip_install -e "$root"
    fi
    stamp "$1" >"$file"
    exec 9>&-
}
