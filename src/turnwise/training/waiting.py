"""Who waits for whom in a run, and who holds it up: words for ``turnwise status`` and for the log. Reads facts only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.observe.activity import RunningCall
from turnwise.training.run_facts import GeneratorFacts, GroupFacts, OutsideCalls, RankFacts, ServerFacts

BUSY = 0.3  # share of a processor from which on a process computes and does not merely wait


@dataclass(frozen=True)
class RunMoment:
    """One look at a run."""

    phase: str
    step: int
    env: str
    still: float  # seconds since anything moved
    busy: bool  # the process has computed since then
    line: str = ""  # where the main thread is
    generator: GeneratorFacts | None = None
    groups: GroupFacts | None = None
    calls: Mapping[str, OutsideCalls] = field(default_factory=dict)
    servers: Sequence[ServerFacts] = ()
    ranks: Sequence[RankFacts] = ()
    idle_ranks: frozenset[int] = frozenset()  # those that used no processor while nothing moved
    learning: RunningCall | None = None
    longest_update: float = 0.0
    recording: RunningCall | None = None
    publishing: RunningCall | None = None
    saving: RunningCall | None = None
    queued: int = 0  # writes of the ledger
    recorded: bool = True  # there is a ledger
    since: Mapping[str, float] = field(default_factory=dict)  # seconds since the last progress, by component

    def outside(self, kind: str) -> OutsideCalls:
        return self.calls.get(kind, OutsideCalls())


@dataclass(frozen=True)
class ComponentState:
    """What one component does. ``waits_for`` is empty while it works, and where it has nothing to do."""

    name: str
    state: str  # working, waiting, idle, lost
    doing: str
    waits_for: str = ""
    since_progress: float | None = None  # seconds


@dataclass(frozen=True)
class Suspect:
    """A component that has held work for longer than the limit without any progress."""

    component: str
    text: str
    computing: bool = False  # it is slow, but it computes


# ------------------------------------------------------------ who waits for whom


def component_states(facts: RunMoment) -> list[ComponentState]:
    """Every component of the run, in the order of the data flow."""
    states = [_environments(facts), *_others_outside(facts), _generator(facts)]
    states += [_server(server, facts) for server in facts.servers]
    states += [_learner(facts), *(_rank(rank, facts) for rank in facts.ranks), _publication(facts), _ledger(facts)]
    return [state for state in states if state is not None]


def _environments(facts: RunMoment) -> ComponentState:
    calls, since = facts.outside("environment"), facts.since.get("environments")
    if calls.count:
        return ComponentState("environments", "working", f"{_episodes(calls.count)}, {_longest(calls)}", "", since)
    g = facts.generator
    if g is not None and g.dialogues:
        return ComponentState("environments", "waiting", f"{_dialogues(g.dialogues)} open", "generator", since)
    if facts.learning is not None or facts.publishing is not None:
        waits_for = "learner" if facts.learning is not None else "publication"
        return ComponentState("environments", "waiting", "no episode", waits_for, since)
    return ComponentState("environments", "idle", "no episode", "", since)


def _others_outside(facts: RunMoment) -> Iterator[ComponentState]:
    for kind, name in (("agent", "agents"), ("reward", "reward functions")):
        if (calls := facts.outside(kind)).count:
            yield ComponentState(
                name, "working", f"{calls.count} {'call' if calls.count == 1 else 'calls'}, {_longest(calls)}"
            )


def _generator(facts: RunMoment) -> ComponentState | None:
    g, since = facts.generator, facts.since.get("generator")
    if g is None:
        return None
    requests = f"{g.running} requests running, {g.waiting} waiting, {_dialogues(g.dialogues)} open"
    if facts.publishing is not None:
        return ComponentState("generator", "waiting", f"takes new weights; {requests}", "publication", since)
    if g.running:
        return ComponentState("generator", "working", f"samples: {requests}", "", since)
    if g.silent and facts.outside("environment").count:
        text = f"{_dialogues(g.silent)} in an environment, {g.waiting} requests waiting"
        return ComponentState("generator", "waiting", text, "environments", since)
    if g.silent and facts.outside("agent").count:
        return ComponentState("generator", "waiting", f"{_dialogues(g.silent)} of agents", "agents", since)
    if facts.learning is not None:
        return ComponentState("generator", "waiting", "no request", "learner", since)
    return ComponentState("generator", "idle", requests, "", since)


def _server(server: ServerFacts, facts: RunMoment) -> ComponentState:
    name, since = f"server {server.url}", facts.since.get(server.url)
    if server.lost:
        return ComponentState(name, "lost", server.lost, "", since)
    text = f"{_dialogues(server.dialogues)}, owes {_replies(server.owed)}, weights of version {server.version}"
    return ComponentState(name, "working" if server.owed else "idle", text, "", since)


def _learner(facts: RunMoment) -> ComponentState | None:
    since = facts.since.get("learner")
    if facts.learning is not None:
        what = "its update" if facts.learning.name == "update" else "measuring signals"
        return ComponentState("learner", "working", f"in {what} for {facts.learning.seconds:.0f} s", "", since)
    for call, part in ((facts.publishing, "publication"), (facts.saving or facts.recording, "ledger")):
        if call is not None:
            return ComponentState("learner", "waiting", f"for {call.seconds:.0f} s", part, since)
    if facts.phase == "rollout" and facts.groups is not None:
        groups = f"{facts.groups.ready} groups ready, {facts.groups.running} in rollout"
        return ComponentState("learner", "waiting", groups, "rollouts", since)
    return ComponentState("learner", "working" if facts.phase == "cold start" else "idle", facts.phase, "", since)


def _rank(rank: RankFacts, facts: RunMoment) -> ComponentState:
    name, text = f"rank {rank.rank}", f"{_process(rank)}, {rank.cpu_seconds:.0f} s of processor time"
    if rank.state in ("stopped", "ended"):
        return ComponentState(name, "lost", f"{_process(rank)} is {rank.state}")
    text = _process(rank) if rank.machine else text
    if facts.learning is None:
        return ComponentState(name, "waiting", text, "rank 0")
    return ComponentState(name, "working", text)


def _publication(facts: RunMoment) -> ComponentState | None:
    since = facts.since.get("publication")
    if facts.generator is None:
        return None
    if facts.publishing is None:
        return ComponentState("publication", "idle", f"version {facts.generator.version} is published", "", since)
    return ComponentState("publication", "working", f"for {facts.publishing.seconds:.0f} s", "", since)


def _ledger(facts: RunMoment) -> ComponentState | None:
    if not facts.recorded:
        return None
    since, queued = facts.since.get("ledger"), f"{facts.queued} writes queued"
    if facts.saving is not None:
        return ComponentState("ledger", "working", f"checkpoint for {facts.saving.seconds:.0f} s", "", since)
    if facts.recording is not None:
        return ComponentState("ledger", "working", f"writes for {facts.recording.seconds:.0f} s; {queued}", "", since)
    return ComponentState("ledger", "idle", queued, "", since)


# ------------------------------------------------------------------ who is stuck


def suspects(facts: RunMoment, limit: float) -> list[Suspect]:
    """Components that hold work and have not progressed for ``limit`` seconds, the cause before those that wait for it."""
    return [
        s for s in (*_stuck_writes(facts, limit), *_stuck_learner(facts, limit), *_stuck_rollouts(facts, limit)) if s
    ]


def _stuck_writes(facts: RunMoment, limit: float) -> Iterator[Suspect]:
    if facts.saving is not None and facts.saving.seconds >= limit:
        text = f"the checkpoint of step {facts.step} has been written for {facts.saving.seconds:.0f} s"
        yield Suspect("checkpoint", text, facts.busy)
    elif facts.recording is not None and facts.recording.seconds >= limit:
        text = f"the ledger has been writing for {facts.recording.seconds:.0f} s ({facts.queued} writes queued)"
        yield Suspect("ledger", text, facts.busy)


def _stuck_learner(facts: RunMoment, limit: float) -> Iterator[Suspect]:
    call = facts.learning
    if call is None or call.seconds < limit:
        return
    what = "its update" if call.name == "update" else "measuring signals"
    for rank in facts.ranks:
        if rank.state in ("stopped", "ended"):
            text = f"the learner has been in {what} for {call.seconds:.0f} s: rank {rank.rank} ({_process(rank)})"
            yield Suspect("learner", f"{text} is {rank.state}")
            return
    before = f", the longest before took {facts.longest_update:.0f} s" if facts.longest_update else ""
    elsewhere = [rank for rank in facts.ranks if rank.machine]
    if facts.busy or len(facts.idle_ranks) < len(facts.ranks) - len(elsewhere):
        ranks = f" on {len(facts.ranks) + 1} ranks" if facts.ranks else ""
        text = f"still learning{ranks}: {what.removeprefix('its ')} of step {facts.step + 1} has taken {call.seconds:.0f} s"
        yield Suspect("learner", f"{text}{before}", computing=True)
        return
    idle = ", ".join(str(n) for n in sorted(facts.idle_ranks))
    which = f"; ranks {idle} compute nothing either" if idle else ""
    if elsewhere:
        which += f"; look at rank{'s' * (len(elsewhere) > 1)} " + ", ".join(
            f"{r.rank} ({_process(r)})" for r in elsewhere
        )
    text = f"the learner has been in {what} for {call.seconds:.0f} s and computes nothing{which}{before}"
    yield Suspect("learner", text)


def _stuck_rollouts(facts: RunMoment, limit: float) -> Iterator[Suspect]:
    calls = facts.outside("environment")
    if calls.seconds >= limit:
        yield Suspect("environments", f"environment {facts.env}, {_episodes(calls.count)}, the {_longest(calls)}")
    if (scores := facts.outside("reward")).seconds >= limit:
        yield Suspect("rewards", f"a reward function, the {_longest(scores)}")
    for server in facts.servers:
        if server.owed and not server.lost and facts.since.get(server.url, 0.0) >= limit:
            seconds = facts.since[server.url]
            text = (
                f"generator server {server.url} has not answered for {seconds:.0f} s (it owes {_replies(server.owed)})"
            )
            yield Suspect(server.url, text)
    if facts.publishing is not None and facts.publishing.seconds >= limit:
        yield Suspect(
            "publication", f"new weights have been published for {facts.publishing.seconds:.0f} s", facts.busy
        )
    g = facts.generator
    if g is not None and g.running and not facts.servers and facts.since.get("generator", 0.0) >= limit:
        seconds = facts.since["generator"]
        if calls.count == 0:
            text = f"the generator has sampled no token for {seconds:.0f} s, with {g.running} requests in its batch"
            yield Suspect("generator", f"still sampling: {text}" if facts.busy else text, facts.busy)


def culprit(facts: RunMoment, limit: float) -> Suspect:
    """Why nothing moves."""
    if found := suspects(facts, limit):
        return found[0]
    g, agents = facts.generator, facts.outside("agent")
    if agents.count and g is not None and g.silent:
        text = f"{agents.count} agents neither ask the policy nor end, the {_longest(agents)}"
        return Suspect("agents", text)
    calls = facts.outside("environment")
    if calls.count:
        return Suspect("environments", f"environment {facts.env}, {_episodes(calls.count)}, the {_longest(calls)}")
    if g is not None and g.silent and not g.running:
        text = f"{_dialogues(g.silent)} open, and the agents that play them neither ask the policy nor end"
        return Suspect("agents", text)
    if facts.groups is not None and facts.groups.running and g is not None and not g.dialogues:
        return Suspect("rewards", f"{facts.groups.running} groups wait for their scores (reward functions or judge)")
    at = f"; the main thread is at {facts.line}" if facts.line else "; the main thread only waits"
    return Suspect("run", f"in the phase {facts.phase}{at}", facts.busy)


# ------------------------------------------------------------------------- words


def _episodes(count: int) -> str:
    return "1 episode" if count == 1 else f"{count} episodes"


def _process(rank: RankFacts) -> str:
    return f"process {rank.process}" + (f" on {rank.machine}" if rank.machine else "")


def _dialogues(count: int) -> str:
    return "1 dialogue" if count == 1 else f"{count} dialogues"


def _replies(count: int) -> str:
    return "1 reply" if count == 1 else f"{count} replies"


def _longest(calls: OutsideCalls) -> str:
    where = f" (at {calls.line})" if calls.line else ""
    return f"longest in {calls.name}() for {calls.seconds:.0f} s{where}"
