"""A loop around the stock client of the anthropic package, with streamed replies.

pip install 'turnwise-rl[agents]'
turnwise train --data tasks.jsonl --agent examples/agents/anthropic_client.py:solve
"""

from anthropic import AsyncAnthropic
from notes import MOST_CALLS, TOOL, is_right, run_tool

TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]


async def solve(task, client):
    stock = AsyncAnthropic(base_url=client.base_url.removesuffix("/v1"), api_key=client.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(MOST_CALLS):
        async with stock.messages.stream(model="policy", max_tokens=64, messages=messages, tools=TOOLS) as stream:
            reply = await stream.get_final_message()
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return is_right(task.row, "".join(block.text for block in reply.content if block.type == "text"))
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run_tool(task.row, call.name, call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return False
