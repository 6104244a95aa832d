"""``make vllm``: Turnwise and a real vLLM server on this machine's CPU. ``python -m trials.vllm --python ENV/bin/python``.

Weights A and B are published in turn as A, B, A, B, A, for a model with a tied and one with a separate head: after each
publication greedy tokens must be those of Transformers with the same weights, and sampled log-probabilities must agree with
them. Then ``calculator`` is trained through the server and in the run's own process; success must agree: all weights, LoRA by
vLLM's adapter names, two LoRA runs at once on one server, and with top-p, where the kept ids come from vLLM's sampling masks and
log-probabilities must be those over them. Rows go to ``trials/results/vllm.jsonl``; what succeeded there is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from trials.finished_runs import COMMAND, agree, success
from trials.interpreted_triton import install
from trials.outcome import Outcome, Results, faults
from trials.report import table
from turnwise.core.records import Completion, Sampling
from turnwise.engines.remote.http import ServerAddress
from turnwise.engines.remote.remote_generator import PolicyProbe, RemoteGenerator, mean_difference
from turnwise.engines.remote.replica import MASK_OPTIONS, RemoteLimits, Replica
from turnwise.engines.remote.weight_files import WeightFolder

ROWS = Path(__file__).parent / "results" / "vllm.jsonl"
PART, PUBLICATIONS, TOLERANCE = "vllm", "ABABA", 1e-5  # of the mean difference of log-probabilities, in float32
PROMPTS, TOKENS, CONTEXT, STARTED = 4, 24, 320, 300.0  # ... and seconds in which a server must start
TASK = ["--env=calculator", "--threads=2", "--trackers=", f"--context={CONTEXT}"]
SERVER = ["--enable-scale-out", "--weight-transfer-config", '{"backend": "turnwise_file"}', "--enforce-eager"]
SERVER += ["--dtype", "float32", "--max-model-len", str(CONTEXT)]
# vLLM 0.32 on a CPU dies when it splits the prompt of a request with a seed: "CPU Generator does not use offset".
SERVER += ["--max-num-seqs", "128", "--max-num-batched-tokens", str(128 * CONTEXT)]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
RUNTIME_LORA = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
LORA, LORA_STEPS = ["--lora-rank=16", "--lr=3e-3"], 24
MASKED, MASKED_STEPS = ["--top-p=0.8"], 12  # interpreted kernels are slow
FILTERS = {
    "top-p 0.8": Sampling(top_p=0.8, max_tokens=TOKENS),
    "top-k 20": Sampling(top_k=20, max_tokens=TOKENS),
    "min-p 0.1": Sampling(min_p=0.1, max_tokens=TOKENS),
    "all at temperature 0.7": Sampling(0.7, top_p=0.9, top_k=20, min_p=0.05, max_tokens=TOKENS),
}


# ------------------------------------------------------------------------ models


def train(folder: Path, name: str, *words: str) -> Path:
    """A run with these settings; returns its directory."""
    command = [*COMMAND, "train", "grpo", *TASK, *words, f"--out={folder}", f"--name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run {name} failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return folder / name


def untie(folder: Path, to: Path) -> Path:
    """The same model with a head of its own, a tenth larger than the embedding: one that is mistaken for the other shows."""
    shutil.copytree(folder, to)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(1.1 * model.get_input_embeddings().weight.detach())
    model.save_pretrained(to)
    return to


# ------------------------------------------------------------------------ server


@contextlib.contextmanager
def served(
    python: str, model: Path, log: Path, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a vLLM server of this model, until the context ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += [*SERVER, *options]
    with log.open("wb") as file:
        variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
        server = subprocess.Popen(command, stdout=file, stderr=file, env=variables, start_new_session=True)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTED
    try:
        while True:
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{url}/health", timeout=2),
            ):
                break
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM did not start: {' '.join(log.read_text(errors='replace').split())[-600:]}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(30)


def greedy(url: str, prompt: list[int]) -> list[int]:
    body = {"token_ids": prompt, "sampling_params": {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}}
    request = urllib.request.Request(
        f"{url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return list(json.loads(reply.read())["choices"][0]["token_ids"])


# ------------------------------------------------------------------------ trials


def publications(url: str, models: dict[str, Path]) -> tuple[str, str]:
    """Publish the models in turn; what went wrong (empty: nothing), and the largest distances in words."""
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for name, path in models.items()
    }
    first = loaded["A"]
    probe = PolicyProbe(first, first.config.vocab_size, TOLERANCE)
    prompts = [probe.prompt(n) for n in range(PROMPTS)]
    expected = {name: [_greedy(model, prompt) for prompt in prompts] for name, model in loaded.items()}
    if expected["A"] == expected["B"]:
        return "both weights give the same greedy tokens, so the trial shows nothing", ""
    most = dict.fromkeys(models, 0.0)

    async def publish_all() -> str:
        limits = RemoteLimits(8, CONTEXT, (), False, 0)
        replica = Replica(ServerAddress.read(url, "", "generator"), "trial", 60.0)
        await replica.identify()
        generator = RemoteGenerator([replica], limits, WeightFolder(), probe, lambda ids: "", print)
        await generator.attach()
        for version, name in enumerate(PUBLICATIONS, 1):
            weights = {key: value.detach() for key, value in loaded[name].named_parameters()}
            await generator.publish(weights, version)
            if generator.fatal is not None:
                return f"publication {version} ({name}): {generator.fatal}"
            for n, prompt in enumerate(prompts):
                done = await generator.open(n).generate(prompt, Sampling(max_tokens=TOKENS))
                distance = mean_difference(probe.logp(weights, prompt, done.tokens), done.logp)
                most[name] = max(most[name], distance)
                if set(done.version) != {version}:
                    return f"publication {version} ({name}): tokens of the versions {sorted(set(done.version))}"
                found = await asyncio.to_thread(greedy, url, prompt)
                if found != expected[name][n]:
                    return f"publication {version} ({name}), prompt {n}: {found} instead of {expected[name][n]}"
        return ""

    fault = asyncio.run(publish_all())
    far = "" if max(most.values()) <= TOLERANCE else f"log-probabilities differ by {max(most.values()):.1e}"
    return fault or far, ", ".join(f"{name} {distance:.1e}" for name, distance in most.items())


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(TOKENS):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


def through_server(
    python: str,
    start: Path,
    folder: Path,
    seeds: Sequence[int],
    steps: int,
    more: Sequence[str] = (),
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """The same runs through one server, all at once, and each in its own process."""
    name = "-".join([more[0].strip("-").partition("=")[0] if more else "all", *map(str, seeds)])
    words = [f"--model={start}", "--cold-steps=0", f"--steps={steps}", f"--eval-tasks={100 if more else 200}", *more]
    with served(python, start, folder / "server.log", options, environment) as url, ThreadPoolExecutor() as pool:
        one = lambda seed: train(folder, f"vllm-{name}-{seed}", *words, f"--seed={seed}", f"--generator={url}")  # noqa: E731
        theirs = list(pool.map(one, seeds))
    said, faults = [], []
    for seed, run in zip(seeds, theirs):
        ends = success(run), success(train(folder, f"own-{name}-{seed}", *words, f"--seed={seed}"))
        said.append(f"{ends[0][0]:.1%} {ends[0][1]} against {ends[1][0]:.1%} {ends[1][1]} in its own process")
        faults += [] if agree(*ends) else [f"seed {seed}: success differs"]
        if more:
            before, far = begun(run)
            said[-1] += f" (at first {before[0]:.1%}; log-probabilities to {far:.1e})"
            faults += [] if ends[0][1][0] > before[1][1] else [f"seed {seed}: nothing was learned"]
    return "; ".join(faults), "; ".join(said)


def begun(run: Path) -> tuple[tuple[float, list[float]], float]:
    """Success before the first step with its interval; and how far log-probabilities of the server were from the learner's, on
    average over a step, in the worst one."""
    before = json.loads((run / "summary.json").read_text())["success_before"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    far = [row["mismatch/mean_abs"] for row in rows if "mismatch/mean_abs" in row]
    return (before["success"], before["interval"]), max(far)


def masks(url: str, path: Path) -> tuple[str, str]:
    """Sample with filters; every log-probability must be that of a softmax over the ids that the server says it kept."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    probe = PolicyProbe(model, model.config.vocab_size, TOLERANCE)
    most, kept = dict.fromkeys(FILTERS, 0.0), dict.fromkeys(FILTERS, 0.0)

    async def sample() -> str:
        replica = Replica(ServerAddress.read(url, "", "generator"), "trial", 60.0)
        await replica.identify()
        await replica.examine_sampling()
        limits = RemoteLimits(8, CONTEXT, (), False, 0)
        generator = RemoteGenerator([replica], limits, WeightFolder(), probe, lambda ids: "", print)
        await generator.attach()
        await generator.publish({key: value.detach() for key, value in model.named_parameters()}, 1)
        for name, sampling in FILTERS.items():
            for n in range(PROMPTS):
                prompt = probe.prompt(n)
                done = await generator.open(n).generate(prompt, sampling)
                if not len(done.kept) == len(done.tokens) > 0:
                    return f"{name}: {len(done.tokens)} tokens and {len(done.kept)} masks"
                most[name] = max(most[name], _distance_over_kept(model, prompt, done, sampling.temperature))
                kept[name] = max(kept[name], max(len(row) // 4 for row in done.kept))
        return ""

    fault = asyncio.run(sample())
    far = [name for name in FILTERS if most[name] > TOLERANCE]
    said = ", ".join(f"{name} {most[name]:.1e} (at most {kept[name]:.0f} ids)" for name in FILTERS)
    return fault or (f"log-probabilities differ with {', '.join(far)}" if far else ""), said


@torch.no_grad()
def _distance_over_kept(model: Any, prompt: list[int], done: Completion, temperature: float) -> float:
    """The largest distance of a reported log-probability from a softmax over the kept ids, in float64."""
    logits = model(input_ids=torch.tensor([[*prompt, *done.tokens]])).logits[0, len(prompt) - 1 : -1].double()
    far = 0.0
    for row, token, mask, logp in zip(logits / temperature, done.tokens, done.kept, done.logp, strict=True):
        ids = torch.frombuffer(bytearray(mask), dtype=torch.int32).long()
        far = max(far, abs(float(row[token] - row[ids].logsumexp(0)) - logp))
    return far


@contextlib.contextmanager
def kept_on_failure(tell: Callable[[str], None]) -> Iterator[Path]:
    """A folder for models, runs and the server's log, removed unless something fails."""
    folder = Path(tempfile.mkdtemp(prefix="tw"))
    try:
        yield folder
    except BaseException:
        tell(f"runs and the server's log are kept in {folder}")
        raise
    shutil.rmtree(folder)


def trial(python: str, steps: int, only: str, results: Results, tell: Callable[[str], None]) -> None:
    with kept_on_failure(tell) as folder:
        run = train(folder, "start", "--steps=4", "--eval-tasks=0")
        heads = {"tied": {"A": run / "initial", "B": run / "model"}}
        heads["separate"] = {key: untie(path, folder / f"separate{key}") for key, path in heads["tied"].items()}
        attempts: list[tuple[str, str, Callable[[], tuple[str, str]]]] = []
        for head, models in heads.items():

            def published(models: dict[str, Path] = models) -> tuple[str, str]:
                with served(python, models["A"], folder / "server.log") as url:
                    return publications(url, models)

            attempts.append((f"{' '.join(PUBLICATIONS)}, {head} head", "publications to vLLM", published))
        start = heads["tied"]["A"]
        for seed in (3, 4):
            work = lambda seed=seed: through_server(python, start, folder, [seed], steps)  # noqa: E731
            attempts.append((f"calculator, {steps} steps, seed {seed}", "runs through vLLM", work))
        for seeds in ((3,), (4, 5)):

            def adapted(seeds: Sequence[int] = seeds) -> tuple[str, str]:
                slots = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", str(2 * len(seeds))]  # 2: staleness 0
                return through_server(python, start, folder, seeds, LORA_STEPS, LORA, slots, RUNTIME_LORA)

            many = "one run" if len(seeds) == 1 else f"{len(seeds)} runs at once"
            attempts.append((f"LoRA by adapter names, {many}, {LORA_STEPS} steps", "LoRA through vLLM", adapted))
        interpreted = install(folder / "interpreted")

        def masked() -> tuple[str, str]:
            with served(python, start, folder / "server.log", MASK_OPTIONS.split(), interpreted) as url:
                return masks(url, start)

        def trained_with_masks() -> tuple[str, str]:
            options = MASK_OPTIONS.split()
            return through_server(python, start, folder, [3], MASKED_STEPS, MASKED, options, interpreted)

        attempts.append(("largest distance of log-probabilities over the kept ids", "sampling masks of vLLM", masked))
        title = f"calculator with top-p 0.8, {MASKED_STEPS} steps"
        attempts.append((title, "sampling masks of vLLM", trained_with_masks))
        for title, kind, work in attempts:
            if only not in title or any(o.name.startswith(title) and not o.fault for o in results.outcomes.values()):
                continue
            tell(f"{kind}: {title} ...")
            began = time.monotonic()
            fault, said = work()
            seconds = time.monotonic() - began
            results.add(Outcome(PART, f"{title}: {said}", "failed" if fault else "agreed", fault, seconds, 1, kind))
            tell(f"{title}: {said} {fault}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.vllm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="of an environment with vLLM and Turnwise")
    parser.add_argument("--steps", type=int, default=40, help="of a run through the server")
    parser.add_argument("--only", default="", help="part of the titles of what is tried")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the result rows; /dev/null keeps none")
    options = parser.parse_args()
    if not Path(options.python).is_file():
        parser.error(
            f"there is no {options.python}; write `make vllm`, or --python with that of an environment that has vLLM"
        )
    disable_progress_bar()
    began = time.monotonic()
    results = Results(options.rows)
    tell = lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)  # noqa: E731
    trial(str(Path(options.python).absolute()), options.steps, options.only, results, tell)
    print(table(list(results.outcomes.values())))
    return 1 if faults(results.outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
