"""One side of the whole-step benchmark, in its own process: Turnwise, TRL, or the preparation of the model both load.

Also runs as a script under interpreters that have TRL but not Turnwise, so only the functions that need Turnwise import it. A
side takes a step when its parent process tells it to, and reports the time. Knows nothing of the other sides.
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

MODULE = "turnwise.bench.step_worker"
SHAPE: dict[str, Any] = {"hidden": 128, "layers": 4, "context": 320}
LR = 1e-6  # TRL's default: the policy hardly changes, so every step does the same work
COLD_STEPS = 200  # supervised steps that teach the syntax of a tool call

# The chat template of both sides. Only TRL passes `tool_calls`; our messages carry the sampled text.
TEMPLATE = (
    "{%- if tools %}<|tools|>{{ tools | map(attribute='function.name') | join(' ') }}<|end|>{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDLESS_TEMPLATE = (  # ends only assistant turns, with an id that a vocabulary of 512 cannot sample
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|never|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE = {  # how TRL parses a turn
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


# ---------------------------------------------------------------------- the two tasks of both sides


def question(seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"role": "user", "content": f"{rng.randint(12, 98)}+{rng.randint(12, 98)}=?"}]


def score(text: str) -> float:
    """A reward that differs from text to text."""
    return sum(map(ord, text)) % 7 / 6


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


ADD = {  # the schema that TRL derives from the function
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Single:
    """An environment of one scored turn."""

    max_turns = 1
    inline = True  # runs in the calling thread, as TRL's rewards do

    def reset(self, seed: int) -> list[dict[str, str]]:
        return question(seed)

    def step(self, action: Any) -> Any:
        from turnwise.core.protocols import Step

        return Step([], score(action.text), terminated=True, info={"success": False})


class Tools:
    """An environment with one call of ``add``, then a scored answer. A turn without a call ends the episode, as in TRL."""

    max_turns = 8
    inline = True  # runs in the calling thread, as TRL's tools do
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
        """Any two digits will do: the benchmark needs a call, not the right one."""
        from turnwise.environments.base import text_action, tool_action

        return text_action(self.reply) if self.reply else tool_action("add", a=rng.randint(1, 9), b=rng.randint(1, 9))

    def oracle(self) -> Any:
        return self.demonstrate(random.Random(0))

    def close(self) -> None:
        pass


# ---------------------------------------------------------------------- the model both sides load


def prepare(job: dict[str, Any]) -> None:
    """Save the model and tokenizer that both sides load."""
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
        model.config.eos_token_id = model.generation_config.eos_token_id = None  # TRL would stop at it too
    tokenizer.chat_template = ENDLESS_TEMPLATE if endless else TEMPLATE
    folder = Path(job["model"])
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    if not endless:
        fine_tune(folder, job["out"])


def widened(tokenizer: Any, size: int) -> Any:
    """The same tokenizer with filler words, so that every row of a larger vocabulary can be decoded."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["model"]["vocab"] |= {f"w{n:05d}": n for n in range(len(tokenizer), size)}
    backend = Tokenizer.from_str(json.dumps(spec))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


def corpus() -> list[str]:
    """Enough words for 512 entries, so that a tool call is neither a single token nor one token per letter."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(200)]
    words += ["<tool_call>", "</tool_call>", '{"name":', '"add",', '"arguments":', '{"a":', '"b":'] * 10
    return [" ".join(rng.choices(words, k=8)) for _ in range(400)]


def fine_tune(folder: Path, out: str) -> None:
    """Teach the model the syntax of ``add`` calls, by the cold start of a run of one step."""
    from turnwise.training.api import train

    run = train(
        env=f"{MODULE}:Tools", difficulty=(1,), model=str(folder), cold_steps=COLD_STEPS, cold_batch=24, steps=1, eval_tasks=1,
        context=SHAPE["context"], out=out, name="cold", trackers=(),
    )  # fmt: skip
    for file in (Path(run["run"]) / "initial").iterdir():
        file.replace(folder / file.name)


# ---------------------------------------------------------------------- one side in its own process


class StepTimer:
    """Takes a step when the parent process tells it to, and reports the time. Redirects what libraries print to stderr."""

    def __init__(self) -> None:
        # results keep the pipe; whatever a library prints goes to the log
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self, **facts: float) -> None:
        print(json.dumps({**facts, "peak_mb": peak_mb(), "device_gb": device_gb()}), file=self.out, flush=True)
        sys.stdin.readline()
        self.began = time.perf_counter()

    def done(self, **facts: float) -> None:
        self.wait(seconds=time.perf_counter() - self.began, **facts)


def run_turnwise(job: dict[str, Any]) -> None:
    from turnwise.training.api import train

    timer = StepTimer()

    def listen(event: str, facts: Any) -> None:
        if event == "stage" and facts["name"] == "learn":
            timer.wait()
        if event == "step" and facts["stage"] == "learn":
            timer.done(**{name: facts[name] for name in ("tokens", "turns", "tool_calls")})

    train(
        listen, method="grpo", method_options={"beta": 0.0}, env=f"{MODULE}:{job['task'].capitalize()}", difficulty=(1,),
        model=job["model"], cold_steps=0, steps=job["steps"], groups=job["groups"], group_size=job["size"], lr=LR,
        eval_tasks=1, max_tokens=job["length"], context=SHAPE["context"], slots=job["groups"] * job["size"],
        device=job["device"], out=job["out"], name="ours", trackers=(),
    )  # fmt: skip


def run_trl(job: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    timer, counts = StepTimer(), dict[str, float]()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["task"] == "tools":
        tokenizer.response_template = RESPONSE
    markers: Any = tokenizer.convert_tokens_to_ids(["<|tool|>", "<|assistant|>"])
    count = len if job["task"] == "single" else lambda ids: sampled(ids, *markers)

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        roles = [message["role"] for completion in completions for message in completion]
        counts.update(
            tokens=float(sum(map(count, completion_ids))),
            turns=roles.count("assistant") / len(completions),
            tool_calls=roles.count("tool") / len(completions),
        )
        return [score(completion[-1]["content"]) for completion in completions]

    class Timing(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            timer.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            timer.done(**counts)

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
        tools=[add] if job["task"] == "tools" else None, callbacks=[Timing()],
    )  # fmt: skip
    trainer.train()


def sampled(ids: list[int], opens: int, closes: int) -> int:
    """How many ids of a completion the model sampled: those of a tool reply, between its markers, do not count."""
    count, in_reply = 0, False
    for token in ids:
        in_reply = in_reply or token == opens
        count += not in_reply
        in_reply = in_reply and token != closes
    return count


def peak_mb() -> float:
    """Peak resident memory of this process."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        unit = 1024**2 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def device_gb() -> float:
    """Peak memory reserved on the GPU, if there is one: captured graphs hold memory that no live tensor accounts for."""
    import torch

    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are not top-level modules
    {"prepare": prepare, "turnwise": run_turnwise, "trl": run_trl}[sys.argv[1]](json.loads(sys.argv[2]))
