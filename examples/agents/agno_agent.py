"""An agent of Agno, trained as it is, by chat completions.

pip install 'turnwise-rl[agents]' agno
turnwise train --data tasks.jsonl --agent examples/agents/agno_agent.py:solve
"""

import notes
from agno.agent import Agent
from agno.models.openai.like import OpenAILike


async def solve(task, client):
    def search(query: str) -> str:
        """find notes"""
        return notes.search(task.row, query)

    model = OpenAILike(id="policy", base_url=client.base_url, api_key=client.api_key)
    agent = Agent(model=model, tools=[search], tool_call_limit=notes.MOST_CALLS, telemetry=False)
    result = await agent.arun(task.prompt)
    return notes.is_right(task.row, str(result.content or ""))
