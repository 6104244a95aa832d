"""Messages to token ids and back, token in, token out.

Sampled ids are never decoded and re-encoded. After each turn the chat template renders the whole dialogue; the text it adds
*behind* the text so far is encoded and appended. If the rendering does not start with that text, the template has rewritten
history, or old observations are dropped: the dialogue restarts from the new rendering and the turn is marked.

Knows nothing of environments, rewards or engines.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Message
from turnwise.errors import RenderError
from turnwise.rollout.chat_template import fast_template, message_loop
from turnwise.rollout.conversion import AS_JSON, AS_OBJECTS, Conversion, TurnWriter, as_field, find_conversion
from turnwise.rollout.parsers.choice import PROBE, PROBE_TOOLS, choose_syntax, read_turn
from turnwise.rollout.parsers.syntax import THINKING_TAGS, tool_names
from turnwise.rollout.parsers.table import AUTO, HERMES, SYNTAXES, check_name
from turnwise.rollout.token_codec import fast_decoder, fast_encoder

log = logging.getLogger(__name__)

CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CACHED_OPENINGS = 16  # first prompts: the groups of a step start concurrently
LONGEST_TAG = max(map(len, THINKING_TAGS)) + 8  # with some white space
PLACEHOLDER = "No information found."  # what a masked observation says


@dataclass
class Dialogue:
    """One conversation as the model reads it; ``ids`` always decode to ``text``."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    text: str
    ids: list[int] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)  # ids appended since the last sampled token
    restarted: bool = False
    cause: str = ""  # why it restarted
    history: int = 0  # how many of the latest observations are visible; 0: all
    masked_ids: list[int] = field(default_factory=list)  # new_ids with the observations masked; empty if not requested
    rendered: tuple[int, int] = (0, 0)  # messages, and characters of ``text``, that later messages cannot change
    context: list[Message] | None = None  # read in place of the messages before number ``begins``; None: those are read
    begins: int = 0

    def replace_context(self, context: Sequence[Message] | None) -> None:
        """From here on, read ``context`` in place of all messages so far; None changes nothing."""
        if context is not None:
            self.context, self.begins = list(context), len(self.messages)

    @property
    def visible(self) -> list[Message]:
        """The messages the model reads: the first one, which is the task, and the latest observations."""
        messages = self.messages if self.context is None else [*self.context, *self.messages[self.begins :]]
        if not self.history:
            return messages
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) < self.history:
            return messages
        turn = turns[-self.history]
        has_reply = turn + 1 < len(messages) and messages[turn + 1]["role"] == "tool"
        return [messages[0], *messages[turn if has_reply else turn + 1 :]]  # a tool's reply needs its call


