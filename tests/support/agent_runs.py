"""What the tests of runs with agents share: small settings, the plainest agent, and the weights of a run."""

from __future__ import annotations

from safetensors.torch import load_file

SMALL = {
    "method": "grpo", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 2, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 200, "eval_tasks": 4, "trackers": (), "threads": 1,
    "quiet": True,
}  # fmt: skip


async def solve(task, client):
    messages = list(task.messages)
    while not task.done:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=list(task.tools))
        messages += [reply.choices[0].message, *await task.step(reply.choices[0].message)]


def weights(summary):
    return load_file(f"{summary['run']}/model/model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)
