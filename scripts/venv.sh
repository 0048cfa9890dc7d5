# Sourced by quickstart.sh and test.sh: makes .venv at the top of the repository and installs
# cupyrec into it. Everything it says goes to stderr.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() {
    printf '%s\n' "error: $1" "${@:2}" >&2
    exit 1
}

new_enough() { # PYTHON
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_venv() {
    local candidate python="" version
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || die \
        "cupyrec needs Python 3.11 or newer, found $(python3 --version 2>/dev/null || echo none)." \
        "On Debian or Ubuntu: sudo apt-get install python3 python3-venv" \
        "On Ubuntu 22.04:     sudo apt-get install python3.11 python3.11-venv"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments: it lacks venv or ensurepip." \
            "On Debian or Ubuntu: sudo apt-get install python$version-venv"

    echo "making .venv with Python $version" >&2
    trap 'rm -rf .venv' EXIT # half a venv would confuse the next run
    "$python" -m venv --clear .venv >&2
    trap - EXIT
}

# Whether .venv has cupyrec from this clone, and not a copy of it, as `pip install .` makes.
is_editable() {
    compgen -G '.venv/lib/python3*/site-packages/__editable__.cupyrec-*.pth' >/dev/null
}

# Installs cupyrec, editable, with these extras; does nothing where that was done for the same
# metadata in the same place, and is still so.
install() { # EXTRAS [REQUIREMENT...]
    local stamp=.venv/.installed-$1 now
    now=$(cat setup.cfg pyproject.toml <(echo "$PWD" "${@:2}") | sha256sum)
    if ! new_enough .venv/bin/python || ! .venv/bin/python -m pip --version &>/dev/null; then
        make_venv
    fi
    if [[ ! -f $stamp || $(<"$stamp") != "$now" ]] || ! is_editable; then
        echo "installing cupyrec[$1] into .venv, which takes a minute the first time" >&2
        .venv/bin/python -m pip install --quiet --editable ".[$1]" "${@:2}" >&2 ||
            die "pip could not install cupyrec[$1]; its message stands above."
        echo "$now" >"$stamp"
    fi
}
