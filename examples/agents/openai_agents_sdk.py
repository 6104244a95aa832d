"""An agent of the OpenAI Agents SDK, trained as it is: the SDK runs the loop and the tool, the policy answers by the Responses
protocol.

    pip install 'turnwise-rl[agents]' openai-agents
    turnwise train --env calculator --agent examples/agents/openai_agents_sdk.py:solve
"""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(task, client):
    @function_tool
    async def python(code: str) -> str:
        """Run Python and see what it prints."""
        return await task.call_tool("python", code=code)

    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=client.base_url, api_key=client.api_key))
    agent = Agent("calculator", model=model, tools=[python])
    try:
        result = await Runner.run(agent, task.prompt, max_turns=5)
    except AgentsException:  # an unknown tool, or too many turns: the agent's own failure
        return {"reward": 0.0, "success": False}
    return await task.answer(result.final_output)
