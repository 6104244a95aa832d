"""The loop of `openai_client.py` with streamed replies.

pip install 'turnwise-rl[agents]'
turnwise train --data tasks.jsonl --agent examples/agents/openai_stream.py:solve
"""

import json

from notes import MOST_CALLS, TOOL, is_right, run_tool
from openai import AsyncOpenAI, LengthFinishReasonError


async def solve(task, client):
    try:
        return await answer(task, client)
    except LengthFinishReasonError:  # the client raises where a reply is cut: a mistake of the model, which it must learn from
        return False


async def answer(task, client):
    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(MOST_CALLS):
        async with stock.chat.completions.stream(
            model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}]
        ) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    pass  # where a program would show the text as it comes
            message = (await stream.get_final_completion()).choices[0].message
        if not message.tool_calls:
            return is_right(task.row, message.content or "")
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            output = run_tool(task.row, call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return False
