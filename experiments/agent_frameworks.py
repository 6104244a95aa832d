"""Agents of other packages, with their code unchanged, learn `calculator` on the tiny model: a run each, over HTTP.

    python experiments/agent_frameworks.py [openai_client anthropic_client ...] --out runs

Each run appends a row to ``experiments/results/agents.jsonl``: held-out success before and after, and the counts of its exactness
certificate. ``--table`` prints the rows as the table of docs/agents.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from turnwise.training import api

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "agents.jsonl"
AGENTS = {  # the file in examples/agents, and the protocol it speaks
    "openai_client": "chat completions",
    "anthropic_client": "Anthropic messages",
    "openai_agents_sdk": "Responses",
    "langgraph_react": "chat completions",
    "smolagents_tools": "chat completions",
}
MORE: dict[str, dict[str, Any]] = {"smolagents_tools": {"context": 700, "max_tokens": 64, "steps": 60}}
SETTINGS: dict[str, Any] = {
    "env": "calculator",
    "difficulty": (1,),
    "steps": 34,
    "eval_tasks": 200,
    "trackers": (),
    "seed": 0,
}


def row(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a finished run."""
    run, found = Path(summary["run"]), summary["exactness"]
    evaluations = {}
    for when in ("before", "after"):
        stored = json.loads((run / f"evaluation_{when}.json").read_text())
        part = stored.get("content", stored)["summary"]
        evaluations[when] = {"success": part["success"], "interval": [round(x, 3) for x in part["interval"]]}
    counts = {"later_calls": found["calls"] - found["first_calls"], "unfinished": found["unfinished"]["count"]}
    kept = {key: found[key] for key in ("calls", "episodes", "continued", "tokens_sampled", "tokens_trained")}
    about = {"agent": name, "protocol": AGENTS[name], "env": "calculator", "difficulty": [1], "seed": SETTINGS["seed"]}
    return {**about, "steps": summary["steps"], "tasks": SETTINGS["eval_tasks"], **evaluations, **counts, **kept}


def table() -> str:
    """The rows in Markdown."""
    heads = ("agent", "protocol", "steps", "before", "after", "later calls that continued", "tokens trained")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for text in RESULTS.read_text(encoding="utf-8").splitlines():
        r = json.loads(text)
        shown = [
            f"{r[w]['success']:.1%} [{r[w]['interval'][0]:.0%}, {r[w]['interval'][1]:.0%}]" for w in ("before", "after")
        ]
        calls = f"{r['continued']:,} of {r['later_calls']:,}"
        tokens = f"{r['tokens_trained']:,} of {r['tokens_sampled']:,}"
        lines.append(f"| `{r['agent']}` | {r['protocol']} | {r['steps']} | {' | '.join(shown)} | {calls} | {tokens} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agents", nargs="*", choices=[[], *AGENTS], help="which of them; none: all")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--table", action="store_true", help="print the rows and run nothing")
    chosen = parser.parse_args()
    for name in () if chosen.table else chosen.agents or AGENTS:
        agent = str(ROOT.parent / "examples" / "agents" / f"{name}.py") + ":solve"
        summary = api.train(
            **{**SETTINGS, **MORE.get(name, {})}, agent=agent, out=chosen.out, name=f"agent-{name}", quiet=True
        )
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row(name, summary)) + "\n")
    print(table())


if __name__ == "__main__":
    main()