class Renderer:
    """One tokenizer, its chat template, and the tool-call syntax of its model."""

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] = MappingProxyType({}),
        syntax: str = AUTO,
        describe_tools: bool = False,
    ) -> None:
        """``options``: variables of the template. ``syntax``: a name of the table, or ``auto``: what the template itself writes.
        ``describe_tools``: describe tools in the first message if the template does not show them."""
        check_name(syntax)
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise RenderError(
                "this model's tokenizer has no chat template; give one with --template chatml or --template FILE.jinja"
            )
        self.decode, self._encode = fast_decoder(tokenizer), fast_encoder(tokenizer)
        self._render = fast_template(tokenizer, dict(options))
        self._loop = message_loop(tokenizer, self._render, dict(options))
        self._convert: Conversion | None = None  # None: the template takes every dialogue as it is
        self._openings: deque[tuple[list[Message], Any, str, list[int]]] = deque(maxlen=CACHED_OPENINGS)
        self.call_turns = self._call_turns()
        source = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        self.syntax = (
            choose_syntax([turn for _, turn in self.call_turns], source) if syntax == AUTO else SYNTAXES[syntax]
        )
        # the token the template writes after an assistant turn, the one after a turn with a call, and the tokenizer's
        # own end of sequence; and again the one after a turn with a call
        marker = PROBE.arguments["word"]
        text = self._text([{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}], (), False)
        if marker not in text:
            raise RenderError("the chat template does not render assistant messages; dialogues could not be followed")
        ends = self._specials_behind(marker, text)[:1]
        markup = {*self.encode(self.syntax.example)} - {*self.encode(self.syntax.turn_end)}
        behind = [i for _, turn in self.call_turns for i in self._specials_behind(marker, turn)]
        call_ends = [i for i in behind if i not in markup][-1:]
        eos = self.tokenizer.eos_token_id
        stops = tuple(dict.fromkeys([*ends, *call_ends, *([] if eos is None else [int(eos)])]))
        if not stops:
            raise RenderError("neither the chat template nor the tokenizer has a token that ends a turn")
        self.stop_ids, self.call_end = stops, (call_ends or stops)[0]
        self.writer, self.conversion = self._find_conversion(describe_tools)
        self._convert = None if self.conversion.changes_nothing else self.conversion
        probe = self._text([{"role": "user", "content": "a 1\nb"}], (), True)
        if self.decode(self.encode(probe)) != probe:
            raise RenderError(
                "this tokenizer does not decode a text to itself; dialogues could not be followed exactly"
            )
        if not self._is_append_only():
            log.warning(
                "the chat template does not continue the text of a sampled turn: every turn re-reads its whole dialogue, in "
                "rollouts and in training. Does it close turns with %r, and is that a special token of the tokenizer?",
                self.decode(self.stop_ids[:1]),
            )

    # ----------------------------------------------------------- dialogue
    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), history: int = 0) -> Dialogue:
        dialogue = Dialogue(list(messages), tools, "", history=history)
        text, ids = self._opening(dialogue.visible, tools)  # a prompt may hold turns that others took
        dialogue.text, dialogue.ids, dialogue.new_ids = text, list(ids), list(ids)
        return dialogue

    def _opening(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Text and ids of a first prompt, rendered once for all trajectories of a group; the latest entry is searched first."""
        for cached, cached_tools, text, ids in tuple(self._openings):  # long prompts are rendered in threads
            if cached == messages and cached_tools == tools:
                return text, ids
        text = self._text(messages, tools, True)
        ids = self.encode(text)
        self._openings.appendleft((copy.deepcopy(messages), copy.deepcopy(tools), text, ids))
        return text, ids

    def append_sampled(self, dialogue: Dialogue, tokens: Sequence[int]) -> Action:
        """Append the sampled tokens exactly, and parse them as an action."""
        # whether a prompt ends with the tag that opens the model's thinking
        in_thought = dialogue.text[-LONGEST_TAG:].rstrip().endswith(tuple(THINKING_TAGS))
        dialogue.ids += tokens
        text = self.decode(tokens)
        dialogue.text += text
        said = self.decode(tokens[:-1]) if tokens and tokens[-1] in self.stop_ids else text
        action = read_turn(said, self.syntax, dialogue.tools, in_thought)
        dialogue.messages.append(action.message)
        dialogue.new_ids, dialogue.masked_ids, dialogue.restarted = [], [], False
        return action

    def append_observation(
        self,
        dialogue: Dialogue,
        messages: Sequence[Message],
        mask: bool = False,
        context: Sequence[Message] | None = None,
    ) -> None:
        """Append the environment's messages and the generation prompt; ``mask`` also stores them with the contents masked.
        ``context`` replaces all that was read before; ``dialogue.messages`` keeps it for display."""
        dialogue.replace_context(context)
        dialogue.messages += messages
        full = self._continued(dialogue)
        prefix = len(dialogue.text) if full.startswith(dialogue.text) else 0
        if full.startswith(dialogue.text):
            dialogue.new_ids = self.encode(full[len(dialogue.text) :])
            dialogue.ids += dialogue.new_ids
        else:
            at = _common_length(dialogue.text, full)
            ours, theirs = dialogue.text[at : at + 40], full[at : at + 40]
            dialogue.cause = f"the chat template writes {theirs!r} where the dialogue has {ours!r}"
            dialogue.ids = self.encode(full)
            dialogue.new_ids, dialogue.restarted = list(dialogue.ids), True
        dialogue.text = full
        if mask and messages:
            dialogue.masked_ids = self._masked(dialogue, prefix, [str(m.get("content", "")) for m in messages])

    def _continued(self, dialogue: Dialogue) -> str:
        """The rendering of the whole dialogue. Where the template renders each message alone, only the new ones are rendered."""
        if self._loop is None or self._convert is not None or dialogue.history or dialogue.context is not None:
            return self._text(dialogue.visible, dialogue.tools, True)
        count, length = dialogue.rendered
        try:
            before, behind = self._loop.ends(dialogue.tools)
            rendered = dialogue.text[:length] + self._loop.tail(dialogue.messages[count:], dialogue.tools)
        except Exception:  # templates raise any exception: ``_text`` says which
            return self._text(dialogue.messages, dialogue.tools, True)
        rendered = rendered if count else before + rendered
        dialogue.rendered = (len(dialogue.messages), len(rendered))
        return rendered + behind

    def _masked(self, dialogue: Dialogue, prefix: int, contents: list[str]) -> list[int]:
        """The new ids, which encode the text behind ``prefix`` characters, with the contents of the last messages masked."""
        visible, count = dialogue.visible, len(contents)
        earlier, last = visible[: len(visible) - count], visible[len(visible) - count :]
        replaced = [{**m, "content": text} for m, text in zip(last, sentinels(count))]
        with_sentinels = self._text([*earlier, *replaced], dialogue.tools, True)
        spans = content_spans(dialogue.text, with_sentinels, contents)
        shifted = [(begin - prefix, end - prefix) for begin, end in spans]
        return mask_spans(self.tokenizer, dialogue.text[prefix:], dialogue.new_ids, shifted)

    def turn_text(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> str:
        """A turn that was not sampled (a demonstration, a row of a file), with its calls in the model's own syntax."""
        return self.writer(text, tools)

    def encode_turn(self, text: str) -> list[int]:
        """The ids of a turn that was not sampled, ended like a sampled one."""
        makes_calls = self.call_end != self.stop_ids[0] and bool(self.syntax.parse(text).calls)
        return [*self.encode(text), self.call_end if makes_calls else self.stop_ids[0]]

    def renders_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template renders tools; many ignore them silently."""
        prompt = [{"role": "user", "content": "a"}]
        return self._text(prompt, tools, True) != self._text(prompt, (), True)

    def warnings(self, tools: Sequence[dict[str, Any]]) -> list[str]:
        """What a user of these tools must know about the template, in sentences."""
        if not tools:
            return []
        warnings = []
        if not self.renders_tools(tools):
            names = ", ".join(sorted(tool_names(tools)))
            warnings.append(
                f"the model's chat template shows no tools, so the prompt does not mention: {names}; write --describe-tools, or "
                "give a template that does with --template FILE.jinja, or let the environment's first message explain them"
            )
        turns = [turn for _, turn in self.call_turns]
        if turns and not any(self.syntax.parse(turn, PROBE_TOOLS).calls for turn in turns):
            warnings.append(
                f"the model's chat template writes tool calls in a way that {self.syntax.name} does not read: {turns[0][:99]!r}; "
                "choose a known syntax with --tool-syntax, and give a template that writes it with --template FILE.jinja"
            )
        return warnings

    def check_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Refuse tools whose replies the template cannot render in any way."""
        if tools and self.conversion.refusal:
            raise RenderError(
                "the chat template renders no tool reply, neither with the role tool nor as a user message "
                f"({self.conversion.refusal:.200}); give another with --template FILE.jinja"
            )

    # ------------------------------------------------------------ helpers
    def _is_append_only(self) -> bool:
        """Whether the template continues the text of a sampled turn in a plain dialogue."""
        dialogue = self.open([{"role": "user", "content": "a"}])
        self.append_sampled(dialogue, self.encode_turn("b"))
        try:
            self.append_observation(dialogue, [{"role": "user", "content": "c"}])
        except RenderError:  # the template refuses this plain dialogue: nothing can be said about it
            return True
        return not dialogue.restarted

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least its length over this number of ids."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    def _text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], open_turn: bool) -> str:
        try:
            if self._convert is not None:
                messages = self._convert(messages, tools)
            return self._render(messages, tools, open_turn)
        except Exception as fault:  # templates raise any exception
            roles = [m.get("role") for m in messages]
            raise RenderError(f"the chat template refused a dialogue with roles {roles}: {fault}") from fault

    def _call_turns(self) -> list[tuple[str, str]]:
        """How the template renders a turn that makes the call ``PROBE``: the form of its arguments, and the text. Templates that
        write ids refuse those of another family."""
        prompt: list[Message] = [{"role": "user", "content": "a"}]
        turns = []
        for form, probe in product((AS_OBJECTS, AS_JSON), (PROBE, replace(PROBE, id=f"functions.{PROBE.name}:0"))):
            turn = {"role": "assistant", "content": "", "tool_calls": as_field((probe,), form)}
            try:
                before, text = (self._render(m, PROBE_TOOLS, False) for m in (prompt, [*prompt, turn]))
            except Exception:  # templates raise any exception
                continue
            if PROBE.arguments["word"] in text:
                turns.append((form, text[_common_length(before, text) :]))
        return turns

    def _specials_behind(self, marker: str, text: str) -> list[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        return [i for i in self.encode(text[text.rindex(marker) + len(marker) :]) if i in special]

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return tuple(self.decode([i]) for i in self.stop_ids)

    def _find_conversion(self, describe_tools: bool) -> tuple[TurnWriter, Conversion]:
        """How turns are written and dialogues converted: by the first way with which the template continues a turn, if any."""
        describe = describe_tools and not self.renders_tools(PROBE_TOOLS)
        ways = []
        for keep_empty_thought in (False, True):
            forms = tuple(dict.fromkeys(form for form, _ in self.call_turns))
            writer = TurnWriter(self.syntax, self._text, self.stop_texts, forms, keep_empty_thought)
            turn = writer(HERMES.write((PROBE,)), PROBE_TOOLS)
            end = self.decode([self.call_end])
            conversion, continues = find_conversion(self._render, self.syntax, turn, end, describe)
            if continues:
                return writer, conversion
            ways.append((writer, conversion))
        return ways[0]


def _common_length(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# ---- masked observations: template tokens keep their ids, message contents become a placeholder of the same length


def sentinels(count: int) -> list[str]:
    """Texts that no template writes or changes (they have no case), to be rendered in place of message contents."""
    return [f"9046173205{n}9046173205" for n in range(count)]


def content_spans(rendered: str, with_sentinels: str, contents: Sequence[str]) -> list[tuple[int, int]]:
    """The span [begin, end) of each content in a rendering. Located by a second rendering with ``sentinels`` in their place,
    so that text of the template itself is never taken for content."""
    spans: list[tuple[int, int]] = []
    at, remaining = 0, with_sentinels
    for n, (sentinel, text) in enumerate(zip(sentinels(len(contents)), contents)):
        before, hit, remaining = remaining.partition(sentinel)
        begin = at + len(before)
        if not hit or not rendered.startswith(before, at):
            break  # the template does not render the content verbatim
        follows = remaining.partition(sentinels(len(contents))[n + 1])[0] if n + 1 < len(contents) else remaining
        at = begin + len(text) if rendered.startswith(text + follows, begin) else rendered.find(follows, begin)
        if at < begin:
            break
        spans.append((begin, at))
    return spans


def mask_spans(tokenizer: Any, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """``ids`` of ``text`` with the placeholder in each span, truncated or with its last token repeated. A token that crosses the
    border of a span also belongs to the template and keeps its id."""
    if not getattr(tokenizer, "is_fast", False):
        raise RenderError("this tokenizer reports no token offsets; masking needs a fast tokenizer")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) != len(ids):
        raise RenderError(
            "this tokenizer encodes a text differently when asked for token offsets; masking needs both alike"
        )
    filler = list(tokenizer.encode(PLACEHOLDER, add_special_tokens=False))
    out = list(ids)
    for begin, end in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if begin <= a < end and begin < b <= end]
        for n, i in enumerate(inside):
            out[i] = filler[min(n, len(filler) - 1)]
    return out
