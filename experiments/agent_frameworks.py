"""Agents of other packages, with their code unchanged, learn to search before they answer: a run each, over HTTP.

    python experiments/agent_frameworks.py [openai_client pydantic_ai_agent ...] --out runs

Every agent begins with the same tiny model, which has imitated demonstrations of `lookup` that often answer too early. The tasks
are rows of a file (``--rows FILE`` writes it and runs nothing); the tools and the verdict are the agents' own
(``examples/agents``). Each run appends a row to ``experiments/results/agents.jsonl``: held-out success before and after, seconds,
and the counts of its exactness certificate. ``--table`` prints the latest row of each agent as the table of docs/agents.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from turnwise.environments.builtin.lookup import WORLDS, fictional_world, sample_question
from turnwise.training import api

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "agents.jsonl"
AGENTS = {  # the file in examples/agents, and the protocol it speaks
    "openai_client": "chat completions",
    "openai_stream": "chat completions, streamed",
    "openai_responses": "Responses, `previous_response_id`",
    "anthropic_client": "Anthropic messages, streamed",
    "openai_agents_sdk": "Responses",
    "langgraph_react": "chat completions",
    "pydantic_ai_agent": "chat completions",
    "agno_agent": "chat completions",
}
ROWS, NOTES = 2000, 12
START: dict[str, Any] = {"env": "lookup", "difficulty": (1,), "cold_steps": 55, "steps": 1, "eval_tasks": 0}
SETTINGS: dict[str, Any] = {
    "context": 256,
    "max_tokens": 16,
    "groups": 8,
    "group_size": 8,
    "steps": 30,
    "eval_tasks": 200,
    "lr": 1e-3,
}


def few_certificates(path: Path) -> None:
    """A client made for each episode reads the machine's certificates, for 45 ms, which is most of a step here. The endpoint is
    on this machine and has none, so that one of them will do."""
    import certifi

    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----\n"
    text = Path(certifi.where()).read_text()
    path.write_text(text[text.index(begin) : text.index(end) + len(end)])
    os.environ["SSL_CERT_FILE"] = str(path)


def write_rows(path: Path) -> None:
    """Questions of one hop over invented worlds; each row has the note that answers it among others of its world."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            world = fictional_world("train", rng.randrange(WORLDS))
            question = sample_question(world, 1, rng)
            answering = world.notes[world.number[question.names[0], question.relations[0]]]
            notes = sorted({answering, *rng.sample(world.notes, NOTES)})
            prompt = f"{question.text} use search, then say answer: NAME"
            file.write(json.dumps({"prompt": prompt, "notes": notes, "answer": f"answer: {question.answer}"}) + "\n")


def row(name: str, summary: dict[str, Any], seed: int, seconds: float) -> dict[str, Any]:
    """What is stored of a finished run."""
    run, exact = Path(summary["run"]), summary["exactness"]
    evaluations = {}
    for when in ("before", "after"):
        stored = json.loads((run / f"evaluation_{when}.json").read_text())
        part = stored.get("content", stored)["summary"]
        evaluations[when] = {"success": part["success"], "interval": [round(x, 3) for x in part["interval"]]}
    counts = {"later_calls": exact["calls"] - exact["first_calls"], "unfinished": exact["unfinished"]["count"]}
    counts |= {key: exact[key] for key in ("calls", "episodes", "continued", "tokens_sampled", "tokens_trained")}
    about = {"agent": name, "protocol": AGENTS[name], "seed": seed, "steps": summary["steps"], "seconds": round(seconds)}
    return {**about, "tasks": SETTINGS["eval_tasks"], **evaluations, **counts}


def table() -> str:
    """The latest row of each agent in Markdown."""
    heads = ("agent", "protocol", "steps", "seconds", "before", "after", "calls an episode", "later calls that continued")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows = [json.loads(text) for text in RESULTS.read_text(encoding="utf-8").splitlines()]
    for r in {r["agent"]: r for r in rows if "env" not in r}.values():  # with one: older runs, in an environment
        shown = [
            f"{r[w]['success']:.1%} [{r[w]['interval'][0]:.0%}, {r[w]['interval'][1]:.0%}]" for w in ("before", "after")
        ]
        calls = f"{r['calls'] / r['episodes']:.2f} | {r['continued']:,} of {r['later_calls']:,}"
        lines.append(
            f"| `{r['agent']}` | {r['protocol']} | {r['steps']} | {r['seconds']} | {' | '.join(shown)} | {calls} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agents", nargs="*", choices=[[], *AGENTS], help="which of them; none: all")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--rows", metavar="FILE", help="write the tasks and run nothing")
    parser.add_argument("--table", action="store_true", help="print the rows and run nothing")
    chosen = parser.parse_args()
    if chosen.rows:
        write_rows(Path(chosen.rows))
        return
    out, data = Path(chosen.out), Path(chosen.out) / "tasks.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    few_certificates(out / "certificate.pem")
    common = {"out": chosen.out, "trackers": (), "quiet": True, "seed": chosen.seed}
    start = out / f"agents-start-{chosen.seed}"
    if not chosen.table and not start.exists():
        write_rows(data)
        api.train(**START, **common, name=start.name)
    for name in () if chosen.table else chosen.agents or AGENTS:
        agent = f"{ROOT.parent / 'examples' / 'agents' / name}.py:solve"
        began = time.time()
        summary = api.train(
            **{**SETTINGS, "steps": chosen.steps},
            **common,
            data=str(data),
            model=str(start / "initial"),
            agent=agent,
            name=f"agent-{name}-{chosen.seed}",
        )
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row(name, summary, chosen.seed, time.time() - began)) + "\n")
    print(table())


if __name__ == "__main__":
    main()
