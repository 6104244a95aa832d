#!/usr/bin/env bash
# Makes the virtual environment, or says in words what is missing. Called by make; safe to repeat.
set -u
python=${1:-python3}
venv=${2:-.venv}
need_mb=3000

fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "no '$python' here. Install Python 3.11 or later, or say which: make PYTHON=/path/to/python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "'$python' is $("$python" -V 2>&1); Turnwise needs 3.11 or later. Say which: make PYTHON=python3.12"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "'$python' cannot make virtual environments (module venv or ensurepip is missing). On Debian and Ubuntu: apt-get install python3-venv"
free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
if [ ! -x "$venv/bin/torchrun" ] && [ "${free_mb:-$need_mb}" -lt "$need_mb" ]; then
  fail "only ${free_mb} MB free on this disk; the environment needs about ${need_mb} MB"
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || fail "could not make $venv"
echo "setup: installing into $venv (one to three minutes the first time)"
# constraints.txt pins torch, so that every machine trains with the version the figures were measured with
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' ||
  fail "pip could not install the packages above; is there a network, or a package mirror in pip's configuration?"
echo "setup: ready"
