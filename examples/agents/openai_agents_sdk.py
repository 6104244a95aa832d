"""An agent of the OpenAI Agents SDK, trained as it is: the SDK runs the loop and the tool, the policy answers by the Responses
protocol.

    pip install 'turnwise-rl[agents]' openai-agents
    turnwise train --data tasks.jsonl --agent examples/agents/openai_agents_sdk.py:solve
"""

import notes
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(task, client):
    @function_tool
    def search(query: str) -> str:
        """find notes"""
        return notes.search(task.row, query)

    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=client.base_url, api_key=client.api_key))
    agent = Agent("reader", model=model, tools=[search])
    try:
        result = await Runner.run(agent, task.prompt, max_turns=notes.MOST_CALLS)
    except AgentsException:  # an unknown tool, or too many turns: the agent's own failure
        return False
    return notes.is_right(task.row, result.final_output)
