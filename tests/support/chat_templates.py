# ruff: noqa: E501 - a template's lines are as long as they are
"""Chat templates of model families, written for these tests in the syntax of each family. None is a vendor's file.

``CALLS`` stands for a loop over the calls of a message. A template shows the features that matter here: how tools, calls,
replies and thinking are written, which roles are refused, and what ends a turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from turnwise.models.tiny import tiny_tokenizer
from turnwise.rollout.renderer import Renderer

SCHEMAS = "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"


def calls(text: str, before: str = "", after: str = "", between: str = "") -> str:
    """A loop over ``tool_calls`` that writes ``text`` for each call ``f``."""
    separator = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    loop = f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{text}{separator}{{% endfor %}}"
    return f"{{% if m.tool_calls %}}{before}{loop}{after}{{% endif %}}"


def chatml(assistant: str, tool: str = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n", extra: str = "") -> str:
    return (
        "{% if tools %}<|im_start|>system\nTools:\n" + SCHEMAS + extra + "<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}" + tool + "{% elif m.role == 'assistant' %}"
        "<|im_start|>assistant\n" + assistant + "<|im_end|>\n{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def turns(user: str, assistant: str, tool: str, opening: str, system: str = "", head: str = "") -> str:
    """A template of four message formats and the beginning of an assistant turn."""
    return (
        head
        + "{% for m in messages %}{% if m.role == 'system' %}"
        + (system or "{{ raise_exception('no system') }}")
        + ""
        "{% elif m.role == 'user' %}" + user + "{% elif m.role == 'assistant' %}" + opening + assistant + ""
        "{% elif m.role == 'tool' %}" + (tool or "{{ raise_exception('no tool') }}") + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + opening + "{% endif %}"
    )


ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
PARAMETERS = "{% for k, v in f.arguments.items() %}<parameter={{ k }}>%s{{ v if v is string else v | tojson }}%s</parameter>\n{% endfor %}"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
FORGETFUL = "{{ m.content.split('</think>')[-1].lstrip('\n') if not loop.last else m.content }}"
PYTHON = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"
DSML = (
    '<｜DSML｜invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<｜DSML｜parameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n"
    "{% endfor %}</｜DSML｜invoke>"
)
GEMMA_VALUE = "{{ q ~ v ~ q if v is string else v | tojson }}"
DEEPSEEK_USER, DEEPSEEK_END = "<｜User｜>{{ m.content }}", "<｜end▁of▁sentence｜>"
LLAMA = "<|start_header_id|>%s<|end_header_id|>\n\n"
EOT = "<|eot_id|>"


@dataclass(frozen=True)
class Family:
    """``restarts``: the template rewrites a turn with a call (all turns: "always"), which is recorded. ``parallel``: it
    has several calls a turn."""

    template: str
    syntax: str
    restarts: str = ""
    parallel: bool = True
    keeps_thinking: bool = True
    notes: tuple[str, ...] = ()


FAMILIES = {
    "qwen2.5": Family(chatml("{{ m.content }}" + calls("<tool_call>\n" + OBJECT + "\n</tool_call>", between="\n"),
                             "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"), "hermes"),
    "qwen3": Family(chatml(THOUGHT.replace("{{ m.content }}", FORGETFUL) + calls("<tool_call>\n" + OBJECT + "\n</tool_call>",
                    between="\n")), "hermes", keeps_thinking=False),
    "qwen3_coder": Family(chatml(THOUGHT + calls("<tool_call>\n<function={{ f.name }}>\n" + PARAMETERS.replace("%s", "\n", 1).replace("%s", "\n")
                                 + "</function>\n</tool_call>", between="\n")), "qwen3_coder"),
    "smollm2": Family("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "hermes"),
    "llama3": Family(turns(LLAMA % "user" + "{{ m.content }}" + EOT, "{{ m.content }}"
                           + calls('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', between="; ") + EOT,
                           LLAMA % "ipython" + "{{ m.content }}" + EOT, LLAMA % "assistant", LLAMA % "system" + "{{ m.content }}" + EOT,
                           "{{ bos_token }}" + SCHEMAS), "llama3"),
    "llama4": Family(turns("<|header_start|>user<|header_end|>\n\n{{ m.content }}<|eot|>",
                           "{{ m.content }}" + calls(PYTHON, "[", "]", ", ") + "<|eot|>",
                           "<|header_start|>ipython<|header_end|>\n\n{{ m.content }}<|eot|>",
                           "<|header_start|>assistant<|header_end|>\n\n",
                           "<|header_start|>system<|header_end|>\n\n{{ m.content }}<|eot|>", SCHEMAS), "pythonic"),
    "gemma2": Family(turns("<start_of_turn>user\n{{ m.content | trim }}<end_of_turn>\n", "{{ m.content | trim }}<end_of_turn>\n", "",
                           "<start_of_turn>model\n", head="{{ bos_token }}" + ALTERNATE), "hermes",
                     notes=("no role tool", "no role system", "alternating")),
    "gemma4": Family(turns("<|turn>user\n{{ m.content }}<turn|>\n", "{% set q = '<|\"|>' %}{{ m.content }}" + calls(
                     "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:" + GEMMA_VALUE
                     + "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>") + "<turn|>\n",
                     "<|turn>tool\n{{ m.content }}<turn|>\n", "<|turn>model\n", "<|turn>system\n{{ m.content }}<turn|>\n", SCHEMAS), "gemma4"),
    "function_gemma": Family(turns("<start_of_turn>user\n{{ m.content }}<end_of_turn>\n", "{% set q = '<escape>' %}{{ m.content }}" + calls(
                     "<start_function_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:" + GEMMA_VALUE
                     + "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<end_function_call>") + "<end_of_turn>\n",
                     "<start_of_turn>tool\n{{ m.content }}<end_of_turn>\n", "<start_of_turn>model\n",
                     "<start_of_turn>developer\n{{ m.content }}<end_of_turn>\n", SCHEMAS), "function_gemma"),
    "mistral_v1": Family(turns("[INST] {{ m.content }} [/INST]", "{{ m.content }}</s>", "", "", head="<s>" + ALTERNATE), "hermes",
                         notes=("no role tool", "no role system", "alternating")),
    "mistral_v3": Family(turns("[INST] {{ m.content }}[/INST]", "{% if not m.tool_calls %} {{ m.content }}{% endif %}" + calls(
                     '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}', "[TOOL_CALLS] [", "]", ", ")
                     + "</s>", "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
                     '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]', "",
                     head="<s>{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"), "mistral",
                     keeps_thinking=False, notes=("no role system",)),
    "mistral_v11": Family(turns("[INST]{{ m.content }}[/INST]", "{{ m.content }}" + calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
                     + "</s>", "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]", "", "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
                     "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"), "mistral_v11"),
    "magistral": Family(turns("[INST]{{ m.content }}[/INST]", "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
                     "{{ m.content }}" + calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}") + "</s>",
                     "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]", "", "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
                     "<s>" + SCHEMAS), "mistral_v11"),
    "deepseek_v3": Family(turns(DEEPSEEK_USER, "{{ m.content }}" + calls("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
                     "{{ f.arguments if f.arguments is string else f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
                     "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>") + DEEPSEEK_END,
                     "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>", "<｜Assistant｜>", "{{ m.content }}", SCHEMAS), "deepseek_v3"),
    "deepseek_r1": Family(turns(DEEPSEEK_USER, "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}" + DEEPSEEK_END,
                     "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>", "", "{{ m.content }}").replace(
                     "{% if add_generation_prompt %}", "{% if add_generation_prompt %}<｜Assistant｜><think>\n"), "hermes", restarts="always",
                     keeps_thinking=False),
    "deepseek_v31": Family(turns(DEEPSEEK_USER, "{{ m.content }}" + calls("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
                     "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>") + DEEPSEEK_END,
                     "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>", "<｜Assistant｜>", "{{ m.content }}", SCHEMAS), "deepseek_v31"),
    "deepseek_v32": Family(turns(DEEPSEEK_USER, "{{ m.content }}" + calls(DSML, "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>", "\n")
                     + DEEPSEEK_END, "<function_results>{{ m.content }}</function_results>", "<｜Assistant｜>", "{{ m.content }}", SCHEMAS), "deepseek_v32"),
    "glm": Family(turns("<|user|>\n{{ m.content }}", "\n{{ m.content }}" + calls("<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
                     "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
                     between="\n"), "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>", "<|assistant|>",
                     "<|system|>\n{{ m.content }}", "[gMASK]<sop>" + SCHEMAS), "glm", restarts="always"),
    "kimi": Family(turns("<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>", "{{ m.content }}" + calls(
                     "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
                     "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>") + "<|im_end|>",
                     "<|im_system|>tool<|im_middle|>## Return\n{{ m.content }}<|im_end|>", "<|im_assistant|>assistant<|im_middle|>",
                     "<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>", SCHEMAS), "kimi"),
    "gpt-oss": Family(turns("<|start|>user<|message|>{{ m.content }}<|end|>", "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
                     "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
                     " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% else %}"
                     "<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}",
                     "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>",
                     "<|start|>assistant", "<|start|>developer<|message|>{{ m.content }}<|end|>", SCHEMAS), "harmony", parallel=False),
    "minimax": Family(turns("]~b]user\n{{ m.content }}[e~[\n", "{{ m.content }}" + calls('<invoke name="{{ f.name }}">\n'
                     '{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n'
                     "{% endfor %}</invoke>", "<minimax:tool_call>\n", "\n</minimax:tool_call>", "\n") + "[e~[\n",
                     "]~b]tool\n<response>{{ m.content }}</response>[e~[\n", "]~b]ai\n", "]~!b[]~b]system\n{{ m.content }}[e~[\n", SCHEMAS), "minimax"),
    "granite3": Family(turns("<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>\n", "{{ m.content }}"
                     + calls(OBJECT, "<|tool_call|>[", "]", ", ") + "<|end_of_text|>\n",
                     "<|start_of_role|>tool_response<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
                     "<|start_of_role|>assistant<|end_of_role|>", "<|start_of_role|>system<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
                     SCHEMAS), "granite"),
    "phi4_mini": Family(turns("<|user|>{{ m.content }}<|end|>", "{{ m.content }}" + calls(OBJECT, "<|tool_call|>[", "]<|/tool_call|>", ", ") + "<|end|>",
                     "<|tool_response|>{{ m.content }}<|end|>", "<|assistant|>", "<|system|>{{ m.content }}<|end|>", SCHEMAS), "phi4"),
    "phi3": Family("{% for m in messages %}{% if m.role == 'system' %}<|system|>\n{{ m.content }}<|end|>\n{% elif m.role == 'user' %}<|user|>\n"
                   "{{ m.content }}<|end|>\n{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
                   "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", "hermes", notes=("no role tool",)),
    "command_r7b": Family(turns("<|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>", "{{ m.content }}" + calls(
                     '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
                     "<|START_ACTION|>[", "]<|END_ACTION|>", ", ") + "<|END_OF_TURN_TOKEN|>",
                     "<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>",
                     "<|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>", SCHEMAS), "command"),
    "hunyuan": Family(turns("<|user|>{{ m.content }}<|eos|>", "{{ m.content }}" + calls(OBJECT, "<tool_calls>[", "]</tool_calls>", ", ") + "<|eos|>",
                     "<|tool|>{{ m.content }}<|eos|>", "<|bot|>", "<|sys|>{{ m.content }}<|eos|>", SCHEMAS), "hunyuan"),
    "xlam": Family(chatml("{{ m.content }}" + calls(OBJECT, "[", "]", ", ")), "xlam"),
    "internlm": Family(chatml("{{ m.content }}" + calls('<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
                     "<|action_end|>\n")), "internlm"),
    "nemotron_nano": Family(turns("<SPECIAL_11>User\n{{ m.content }}\n<SPECIAL_12>", "{{ m.content }}" + calls(OBJECT, "<TOOLCALL>[", "]</TOOLCALL>", ", ")
                     + "<SPECIAL_12>", "<SPECIAL_11>Tool\n{{ m.content }}<SPECIAL_12>", "<SPECIAL_11>Assistant\n",
                     "<SPECIAL_10>System\n{{ m.content }}<SPECIAL_12>", SCHEMAS), "nemotron"),
    "lfm2": Family(chatml("{{ m.content }}" + calls(PYTHON, "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")), "lfm2"),
    "olmo3": Family(chatml("{{ m.content }}" + calls(PYTHON, "<function_calls>\n", "\n</function_calls>", "\n")), "olmo3"),
    "seed_oss": Family(turns("<seed:bos>user\n{{ m.content }}<seed:eos>", "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}"
                     "</seed:think>{% endif %}{{ m.content }}" + calls("<seed:tool_call>\n<function={{ f.name }}>\n" + PARAMETERS.replace("%s", "")
                     + "</function>\n</seed:tool_call>", between="\n") + "<seed:eos>", "<seed:bos>tool\n{{ m.content }}<seed:eos>",
                     "<seed:bos>assistant\n", "<seed:bos>system\n{{ m.content }}<seed:eos>", SCHEMAS), "seed"),
    "longcat": Family(turns("USER:{{ m.content }}", "{{ m.content }}" + calls("<longcat_tool_call>" + OBJECT + "</longcat_tool_call>") + "</longcat_s>",
                     "TOOL:{{ m.content }}", " ASSISTANT:", "SYSTEM:{{ m.content }}", SCHEMAS), "longcat"),
}  # fmt: skip

_SPECIAL = re.compile(
    r"<\|[\w/▁]+\|>|<｜[\w▁]+｜>|</?s>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[e~\[|\]~b\]|<seed:[be]os>|</longcat_s>|"
    r"<SPECIAL_\d+>|\[/?(?:INST|TOOL_CALLS|ARGS|TOOL_RESULTS)\]"
)


def tokenizer_of(template: str) -> Any:
    """A byte tokenizer with the special tokens that the template writes."""
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(_SPECIAL.findall(template)))})
    if "<|return|>" in template:  # here <|end|> ends a message, not the turn
        tokenizer.eos_token = "<|return|>"
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.chat_template = template
    return tokenizer


def renderer_of(template: str, **settings: Any) -> Renderer:
    return Renderer(tokenizer_of(template), **settings)
