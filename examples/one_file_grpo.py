"""GRPO in one file, with nothing in the way.

No library, no configuration, no classes: a toy task, a tiny random Llama, a sampling loop, one loss, one optimiser. Read it
from top to bottom. Turnwise writes the same method as one expression; a test holds the two to the same numbers.

    python examples/one_file_grpo.py           about 20 seconds on two cores

Shapes: B rollouts (groups of G that share a prompt, one group after another), L positions, V tokens.
"""

import copy
import time

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# ---------------------------------------------------------------------------------------------------------- the task
#
# The prompt is a number n. The right answer counts on: n+1, n+2, end. Numbers are tokens, and after the last comes the
# first. Nobody shows the model an answer; it only hears how much of what it said was right.

PAD, END, FIRST, NUMBERS = 0, 1, 2, 8
VOCABULARY = FIRST + NUMBERS
LONGEST = 4  # tokens an answer may have


def draw_prompts(count: int, dice: torch.Generator) -> Tensor:
    return torch.randint(FIRST, VOCABULARY, (count, 1), generator=dice)  # (count, 1)


def reward(prompt: int, answer: list[int]) -> float:
    """One third for each token of the right answer that is in its place, nothing beyond the first mistake."""
    right = [FIRST + (prompt - FIRST + step) % NUMBERS for step in (1, 2)] + [END]
    good = 0
    for said, meant in zip(answer, right):
        if said != meant:
            break
        good += 1
    return good / len(right)


# --------------------------------------------------------------------------------------------------------- the model


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).eval()


def token_logp(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """log π of every token given the ones before it, (B, L); nothing stands before the first, so its place holds 0."""
    logits = model(input_ids=ids).logits[:, :-1]  # (B, L-1, V): position i speaks about token i+1
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, L-1)
    return torch.nn.functional.pad(logp, (1, 0))


# ------------------------------------------------------------------------------------------------------ the rollouts


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, dice: torch.Generator) -> dict[str, Tensor]:
    """One answer for each prompt: ids (B, L), which of them were sampled (B, L), their log-probabilities then (B, L).

    Everything is read again for every token: the slowest way, and the one in which nothing can go wrong. Whoever has
    said END is padded; padding stands behind everything, so no token that counts ever sees it.
    """
    ids = prompts
    mask = torch.zeros_like(prompts, dtype=torch.bool)
    logp = torch.zeros(prompts.shape)
    talking = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(LONGEST):
        log_pi = model(input_ids=ids).logits[:, -1].log_softmax(-1)  # (B, V)
        token = torch.multinomial(log_pi.exp(), 1, generator=dice)  # (B, 1)
        token[~talking] = PAD
        ids = torch.cat([ids, token], 1)
        mask = torch.cat([mask, talking[:, None]], 1)
        logp = torch.cat([logp, log_pi.gather(1, token).float() * talking[:, None]], 1)
        talking = talking & (token[:, 0] != END)
    answers = [row[said].tolist() for row, said in zip(ids, mask)]
    rewards = [reward(int(prompt), answer) for prompt, answer in zip(prompts[:, 0], answers)]
    return {"ids": ids, "mask": mask, "logp": logp, "reward": torch.tensor(rewards)}


# ------------------------------------------------------------------------------------------------------- the method


def grpo_step(
    model: LlamaForCausalLM,
    reference: LlamaForCausalLM,
    optimiser: torch.optim.Optimizer,
    rollouts: dict[str, Tensor],
    group: int,
    clip: float = 0.2,
    beta: float = 0.04,
    longest_step: float = 1.0,
) -> float:
    """One optimiser step on one batch of rollouts; returns the loss."""
    ids, mask, old, rewards = (rollouts[name] for name in ("ids", "mask", "logp", "reward"))

    # A rollout is as good as it is better than its siblings, in units of how much they differ.
    rewards = rewards.view(-1, group)  # (B/G, G)
    spread = rewards.std(1, keepdim=True)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-6)).view(-1, 1)  # (B, 1)

    # How much likelier is each token now than when it was sampled? Far enough in the right direction is enough.
    logp = token_logp(model, ids)
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)

    # Stay near the model we began with: k3, an estimate of the KL divergence that is never negative.
    with torch.no_grad():
        x = token_logp(reference, ids)
    k3 = (x - logp).exp() - (x - logp) - 1

    # Mean over the sampled tokens of each rollout, then over the rollouts: short and long answers count alike.
    per_rollout = ((gain - beta * k3) * mask).sum(1) / mask.sum(1)  # (B,)
    loss = -per_rollout.mean()

    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), longest_step)
    optimiser.step()
    return loss.item()


# ----------------------------------------------------------------------------------------------------------- the loop


def train(
    steps: int = 80, prompts: int = 8, group: int = 16, updates: int = 2, lr: float = 3e-3, seed: int = 0
) -> list[float]:
    """The mean reward of each step."""
    model = make_model(seed)
    reference = copy.deepcopy(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    dice = torch.Generator().manual_seed(seed)
    rewards = []
    for step in range(steps):
        asked = draw_prompts(prompts, dice).repeat_interleave(group, 0)  # (B, 1): every prompt, G times
        rollouts = sample(model, asked, dice)
        losses = [grpo_step(model, reference, optimiser, rollouts, group) for _ in range(updates)]
        rewards.append(float(rollouts["reward"].mean()))
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3d}   reward {rewards[-1]:.3f}   loss {losses[-1]:+.4f}", flush=True)
    return rewards


if __name__ == "__main__":
    began = time.perf_counter()
    train()
    print(f"{time.perf_counter() - began:.1f} s")
