"""The table of known tool-call syntaxes, and the one way to look one up."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.errors import SettingError, nearest
from turnwise.rollout.parsers.elements import ElementSyntax
from turnwise.rollout.parsers.gemma import GemmaCalls
from turnwise.rollout.parsers.harmony import Harmony
from turnwise.rollout.parsers.headed import HeadedJson
from turnwise.rollout.parsers.json_calls import BareJsonList, BareJsonObjects, DelimitedJson
from turnwise.rollout.parsers.pythonic import DelimitedPython, PythonList
from turnwise.rollout.parsers.syntax import ToolSyntax

AUTO = "auto"

HERMES = DelimitedJson(
    "hermes", "Qwen 2.5, Qwen 3, Hermes, SmolLM, EXAONE 4, Granite 4, our tiny model", ("<tool_call>",), ascii_only=True
)  # fmt: skip


def _list(name: str, families: str, opening: str, closing: str = "", **more: object) -> DelimitedJson:
    return DelimitedJson(name, families, (opening.strip(),), opening=opening, closing=closing, is_list=True, **more)  # type: ignore[arg-type]


_ELEMENTS = (
    ElementSyntax(
        "qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5", ("<function=", "<tool_call>"),
        section=("<tool_call>", "</tool_call>"), call=r"<function=(?P<name>[^>\n]+)>", call_close="</function>",
        argument=r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
        call_format="<function={name}>\n{arguments}</function>",
        argument_format="<parameter={key}>\n{value}\n</parameter>\n", own_lines=True,
    ),
    ElementSyntax(
        "seed", "Seed-OSS", ("<seed:tool_call>",),
        section=("<seed:tool_call>", "</seed:tool_call>"), call=r"<function=(?P<name>[^>\n]+)>",
        call_close="</function>", argument=r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
        call_format="<function={name}>\n{arguments}</function>",
        argument_format="<parameter={key}>{value}</parameter>\n",
    ),
    ElementSyntax(
        "glm", "GLM 4.5 and later", ("<arg_key>", "<tool_call>"),
        call=r"<tool_call>\s*(?P<name>[^\s<{][^<\n]*?)\s*?(?=\n|<)", call_close="</tool_call>",
        argument=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        call_format="<tool_call>{name}\n{arguments}</tool_call>",
        argument_format="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    ElementSyntax(
        "minimax", "MiniMax M2", ("<minimax:tool_call>",),
        section=("<minimax:tool_call>", "</minimax:tool_call>"), one_section=True,
        call=r'<invoke name="(?P<name>[^"\n]+)">', call_close="</invoke>",
        argument=r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>',
        call_format='<invoke name="{name}">\n{arguments}</invoke>',
        argument_format='<parameter name="{key}">{value}</parameter>\n',
    ),
    ElementSyntax(
        "deepseek_v32", "DeepSeek V3.2", ("<｜DSML｜function_calls>", "<｜DSML｜invoke"),
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), one_section=True,
        call=r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">', call_close="</｜DSML｜invoke>",
        argument=r'<｜DSML｜parameter name="(?P<key>[^"\n]+)" string="(?P<typed>true|false)">(?P<value>.*?)</｜DSML｜parameter>',
        call_format='<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        argument_format='<｜DSML｜parameter name="{key}" string="{typed}">{value}</｜DSML｜parameter>\n',
    ),
)  # fmt: skip

_HEADED = (
    HeadedJson(
        "deepseek_v3", "DeepSeek V3, R1 and its distilled models", ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>"),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>", header=r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\s*```json\s*",
        header_format="function<｜tool▁sep｜>{name}\n```json\n", arguments_close="\n```",
    ),
    HeadedJson(
        "deepseek_v31", "DeepSeek V3.1", ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>"),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>", header=r"(?P<name>[^\n<]+)<｜tool▁sep｜>\s*(?=\{)",
        header_format="{name}<｜tool▁sep｜>",
    ),
    HeadedJson(
        "kimi", "Kimi K2", ("<|tool_call_begin|>", "<|tool_calls_section_begin|>"),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), call_open="<|tool_call_begin|>",
        call_close="<|tool_call_end|>",
        header=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\n<]+):\d+)\s*<\|tool_call_argument_begin\|>",
        header_format="functions.{name}:{index}<|tool_call_argument_begin|>", id_format="functions.{name}:{index}",
    ),
    HeadedJson(
        "mistral_v11", "Mistral Small 3.2, Magistral, Devstral", ("[TOOL_CALLS]", "[ARGS]"), call_open="[TOOL_CALLS]",
        header=r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*\[ARGS\]", header_format="{name}[ARGS]",
        id_format="{index:09d}",
    ),
    HeadedJson(
        "llama_function", "Llama 3.1 with user-defined tools", ("<function=",), call_open="<function=",
        call_close="</function>", header=r"(?P<name>[^>\n]+)>", header_format="{name}>",
    ),
)  # fmt: skip

_JSON = (
    _list("mistral", "Mistral 7B v0.3, Nemo, Large 2407", "[TOOL_CALLS]", with_ids=True),
    _list("granite", "Granite 3", "<|tool_call|>"),
    _list("phi4", "Phi-4-mini", "<|tool_call|>", "<|/tool_call|>"),
    _list("functools", "Phi-4-mini with functools", "functools"),
    _list(
        "command", "Command R7B, Command A", "<|START_ACTION|>", "<|END_ACTION|>", name_key="tool_name",
        arguments_keys=("parameters",),
    ),
    _list(
        "command_r", "Command R", "Action:\n```json\n", "\n```", name_key="tool_name", arguments_keys=("parameters",)
    ),
    _list("hunyuan", "Hunyuan A13B, Jamba", "<tool_calls>", "</tool_calls>"),
    _list("nemotron", "Nemotron Nano 2, Llama-Nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    DelimitedJson(
        "internlm", "InternLM 2.5 and 3", ("<|action_start|>",), opening="<|action_start|><|plugin|>",
        closing="<|action_end|>", arguments_keys=("parameters", "arguments"),
    ),
    DelimitedJson(
        "longcat", "LongCat", ("<longcat_tool_call>",), opening="<longcat_tool_call>", closing="</longcat_tool_call>"
    ),
)  # fmt: skip

_PYTHON = (
    DelimitedPython("lfm2", "LFM2", ("<|tool_call_start|>",)),
    DelimitedPython(
        "olmo3", "OLMo 3", ("<function_calls>",), opening="<function_calls>", closing="</function_calls>", is_list=False
    ),
    DelimitedPython(
        "tool_code", "Gemma 2 and 3 as Google's guide prompts them", ("```tool_code",),
        reply="```tool_output\n{content}\n```", opening="```tool_code", closing="```", is_list=False,
    ),
)  # fmt: skip

_OTHERS = (
    GemmaCalls("gemma4", "Gemma 4", ("<|tool_call>",)),
    GemmaCalls(
        "function_gemma", "FunctionGemma", ("<start_function_call>",), opening="<start_function_call>",
        closing="<end_function_call>", quote="<escape>",
    ),
    Harmony("harmony", "gpt-oss", ("to=functions.",)),
)  # fmt: skip

_BARE = (
    BareJsonObjects("llama3", "Llama 3.1, 3.2, 3.3", ("<|python_tag|>",), bare=True),
    BareJsonList("xlam", "xLAM", (), bare=True),
    PythonList("pythonic", "Llama 4, ToolACE", ("<|python_start|>",), bare=True),
)

SYNTAXES: Mapping[str, ToolSyntax] = {
    syntax.name: syntax for syntax in (HERMES, *_ELEMENTS, *_HEADED, *_JSON, *_PYTHON, *_OTHERS, *_BARE)
}


def check_name(name: str) -> None:
    """Refuse a name that is neither ``auto`` nor in the table."""
    if name != AUTO and name not in SYNTAXES:
        raise SettingError(f"no tool-call syntax {name!r}; {nearest(name, (AUTO, *SYNTAXES))}")
