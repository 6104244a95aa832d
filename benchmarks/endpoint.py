"""The cost of the endpoint for agents: host time that a call takes over HTTP beyond the same call in the process, and the memory
of many sessions at once. The policy answers at once, so that only the endpoint is measured.

    python benchmarks/endpoint.py --sessions 1000 --calls 4
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from agent_dialogues import LIMITS, SAMPLING, HashPolicy, renderer

from turnwise.core.records import Task
from turnwise.rollout.agent_client import read_request
from turnwise.rollout.agent_episode import AgentEpisode
from turnwise.serve.server import serving
from turnwise.serve.sessions import Sessions

ASKED = [{"role": "user", "content": "How many figs are left? " * 8}]


def new_episode(seed: int) -> AgentEpisode:
    rendering = renderer("plain")
    return AgentEpisode(f"g.{seed}", Task("x", seed), HashPolicy(rendering, seed), rendering, SAMPLING, LIMITS)  # type: ignore[arg-type]


def client(url: str, keys: list[str], calls: int) -> None:
    """In a process of its own: all sessions talk, in turns, over one kept-alive connection each."""
    host = url.removeprefix("http://")
    lines, dialogues = {key: http.client.HTTPConnection(host) for key in keys}, {key: list(ASKED) for key in keys}
    for _ in range(calls):
        for key in keys:  # every session has its request in flight before the first reply is read
            body = json.dumps({"model": "policy", "messages": dialogues[key]})
            lines[key].request("POST", f"/s/{key}/v1/chat/completions", body, {"Content-Type": "application/json"})
        for key in keys:
            message = json.load(lines[key].getresponse())["choices"][0]["message"]
            dialogues[key] += [message, {"role": "user", "content": "go on"}]


async def in_process(sessions: int, calls: int) -> float:
    """CPU seconds per call without a wire."""
    began = time.process_time()
    for seed in range(sessions):
        episode, dialogue = new_episode(seed), list(ASKED)
        for _ in range(calls):
            (reply,) = await episode.call(read_request({"messages": dialogue}))
            dialogue += [reply.message, {"role": "user", "content": "go on"}]
    return (time.process_time() - began) / (sessions * calls)


async def over_http(count: int, calls: int) -> dict[str, float]:
    """CPU seconds of the server per call, with all sessions open and asking at the same time."""
    sessions = Sessions()
    async with serving(sessions) as endpoint:
        keys = [sessions.open(new_episode(seed)).key for seed in range(count)]
        began, wall = time.process_time(), time.perf_counter()
        command = [sys.executable, __file__, "--client", endpoint.url, "--calls", str(calls)]
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
        await process.communicate(json.dumps(keys).encode())
        assert process.returncode == 0, "the client failed"
        used, passed = time.process_time() - began, time.perf_counter() - wall
    return {"cpu": used / (count * calls), "calls_per_second": count * calls / passed}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the endpoint for agents.")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=4, help="per session")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    n = parser.parse_args()
    if n.client:
        client(n.client, json.load(sys.stdin), n.calls)
        return 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a connection is a file here and one in the client
    asyncio.run(in_process(20, 2))
    direct = median(asyncio.run(in_process(n.sessions, n.calls)) for _ in range(n.repeats))
    served = [asyncio.run(over_http(n.sessions, n.calls)) for _ in range(n.repeats)]
    cpu, rate = median(s["cpu"] for s in served), median(s["calls_per_second"] for s in served)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"sessions at the same time    {n.sessions}, {n.calls} calls each")
    print(f"host time in the process     {direct * 1e3:.2f} ms per call (rendering, lineage, record)")
    print(f"host time over HTTP          {cpu * 1e3:.2f} ms per call")
    print(f"added by the endpoint        {(cpu - direct) * 1e3:.2f} ms per call")
    print(f"calls per second             {rate:.0f}")
    print(f"peak memory of the server    {memory:.0f} MB, torch included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
