"""An agent of Pydantic AI, trained as it is, by chat completions.

pip install 'turnwise-rl[agents]' 'pydantic-ai-slim[openai]'
turnwise train --data tasks.jsonl --agent examples/agents/pydantic_ai_agent.py:solve
"""

import notes
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

reader = Agent(deps_type=dict)


@reader.tool
def search(context: RunContext[dict], query: str) -> str:
    """find notes"""
    return notes.search(context.deps, query)


async def solve(task, client):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=client.base_url, api_key=client.api_key))
    limits = UsageLimits(request_limit=notes.MOST_CALLS)
    try:
        result = await reader.run(task.prompt, model=model, deps=dict(task.row), usage_limits=limits)
    except AgentRunError:  # an unknown tool twice, no text, or too many calls: the agent's own failure
        return False
    return notes.is_right(task.row, result.output)
