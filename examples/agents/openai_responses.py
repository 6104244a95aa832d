"""A loop around the stock client of the openai package, by the Responses protocol.

pip install 'turnwise-rl[agents]'
turnwise train --data tasks.jsonl --agent examples/agents/openai_responses.py:solve
"""

import json

from notes import MOST_CALLS, TOOL, is_right, run_tool
from openai import AsyncOpenAI


async def solve(task, client):
    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    new, previous = [{"role": "user", "content": task.prompt}], None
    for _ in range(MOST_CALLS):
        reply = await stock.responses.create(
            model="policy", input=new, previous_response_id=previous, tools=[{"type": "function", "strict": True, **TOOL}]
        )
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return is_right(task.row, reply.output_text)
        previous = reply.id
        new = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": run_tool(task.row, call.name, json.loads(call.arguments)),
            }
            for call in calls
        ]
    return False
