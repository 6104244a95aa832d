"""Random and adversarial text played against every built-in environment: no raise, ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trials.outcome import Outcome, Results

BLOCK = 500  # episodes of one row


def trial(episodes: int, results: Results, progress: Callable[[str], None]) -> Iterator[Outcome]:
    from turnwise import environments
    from turnwise.environments.checker.fuzz import fuzz_environment

    for env in environments.BUILT_IN:
        for first in range(0, episodes, BLOCK):
            name = f"{env}, from seed {first}"
            if results.done("fuzzed episodes", name):
                continue
            progress(f"fuzz: {name}")
            report = fuzz_environment(env, min(BLOCK, episodes - first), seed=first)
            fault = "; ".join(f"{where}: {what}" for where, what in report.faults.items())
            result = "raised" if fault else "no raise"
            yield Outcome("fuzzed episodes", name, result, fault, report.slowest, report.episodes, env)
