"""A loop around the stock client of the openai package, over HTTP.

pip install 'turnwise-rl[agents]'
turnwise train --env calculator --agent examples/agents/openai_client.py:solve
"""

from openai import AsyncOpenAI


async def solve(task, client):
    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages = list(task.messages)
    while not task.done:
        reply = await stock.chat.completions.create(model="policy", messages=messages, tools=list(task.tools))
        message = reply.choices[0].message.model_dump(exclude_none=True)
        messages += [message, *await task.step(message)]
