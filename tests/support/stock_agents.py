"""Agents around the stock clients of other packages: three calls an episode, a tool of their own, and their own verdict."""

from __future__ import annotations

import json

CALLS = 3
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"name": "double", "description": "Twice a number.", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
ANSWER = '<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>'
GO_ON = {"role": "user", "content": "go on"}


def double(arguments):
    n = (arguments if isinstance(arguments, dict) else json.loads(arguments)).get("n", 0)
    return str(2 * n if isinstance(n, int) else n)


def verdict(used, texts):
    """Half for the tool; the rest differs between the episodes of a group, so that there is something to learn from."""
    return {"tool": 0.5 * bool(used), "length": sum(map(len, texts)) % 5 / 10, "success": bool(used)}


def _answers(message):
    calls = message.get("tool_calls") or ()
    texts = [double(call["function"]["arguments"]) for call in calls]
    replies = [{"role": "tool", "tool_call_id": c["id"], "content": text} for c, text in zip(calls, texts)]
    return replies or [GO_ON], len(calls)


async def in_process(task, client):
    messages, used, texts = list(task.messages), 0, []
    for _ in range(CALLS):
        reply = await client.chat.completions.create(messages=messages, tools=[CHAT_TOOL], temperature=0.3)
        message = reply.choices[0].message.model_dump()
        replies, count = _answers(message)
        messages += [message, *replies]
        used, texts = used + count, [*texts, message.get("content") or ""]
    return verdict(used, texts)


async def openai_chat(task, client):
    from openai import AsyncOpenAI

    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages, used, texts = list(task.messages), 0, []
    for _ in range(CALLS):
        reply = await stock.chat.completions.create(
            model="policy", messages=messages, tools=[CHAT_TOOL], temperature=0.3, parallel_tool_calls=False
        )
        message = reply.choices[0].message.model_dump(exclude_none=True)
        replies, count = _answers(message)
        messages += [message, *replies]
        used, texts = used + count, [*texts, message.get("content") or ""]
    return verdict(used, texts)


async def openai_stream(task, client):
    from openai import AsyncOpenAI

    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages, used, texts = list(task.messages), 0, []
    for _ in range(CALLS):
        stream = await stock.chat.completions.create(
            model="policy", messages=messages, tools=[CHAT_TOOL], stream=True, reasoning_effort="low"
        )
        content, calls = "", []
        async for chunk in stream:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            calls += [call.model_dump(exclude_none=True, exclude={"index"}) for call in delta.tool_calls or ()]
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        replies, count = _answers(message)
        messages += [message, *replies]
        used, texts = used + count, [*texts, content]
    return verdict(used, texts)


async def openai_responses(task, client):
    from openai import AsyncOpenAI

    stock = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    items, used, texts = [{"role": "user", "content": task.prompt}], 0, []
    for _ in range(CALLS):
        tools = [{"type": "function", "strict": False, **FUNCTION}]
        reply = await stock.responses.create(model="policy", input=items, tools=tools, reasoning={"effort": "low"})
        calls = [item for item in reply.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": double(call.arguments)}
            for call in calls
        ]
        items += outputs or [GO_ON]
        used, texts = used + len(calls), [*texts, reply.output_text]
    return verdict(used, texts)


async def anthropic_messages(task, client):
    from anthropic import AsyncAnthropic

    stock = AsyncAnthropic(base_url=client.base_url, api_key=client.api_key)
    messages, used, texts = [{"role": "user", "content": task.prompt}], 0, []
    tools = [{"name": "double", "description": "Twice a number.", "input_schema": PARAMETERS}]
    for _ in range(CALLS):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        async with stock.messages.stream(
            model="policy", max_tokens=2048, messages=messages, tools=tools, thinking=thinking
        ) as stream:
            reply = await stream.get_final_message()
        calls = [block for block in reply.content if block.type == "tool_use"]
        text = "".join(block.text for block in reply.content if block.type == "text")
        sent = [block.model_dump(exclude_none=True) for block in reply.content]
        messages.append({"role": "assistant", "content": sent or "(nothing)"})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": double(dict(call.input))} for call in calls
        ]
        messages.append({"role": "user", "content": results or "go on"})
        used, texts = used + len(calls), [*texts, text]
    return verdict(used, texts)


async def silent(task, client):
    """Three calls, and not a word on what they were worth."""
    messages = list(task.messages)
    for _ in range(CALLS):
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, GO_ON]

    def inner():
        return 1

    inner()


async def typed(task, client):
    """Asks for what is refused, and lets its own exception through."""
    try:
        await client.chat.completions.create(messages=list(task.messages), logit_bias={"1": 2})
    except Exception as fault:
        raise RuntimeError("no typed answer") from fault
    return 1.0
