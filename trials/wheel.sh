#!/usr/bin/env bash
# The wheel as a stranger gets it: built here, installed alone into a new environment, away from the checkout.
set -euo pipefail
python=${1:-python3}
source=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/venv"
pip=("$place/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" wheel --no-deps -w "$place/dist" "$source"
"${pip[@]}" install -c "$source/constraints.txt" "$place"/dist/turnwise_rl-*.whl
cd "$place"
turnwise=$place/venv/bin/turnwise
"$turnwise" --version
"$turnwise" train rloo --env guess --difficulty 1 --steps 2 --cold-steps 3 --eval-tasks 8 --name first --json > summary.json
"$turnwise" status runs/first
"$turnwise" view runs/first --export page.html
"$place/venv/bin/python" -c 'import json, turnwise; assert json.load(open("summary.json"))["success_after"]; assert "train" in dir(turnwise)'
echo "wheel: installed alone, it trains and its view opens"
