"""A loop around the stock client of the anthropic package, over HTTP.

pip install 'turnwise-rl[agents]'
turnwise train --env calculator --agent examples/agents/anthropic_client.py:solve
"""

from anthropic import AsyncAnthropic


async def solve(task, client):
    stock = AsyncAnthropic(base_url=client.base_url.removesuffix("/v1"), api_key=client.api_key)
    functions = [tool["function"] for tool in task.tools]
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
    messages = [{"role": "user", "content": task.prompt}]
    while True:
        reply = await stock.messages.create(model="policy", max_tokens=64, messages=messages, tools=tools)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return await task.answer("".join(block.text for block in reply.content if block.type == "text"))
        results = []
        for call in calls:
            if task.done:
                return None
            output = await task.call_tool(call.name, **call.input)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": output})
        messages.append({"role": "user", "content": results})
