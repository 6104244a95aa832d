"""An agent of smolagents, trained as it is. Its loop is not ``async``, so it runs in a thread of its own. It writes its history
in its own words ("Calling tools: ..."), so every call begins a new sequence; the certificate of the run says so.

    pip install 'turnwise-rl[agents]' 'smolagents[openai]'
    turnwise train --env calculator --agent examples/agents/smolagents_tools.py:solve --context 600
"""

from smolagents import LogLevel, OpenAIModel, PromptTemplates, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

PROMPTS = PromptTemplates(**{**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use python, then final_answer."})


def solve(task, client):
    class Python(Tool):
        name, description, output_type = "python", "Run Python and see what it prints.", "string"
        inputs = {"code": {"type": "string", "description": "what to run"}}  # noqa: RUF012

        def forward(self, code: str) -> str:
            return task.wait(task.call_tool("python", code=code))

    model = OpenAIModel("policy", api_base=client.base_url, api_key=client.api_key, tool_choice="auto")
    agent = ToolCallingAgent([Python()], model, PROMPTS, max_steps=4, verbosity_level=LogLevel.OFF)
    result = agent.run(task.prompt, return_full_result=True)
    if result.state != "success":
        return {"reward": 0.0, "success": False}
    return task.wait(task.answer(str(result.output)))


def demonstrate(action):
    """What the tiny model imitates before RL: the environment's own demonstrations, with the answer as a call of final_answer."""
    if action.calls:
        return action.text
    return f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{action.text}"}}}}</tool_call>'


solve.demonstrate = demonstrate
