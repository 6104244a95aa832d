"""A LangGraph agent, trained as it is: a graph of a model node and a tool node, with LangChain's stock OpenAI chat model.

pip install 'turnwise-rl[agents]' langgraph langchain-openai
turnwise train --data tasks.jsonl --agent examples/agents/langgraph_react.py:solve
"""

import notes
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


async def solve(task, client):
    @tool
    def search(query: str) -> str:
        """find notes"""
        return notes.search(task.row, query)

    model = ChatOpenAI(model="policy", base_url=client.base_url, api_key=client.api_key).bind_tools([search])

    async def think(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    limit = {"recursion_limit": 2 * notes.MOST_CALLS}
    try:
        result = await graph.compile().ainvoke({"messages": [("user", task.prompt)]}, limit)
    except GraphRecursionError:
        return False
    return notes.is_right(task.row, result["messages"][-1].text)
