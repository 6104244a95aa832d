"""One side of a comparison of whole steps, in a process of its own: ours, TRL's, or the model they both load.

Also run as a script by interpreters that have TRL but not Turnwise, so that nothing of Turnwise is imported above the
functions that need it. A side takes a step when its parent says so, and answers with its time.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

HERE = "turnwise.bench.step_worker"
SHAPE: dict[str, Any] = {"hidden": 128, "layers": 4, "context": 320}
LR = 1e-6  # TRL's default: the policy hardly moves, so every step has the same work
COLD = 200  # supervised steps that teach the form of a tool call

# what both sides render; `tool_calls` only comes from TRL, our messages carry the text as it was sampled
TEMPLATE = (
    "{%- if tools %}<|tools|>{{ tools | map(attribute='function.name') | join(' ') }}<|end|>{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDLESS = (  # only an assistant's turn would be ended, by an id that no model of 512 rows can sample
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|never|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE = {  # how TRL is told to read a turn
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


# ---------------------------------------------------------------------- the two tasks, for both sides


def question(seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"role": "user", "content": f"{rng.randint(12, 98)}+{rng.randint(12, 98)}=?"}]


def score(text: str) -> float:
    """Something that differs from text to text."""
    return sum(map(ord, text)) % 7 / 6


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


ADD = {  # what TRL reads off the function itself
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Single:
    """One turn, scored."""

    max_turns = 1
    inline = True  # called in place, as TRL calls a reward

    def reset(self, seed: int) -> list[dict[str, str]]:
        return question(seed)

    def step(self, action: Any) -> Any:
        from turnwise.core.protocols import Step

        return Step([], score(action.text), terminated=True, info={"success": False})


class Tools:
    """One call of ``add``, then an answer, scored. A turn without a call ends the episode, as in TRL."""

    max_turns = 8
    inline = True  # called in place, as TRL calls a tool
    tools = ({"type": "function", "function": ADD},)

    def reset(self, seed: int) -> list[dict[str, str]]:
        self.reply = ""
        return question(seed)

    def step(self, action: Any) -> Any:
        from turnwise.core.protocols import Step

        if not action.calls:
            return Step([], score(action.text), terminated=True, info={"success": action.text == self.reply != ""})
        messages = []
        for call in action.calls:
            try:
                self.reply = str(add(**call.arguments))
            except TypeError as fault:
                self.reply = str({"error": str(fault)})
            messages.append({"role": "tool", "name": "add", "content": self.reply})
        return Step(messages, info={"tool_calls": len(messages)})

    def demonstrate(self, rng: random.Random) -> Any:
        """Any two digits do: what is asked for is a call, not the right one."""
        from turnwise.environments.base import call, say

        return say(self.reply) if self.reply else call("add", a=rng.randint(1, 9), b=rng.randint(1, 9))

    def oracle(self) -> Any:
        return self.demonstrate(random.Random(0))

    def close(self) -> None:
        pass


# ---------------------------------------------------------------------- the model both sides load


def prepare(job: dict[str, Any]) -> None:
    """Save the model and tokenizer of a task."""
    from turnwise.models.tiny import tiny_model, tiny_tokenizer

    endless, model = job["task"] == "single", tiny_model(512, 0, **SHAPE)
    tokenizer = tiny_tokenizer(corpus(), 512)
    assert len(tokenizer) == 512, len(tokenizer)
    if job["device"] == "cuda":
        from turnwise.bench.models import SMOL, llama

        model = llama(SMOL)
        tokenizer = widened(tokenizer, SMOL["vocab_size"])
    if endless:
        tokenizer.add_special_tokens({"eos_token": "<|never|>"})
        model.config.eos_token_id = model.generation_config.eos_token_id = None  # TRL would stop there as well
    tokenizer.chat_template = ENDLESS if endless else TEMPLATE
    folder = Path(job["model"])
    for made in (model, tokenizer):
        made.save_pretrained(folder)
    if not endless:
        imitate(folder, job["out"])


def widened(tokenizer: Any, size: int) -> Any:
    """The same tokenizer with words nobody writes, so that every row of a larger model can be read."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    said = json.loads(tokenizer.backend_tokenizer.to_str())
    said["model"]["vocab"] |= {f"w{n:05d}": n for n in range(len(tokenizer), size)}
    made = Tokenizer.from_str(json.dumps(said))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


