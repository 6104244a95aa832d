"""A loop around the stock client of the openai package, by chat completions.

pip install 'turnwise-rl[agents]'
turnwise train --data tasks.jsonl --agent examples/agents/openai_client.py:solve
"""

import json

from notes import MOST_CALLS, TOOL, is_right, run_tool
from openai import AsyncOpenAI


async def solve(task, client):
    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(MOST_CALLS):
        reply = await stock.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}]
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return is_right(task.row, message.content)
        messages.append(message)
        for call in message.tool_calls:
            output = run_tool(task.row, call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return False
