"""The page of a trial: what was tried, what came out, every fault. Written from result rows; runs nothing."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence

from trials.outcome import Outcome, faults
from trials.suites import browser

TITLES = {
    "kills": "Kills",
    "inputs": "Bad inputs",
    "fuzz": "Fuzzed episodes",
    "sandbox": "Attacks on the sandbox",
    "servers": "Attacks on servers",
    "starvation": "Starved runs",
    "tests": "Tests that attack",
}
TEXTS = {
    "kills": """
SIGKILL of a run, or of a process that works for it, then `turnwise resume` where the run ended; a killed server is started
again. Kind of run, who is killed and the moment are drawn from a grammar, with seed 33: before the loop, or inside one of its
calls (sampling, learning, publication, a checkpoint), after a share of the call's events of the interpreter, or of its seconds.
*Held in* names the stage that the run was in when the kill came, as the run itself noted it; *resumed* are earlier kills, at
times that nobody noted. Every step is logged once, the ledger balances, no group is lost or trained on twice, no token is older
than the staleness allows, and the weights at the end are those of a run that was never killed, bit for bit; with staleness they
depend on timing, and only the accounts are compared. No process is left, and no file that the other run does not leave: in the
run directory, the temporary folder, shared memory and the folder of server tokens. *Not met*: the run was over, or had no such
process, at the drawn moment; not counted. Kills of Ray's driver, learner, generator and environments are drawn where Ray is
installed; without a row below they were not reached (those of `python -m trials.cluster` are in `trials/results`). Nobody
tried: a power failure, several machines, a second kill while a run is resumed.""",
    "inputs": """
*Refused*: one message and exit status 2. *Ran*: the input is usable, or the episode that it spoils is dropped.
*Reported*: a check names the problem. A traceback, a hang and a silent acceptance are faults.""",
    "fuzz": """
Random and adversarial text as actions, over all difficulties and splits. No action may make an environment raise or
hang. *Slowest* is the slowest single call.""",
    "sandbox": """
*Held*: the attack reached nothing, the host's own things are as they were, and a neighbouring session still works. A
list, and grammars whose seed stands in each row: *supervisor* (trees that the host side walks, measures and removes,
swapped meanwhile), *space* (ways to make, fill and hide files), *signs* (marks that others could see), *protocol*
(what comes in place of a reply), *exhaustion* and *hang*. The last rung, `limits`, promises only the last three; see
[Security](security.md).""",
    "servers": """
Requests to a running `turnwise serve` and endpoint: who asks (a process without the token or with another, pages of other
sites, ports and files, a page under a rebound name, a frame, a form; all pages *with* the stolen token; and a client that
sends nonsense), for what, with which body (nothing, nonsense, no JSON, a megabyte, brackets) and at which moment (alone, in
pieces, twice at once, behind half a request of somebody else, beside requests of the owner) are drawn from a grammar, with
seed 33. *Held*: a stranger got an error, nobody a status of 500 or the token, the server is as it was, and its owner is
answered afterwards. Nobody tried: a flood from many addresses, the servers of `turnwise view` and of Ray, HTTP/2.""",
    "starvation": """
Whole small runs (calculator with the Python tool, `--isolate-env`, `--env-processes 2`, `--reward code`, `--generator
local`, `--ranks 2`, a served judge) that the machine starves of open files, memory, size of files, processes, disk,
shared memory or processor time, or one of whose processes is killed or stopped. Who, what, the moment and how long
are drawn from a grammar, with seed 33. *Stopped*: a message and an exit status other than 0. *Ran*: exit status 0.
Either way every group that was trained on is whole; a run with status 0 that gave no group up has the weights of one
that was not starved, bit for bit. A biased batch, a hang, a traceback and an end without a message are faults. *Not
met*: the run was over, or had no such process, at the drawn moment; not counted. The first 17 rows were tried on
ARM64 and without the last two kinds of run, all others on the machine named above.""",
    "tests": """
Tests that attack: wrong answers to every built-in reward and `turnwise probe-reward` on them; requests of strangers
and of a page in a real browser to our servers, rebinding of names among them; code planted in every field of a run
that is read; gzipped and Parquet files that expand. One row for each function; *skipped* names what was missing.""",
}
# not drawn from anything: what we know that the trial leaves out
UNTRIED = """
## What nobody tried

- Bugs of the kernel, side channels of time and cache, signs between sessions through load and free memory.
- Another user of the same machine who connects to the ports of `--ranks` on the loopback interface, or to those of
  torchrun or Ray on a network: torch's connections have no password.
- Gzipped files of a million short bad lines on a busy machine: they are refused, but only after all were read (more
  than two minutes there).
- Starved Ray clusters, tools behind MCP, and more than one resource at a time.
- Parquet whose metadata lies about its own pages; compressed Arrow files of a data set that was saved by `datasets`.
- Browsers other than the one named above, its own protection of local addresses switched on, extensions.
- A judge that is persuaded: what the text of an answer does to a model that reads it.
- Spreadsheet formulas: nothing that we write is a CSV or TSV file (a test says so), so there was nothing to attack.
"""
INTRO = """# Trial

What `make trial` tried, and what came out. The script writes this page from the rows in `trials/results`; a trial that is
interrupted continues where it stopped.
"""


def page(results: dict[str, Sequence[Outcome]], wanted: dict[str, int], tried: Iterable[str]) -> str:
    """``wanted``: the least number of attempts of each part."""
    lines = [INTRO, f"Machine: {platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores."]
    lines += [f"Browser: {browser()}."] if "tests" in results else []
    lines += [f"Versions: {', '.join(sorted(tried))}.", "", *_overview(results, wanted)]
    for part, outcomes in results.items():
        lines += ["", f"## {TITLES[part]}", TEXTS[part], "", table(outcomes)]
    return "\n".join(lines) + f"\n{UNTRIED}"


def _overview(results: dict[str, Sequence[Outcome]], wanted: dict[str, int]) -> list[str]:
    lines = ["| | attempts | wanted | faults |", "|---|---:|---:|---:|"]
    for part, outcomes in results.items():
        tried = sum(o.count for o in outcomes)
        lines.append(f"| {TITLES[part]} | {tried:,} | {wanted[part]:,} | {len(faults(outcomes))} |")
    return lines


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table: attempts by kind and result, then every fault."""
    lines = ["| | attempts | results | faults | slowest |", "|---|---:|---|---:|---:|"]
    for group in dict.fromkeys(_group(o) for o in outcomes):
        rows = [o for o in outcomes if _group(o) == group]
        counts = Counter[str]()
        for o in rows:
            counts[o.result] += o.count
        results = ", ".join(f"{count:,} {result}" for result, count in counts.most_common())
        slowest = max(o.seconds for o in rows)
        lines.append(f"| {group} | {sum(counts.values()):,} | {results} | {len(faults(rows))} | {slowest:.1f} s |")
    found = [f"- **{o.part}, {o.name}**: {o.fault}" for o in faults(outcomes)]
    return "\n".join([*lines, "", *(["Faults:", "", *found] if found else ["No fault."])])


def _group(outcome: Outcome) -> str:
    return f"{outcome.part}: {outcome.kind}" if outcome.kind else outcome.part