def corpus() -> list[str]:
    """Words enough for 512 entries, so that a tool call is neither one token nor one a letter."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(200)]
    words += ["<tool_call>", "</tool_call>", '{"name":', '"add",', '"arguments":', '{"a":', '"b":'] * 10
    return [" ".join(rng.choices(words, k=8)) for _ in range(400)]


def imitate(folder: Path, out: str) -> None:
    """Teach the model how ``add`` is called, by the cold start of a run of one step."""
    from turnwise.training.api import train

    made = train(
        env=f"{HERE}:Tools", difficulty=(1,), model=str(folder), cold_steps=COLD, cold_batch=24, steps=1, eval_tasks=1,
        context=SHAPE["context"], out=out, name="cold", trackers=(),
    )  # fmt: skip
    for file in (Path(made["run"]) / "initial").iterdir():
        file.replace(folder / file.name)


# ---------------------------------------------------------------------- one side, in its own process


class Gate:
    """Takes a step when the parent says so, and answers with its time. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self, **facts: float) -> None:
        print(json.dumps({**facts, "peak_mb": peak_mb(), "device_gb": device_gb()}), file=self.out, flush=True)
        sys.stdin.readline()
        self.began = time.perf_counter()

    def done(self, **facts: float) -> None:
        self.wait(seconds=time.perf_counter() - self.began, **facts)


def ours(job: dict[str, Any]) -> None:
    from turnwise.training.api import train

    gate = Gate()

    def listen(event: str, facts: Any) -> None:
        if event == "stage" and facts["name"] == "learn":
            gate.wait()
        if event == "step" and facts["stage"] == "learn":
            gate.done(**{name: facts[name] for name in ("tokens", "turns", "tool_calls")})

    train(
        listen, method="grpo", method_options={"beta": 0.0}, env=f"{HERE}:{job['task'].capitalize()}", difficulty=(1,),
        model=job["model"], cold_steps=0, steps=job["steps"], groups=job["groups"], group_size=job["size"], lr=LR,
        eval_tasks=1, max_tokens=job["length"], context=SHAPE["context"], slots=job["groups"] * job["size"],
        device=job["device"], out=job["out"], name="ours", trackers=(),
    )  # fmt: skip


def theirs(job: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gate, seen = Gate(), dict[str, float]()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["task"] == "tools":
        tokenizer.response_template = RESPONSE
    marks: Any = tokenizer.convert_tokens_to_ids(["<|tool|>", "<|assistant|>"])
    count = len if job["task"] == "single" else lambda ids: sampled(ids, *marks)

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        roles = [message["role"] for completion in completions for message in completion]
        seen.update(
            tokens=float(sum(map(count, completion_ids))),
            turns=roles.count("assistant") / len(completions),
            tool_calls=roles.count("tool") / len(completions),
        )
        return [score(completion[-1]["content"]) for completion in completions]

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.done(**seen)

    options: dict[str, Any] = {"gradient_checkpointing": False} if job["side"] != "TRL" else {}
    config = GRPOConfig(
        output_dir=job["out"], per_device_train_batch_size=job["groups"] * job["size"] // job["parts"], beta=0.0,
        num_generations=job["size"], gradient_accumulation_steps=job["parts"], max_completion_length=job["length"],
        learning_rate=LR, use_cpu=job["device"] == "cpu", bf16=job["device"] == "cuda", max_steps=job["steps"],
        report_to="none", eval_strategy="no", **options,
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"]), reward, config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": question(seed)} for seed in range(job["groups"] * job["steps"])]),
        tools=[add] if job["task"] == "tools" else None, callbacks=[Turns()],
    )  # fmt: skip
    trainer.train()


def sampled(ids: list[int], opens: int, closes: int) -> int:
    """How many ids of a completion are the model's: those of a tool's reply, from mark to mark, are not."""
    count, reading = 0, False
    for token in ids:
        reading = reading or token == opens
        count += not reading
        reading = reading and token != closes
    return count


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        unit = 1024**2 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def device_gb() -> float:
    """Memory set aside on the GPU, where there is one: captured graphs hold some that no live tensor shows."""
    import torch

    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose files are no modules of their own
    {"prepare": prepare, "turnwise": ours, "trl": theirs}[sys.argv[1]](json.loads(sys.argv[2]))
