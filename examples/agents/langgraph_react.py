"""A LangGraph agent, trained as it is: a graph of a model node and a tool node, with LangChain's stock OpenAI chat model.

pip install 'turnwise-rl[agents]' langgraph langchain-openai
turnwise train --env calculator --agent examples/agents/langgraph_react.py:solve
"""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


async def solve(task, client):
    @tool
    async def python(code: str) -> str:
        """Run Python and see what it prints."""
        return await task.call_tool("python", code=code)

    model = ChatOpenAI(model="policy", base_url=client.base_url, api_key=client.api_key).bind_tools([python])

    async def think(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([python]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    try:
        result = await graph.compile().ainvoke({"messages": [("user", task.prompt)]}, {"recursion_limit": 10})
    except GraphRecursionError:
        return {"reward": 0.0, "success": False}
    return await task.answer(result["messages"][-1].text)
