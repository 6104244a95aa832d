"""TRL's trainer with our objectives. Runs where TRL is importable; elsewhere in the interpreter TURNWISE_TRL_PYTHON names.

As a script it is one process of the two-process test: ``torchrun test_trl.py MODEL OUT METHOD``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turnwise import recipes
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import Clip
from turnwise.algebra.peers import Same
from turnwise.algebra.penalty import KL, WeightedPenalty
from turnwise.algebra.ratio import Importance, PerToken
from turnwise.algebra.value import ReturnToGo
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN
from turnwise.errors import RecipeError, SettingError
from turnwise.integrations import method_support
from turnwise.integrations.trl_arguments import CONFLICTS, MEASURED
from turnwise.recipes.recipe import Recipe

ROOT = Path(__file__).parents[2]
HERE = importlib.util.find_spec("trl") is not None
OTHER = os.environ.get("TURNWISE_TRL_PYTHON", "")
needs_trl = pytest.mark.skipif(not HERE, reason="TRL is not importable here")
WORKS = [name for name in recipes.METHODS if not method_support.unsupported_reasons(recipes.build(name), MEASURED)]
WORDS = ["say a letter please", "another one", "no, this one"]

if HERE:
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    from turnwise.integrations.trl import GRPOTrainer
    from turnwise.models.tiny import tiny_model, tiny_tokenizer

    class Watch(TrainerCallback):
        """The gradient of every optimiser step."""

        def __init__(self):
            self.grads: list[torch.Tensor] = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone())


@pytest.mark.skipif(
    HERE or not OTHER, reason="TRL is importable here, or TURNWISE_TRL_PYTHON names no interpreter with it"
)
def test_in_the_other_interpreter():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [OTHER, "-m", "pytest", "-q", "-x", __file__]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


# ---------------------------------------------------------------------- setting


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk: TRL loads reference policies by their path."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(WORDS, 300)
    tiny_model(len(tokenizer), 0, hidden=32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def fives(completion_ids, **kwargs):
    return [sum(t % 5 == 0 for t in ids) / len(ids) + 0.01 * (ids[0] % 7) for ids in completion_ids]


def trained(folder, cls=None, run=True, reward=fives, more=None, **settings):
    """A trainer after its run, and the gradients of its steps. ``more``: further arguments of the trainer."""
    base = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 3,
        "max_completion_length": 8, "learning_rate": 0.3, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "num_iterations": 3, "report_to": [], "use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no",
        "gradient_checkpointing": False, "disable_tqdm": True, "seed": 3, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    data = Dataset.from_dict({"prompt": [f"say {c}" for c in "abcdefghijklmnop"]})
    watch = Watch()
    trainer = (cls or GRPOTrainer)(
        folder, reward, trl.GRPOConfig(**{**base, **settings}), train_dataset=data, callbacks=[watch], **(more or {})
    )
    if run:
        trainer.train()
    return trainer, watch.grads


def ours(folder, method, options=None, run=True, more=None, **settings):
    return trained(folder, run=run, more={"method": method, "method_options": options, **(more or {})}, **settings)


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def close(a, b, rtol=2e-4):
    assert len(a) == len(b) > 0 and a[0].norm() > 0
    for x, y in zip(a, b):
        assert (x - y).norm() <= rtol * x.norm(), f"{float((x - y).norm() / x.norm()):.2e}"


def as_trl(name, **hyper):
    """TRL divides by std + 1e-4."""
    recipe = recipes.build(name, **hyper)
    return replace(
        recipe, advantage=replace(recipe.advantage, eps=1e-4), admission=method_support.DEFAULT_RECIPE.admission
    )


# ------------------------------------------------------------------ equal to TRL

PAIRS = {
    "dr_grpo": (
        lambda: "dr_grpo",
        {"length": 8, "clip": 0.01},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.01},
    ),
    "grpo": (lambda: as_trl("grpo", beta=0.0, clip=0.05), None, {"loss_type": "grpo", "epsilon": 0.05}),
    "grpo+kl": (
        lambda: as_trl("grpo", beta=0.5),
        None,
        {"loss_type": "grpo", "beta": 0.5, "use_bias_correction_kl": False},
    ),
    "grpo+corrected kl": (
        lambda: replace(as_trl("grpo"), penalties=(WeightedPenalty(0.5, KL("k3", corrected=True)),)),
        None,
        {"loss_type": "grpo", "beta": 0.5},
    ),
    "two_sided": (lambda: as_trl("two_sided_grpo", delta=1.21), None, {"loss_type": "grpo", "delta": 1.21}),
    "dapo": (
        lambda: as_trl("dapo", low=0.05, high=0.1, limit=10**6, cache=1),
        None,
        {"loss_type": "dapo", "epsilon": 0.05, "epsilon_high": 0.1},
    ),
    "bnpo": (
        lambda: as_trl("dapo", low=0.05, high=0.1, limit=10**6, cache=1),
        None,
        {"loss_type": "bnpo", "epsilon": 0.05, "epsilon_high": 0.1},
    ),
    "gspo": (
        lambda: as_trl("gspo", low=0.01, high=0.02),
        None,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
    ),
    "sapo": (lambda: as_trl("sapo"), None, {"loss_type": "sapo"}),
    "cispo": (lambda: as_trl("cispo", high=1.05), None, {"loss_type": "cispo", "epsilon_high": 1.05}),
}


@needs_trl
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_loss_and_gradients_are_trls_own(folder, pair, accumulate):
    if pair == "bnpo" and accumulate > 1:
        pytest.skip("TRL's bnpo averages each micro-batch by itself")
    recipe, options, theirs = PAIRS[pair]
    shape = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 16 // accumulate}
    a, left = trained(folder, trl.GRPOTrainer, **shape, **theirs)
    b, right = ours(folder, recipe(), options, **shape)
    close(left, right)
    if pair != "cispo":  # there TRL logs w·A·log π, we w·A·π/sg[π]: values differ, gradients do not
        assert logged(b, "loss") == pytest.approx(logged(a, "loss"), rel=1e-3, abs=2e-6)
    assert max(logged(b, "turnwise/kl/behaviour")) > 1e-4, "the policy never moved: the ratio was not tested"
    if pair in ("dapo", "bnpo", "gspo", "grpo", "dr_grpo"):
        assert max(logged(b, "turnwise/clip_share")) > 0.01, "nothing was clipped"


# --------------------------------------------------------------- one step, one sum


@needs_trl
@pytest.mark.parametrize(
    "method",
    ["sapo", "gspo", "dapo", "bapo", "steer", "clip_cov", "kl_cov", "r2vpo", "fiberpo_domain", "reinforce_pp", "scale_rl",
     "epo", "hapo", "mis", "sequence_mask", "gbpo", "red_drop"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*would choose its tasks")
def test_micro_batching_does_not_change_the_gradient(folder, method):
    one = ours(folder, method)[1]
    for cuts in (2, 4):
        shape = {"gradient_accumulation_steps": cuts, "per_device_train_batch_size": 16 // cuts}
        close(one, ours(folder, method, **shape)[1])


@needs_trl
def test_on_policy_steps_need_no_old_logps(folder):
    """One pass over each batch: TRL keeps no old log-probabilities, and the sampling policy is the present one."""
    trainer, one = ours(folder, "steer", num_iterations=1)
    assert not trainer._credited.has_behaviour
    close(one, ours(folder, "steer", num_iterations=1, gradient_accumulation_steps=4, per_device_train_batch_size=4)[1])


@needs_trl
def test_several_optimiser_steps_for_each_generation(folder):
    """The plan is of the slices of one optimiser step, not of all that was generated."""
    shape = {"num_iterations": 1, "max_steps": 4}
    one = ours(folder, "bapo", per_device_train_batch_size=8, steps_per_generation=2, **shape)[1]
    cut = ours(
        folder, "bapo", per_device_train_batch_size=4, steps_per_generation=4, gradient_accumulation_steps=2, **shape
    )[1]
    close(one, cut)


def fixed_rollout(prompts, trainer):
    """Answers that depend on the row's place among all processes only; two turns with a tool's words between them."""
    first = trainer.accelerator.process_index * len(prompts)
    lengths = [3 + (first + k) % 4 for k in range(len(prompts))]
    ids = [[10 + (7 * (first + k) + 3 * j) % 200 for j in range(n + 4)] for k, n in enumerate(lengths)]
    masks = [[1] * n + [0, 0] + [1] * 2 for n in lengths]
    asked = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": asked, "completion_ids": ids, "logprobs": None, "env_mask": masks}


@needs_trl
@pytest.mark.parametrize("method", ["sapo", "r2vpo", "grpo", "fiberpo_domain"])
def test_two_processes_give_the_gradient_of_one(folder, tmp_path, method):
    one = ours(folder, method, more={"rollout_func": fixed_rollout})[1]
    out = tmp_path / "grads.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    found = subprocess.run(
        [*command, __file__, folder, str(out), method], capture_output=True, text=True, check=False, timeout=180
    )
    assert found.returncode == 0, found.stderr[-3000:]
    close(one, torch.load(out))


# ------------------------------------------------------------------------- runs


@needs_trl
@pytest.mark.parametrize("method", WORKS)
@pytest.mark.filterwarnings("ignore:.*would choose its tasks")
def test_every_method_that_fits_learns_finitely(folder, method):
    before, _ = ours(folder, method, run=False)
    trainer, grads = ours(
        folder, method, num_iterations=2, max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=8,
        learning_rate=1e-2, optim="adamw_torch",
    )  # fmt: skip
    assert len(grads) == 4 and all(g.isfinite().all() for g in grads)
    old, new = (torch.cat([p.flatten() for p in t.model.parameters()]) for t in (before, trainer))
    assert new.isfinite().all() and not torch.equal(old, new)
    assert len(logged(trainer, "turnwise/ratio")) == 4 and len(logged(trainer, "entropy")) == 4


@needs_trl
@pytest.mark.parametrize("method", ["sapo", "bapo"])
def test_a_learnable_reward_rises(folder, method):
    trainer, _ = ours(
        folder, method, max_steps=40, num_iterations=1, learning_rate=5e-3, optim="adamw_torch",
        gradient_accumulation_steps=2, per_device_train_batch_size=16,
    )  # fmt: skip
    reward = logged(trainer, "reward")
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.3, reward


# ------------------------------------------------------------------- TRL's worlds


@needs_trl
def test_turns_are_the_runs_of_the_tool_mask(folder):
    mine = Recipe(
        advantage=Standardise() + 0.5 * Standardise(ReturnToGo(gamma=0.5), peers=Same("index")),
        ratio=PerToken(Importance(TURN)),
        gate=Clip(0.2, 0.28),
        aggregate=Mean(TOKEN),
    )
    trainer, grads = ours(folder, mine, more={"rollout_func": fixed_rollout})
    batch, mask = trainer._credited.batch, trainer._credited.mask
    assert batch.tree.count(TURN) == 2 * len(batch) == 32
    shown = trainer._credited.dense(batch["advantage"])
    assert (shown[~mask] == 0).all() and (
        shown[:, 0] != shown.gather(1, mask.long().cumsum(1).argmax(1)[:, None])[:, 0]
    ).any()
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads)
    assert max(logged(trainer, "turnwise/gradient_share/turn1")) > 0


@needs_trl
def test_turn_level_methods_run_in_trls_tool_loop(monkeypatch):
    """Random weights call no tool: two of three first turns are a scripted call, all later ones are sampled."""
    bench = importlib.import_module("turnwise.bench.step_worker")
    tokenizer = tiny_tokenizer(bench.corpus(), 512)
    tokenizer.chat_template, tokenizer.response_template = bench.TEMPLATE, bench.RESPONSE
    mark = tokenizer.convert_tokens_to_ids("<|tool|>")
    call = tokenizer.encode('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>')

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            begins = not any(mark in asked for asked in prompt_ids)
            return [call if begins and k % 3 else said for k, said in enumerate(ids)], logprobs

    config = trl.GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, max_steps=2,
        max_completion_length=64, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = Scripted(
        tiny_model(512, 0, hidden=32), lambda completion_ids, **_: [float(ids[-1] % 7) for ids in completion_ids], config,
        processing_class=tokenizer, tools=[bench.add], method=replace(recipes.build("gspo"), ratio=PerToken(Importance(TURN))),
        train_dataset=Dataset.from_list([{"prompt": bench.question(seed)} for seed in range(8)]),
    )  # fmt: skip
    trainer.train()
    packed = trainer._credited
    assert packed.batch.tree.size(TURN, TRAJECTORY).x.tolist() == [1, 2, 2, 1, 2, 2, 1, 2]
    assert packed.mask[1, : len(call)].all() and not packed.mask[1, len(call)]
    assert all(share > 0 for share in logged(trainer, "turnwise/gradient_share/turn1"))


@needs_trl
def test_rewards_are_mixed_with_trls_weights_and_none_is_left_out(folder):
    def length(completion_ids, **kwargs):
        return [None if k == 1 else float(len(ids)) for k, ids in enumerate(completion_ids)]

    def silent(completion_ids, **kwargs):
        return [None if k == 1 else float(k) for k in range(len(completion_ids))]

    trainer, _ = ours(
        folder, "rloo", reward=[length, silent], reward_weights=[0.0, 2.0], more={"rollout_func": fixed_rollout}
    )
    packed = trainer._credited
    assert packed.position[1] == -1 and (packed.position >= 0).sum() == 15
    first = packed.dense(packed.batch["advantage"])[:4, 0]
    assert first.tolist() == pytest.approx([0 - (4 + 6) / 2, 0, 4 - (0 + 6) / 2, 6 - (0 + 4) / 2])
    assert set(packed.batch.reward_components) == {"length", "silent"}
    assert list(trainer._logs["advantages"])[-16:][:4] == pytest.approx(first.tolist())


@needs_trl
@pytest.mark.parametrize("method", ["dapo", "bapo", "steer"])
def test_a_batch_that_teaches_nothing_moves_nothing(folder, method):
    _, grads = ours(
        folder, method, reward=lambda completion_ids, **_: [1.0] * len(completion_ids), gradient_accumulation_steps=2,
        per_device_train_batch_size=8, num_iterations=1,
    )  # fmt: skip
    assert len(grads) == 3 and all((g == 0).all() for g in grads)


@needs_trl
def test_truncated_answers_stay_in_the_baseline(folder):
    trainer, grads = ours(folder, "rloo", mask_truncated_completions=True, max_completion_length=24, num_iterations=1)
    packed = trainer._credited
    empty = ~packed.mask.any(1)
    assert 0 < empty.sum() < 16
    assert (
        packed.batch.reward.x.numel() == 16
        and (packed.batch.reward.x[packed.position[empty.nonzero().squeeze(1)]] > 0).any()
    )
    assert all(g.isfinite().all() for g in grads)


@needs_trl
def test_vllm_logps_are_the_behaviour_where_it_could_score(folder):
    trainer, _ = ours(folder, "tis", run=False)
    old, sampled = torch.full((2, 3), -1.0), torch.tensor([[-2.0, float("nan"), -2.0]] * 2)
    trainer.use_vllm = True
    found = trainer._measure({"old_per_token_logps": old, "sampling_per_token_logps": sampled})
    assert found["behaviour"].tolist() == [[-2.0, -1.0, -2.0]] * 2 and torch.equal(found["proximal"], old)


@needs_trl
def test_memory_is_saved_resumed_and_left_alone_by_an_evaluation(folder):
    how = {
        "num_iterations": 1,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_eval_batch_size": 4,
    }
    whole, _ = ours(folder, "r2vpo", {"rate": 0.3}, **how)
    saved = Path(whole.args.output_dir) / "checkpoint-2"
    state = json.loads((saved / "turnwise.json").read_text())
    assert state["clock"] == 2 and state["seen"] == 32
    again, _ = ours(folder, "r2vpo", {"rate": 0.3}, run=False, **how)
    again.train(resume_from_checkpoint=str(saved))
    assert again.objective.memory.clock == 4 and again._rows_generated == 64
    price = [next(iter(t.objective.memory.states.values()))["lambda"] for t in (whole, again)]
    assert price == pytest.approx([0.04 - 4 * 0.3 * 0.02] * 2), "two steps, saved, and two more are four"
    before = json.dumps(again.objective.memory.state_dict())
    scores = again.evaluate(again.train_dataset)
    assert json.dumps(again.objective.memory.state_dict()) == before
    assert scores["eval_loss"] == scores["eval_loss"] and "eval_turnwise/ratio" in scores | again.state.log_history[-1]


# --------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("ppo", "a critic"), ("bpo", "a critic"), ("a2tgpo", "gold answer"), ("vcpo", "gradient norm"),
        ("dgpo", "Hellinger"), ("capo", "curvature"), ("alp", "noise into every layer"),
        ("remix", "before the last training step"),
        ("see_upo", "optimiser steps of its own"), ("so_grpo", "scales the finished gradient"), ("aspo", "verdict"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_words(method, reason):
    with pytest.raises(RecipeError, match=reason) as told:
        method_support.require_supported(recipes.build(method), method, MEASURED, "TRL's GRPOTrainer")
    assert f"turnwise train {method}" in str(told.value)


@needs_trl
def test_a_refusal_comes_at_construction(folder):
    with pytest.raises(RecipeError, match="ppo cannot be trained inside TRL's GRPOTrainer: it needs a critic"):
        ours(folder, "ppo", run=False)
    with pytest.raises(SettingError, match="no method 'sappo'"):
        ours(folder, "sappo", run=False)
    with pytest.raises(SettingError, match="no hyper-parameter 'tau'"):
        ours(folder, "sapo", {"tau": 1.0}, run=False)
    with pytest.raises(SettingError, match="beside a finished Recipe"):
        ours(folder, recipes.build("sapo"), {"pos": 1.0}, run=False)


OTHERS = {
    "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 4.0, "beta": 0.1, "importance_sampling_level": "sequence",
    "scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum", "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.5, "entropy_coef": 0.01, "use_adaptive_entropy": True, "use_bias_correction_kl": False,
    "sapo_temperature_neg": 2.0, "sapo_temperature_pos": 2.0, "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 9.0,
    "vllm_importance_sampling_clip_min": 0.1, "vllm_importance_sampling_cap": 9.0,
}  # fmt: skip


@needs_trl
@pytest.mark.parametrize("argument", CONFLICTS)
@pytest.mark.filterwarnings("ignore:.*vllm_importance_sampling_cap")
def test_an_argument_the_method_replaces_is_refused(folder, argument):
    with pytest.raises(SettingError, match=f"method='sapo' and GRPOConfig.*{argument}="):
        ours(folder, "sapo", run=False, **{argument: OTHERS[argument]})


@needs_trl
def test_steps_that_no_plan_can_see_are_refused(folder):
    with pytest.raises(SettingError, match=r"two generations.*write steps_per_generation=4"):
        ours(folder, "sapo", run=False, gradient_accumulation_steps=4, steps_per_generation=2)
    with pytest.raises(SettingError, match="scatter each group over 2"):
        ours(folder, "gbpo", run=False, gradient_accumulation_steps=2, steps_per_generation=4)
    with pytest.warns(UserWarning, match="the order of the dataset decides"):
        ours(folder, "scale_rl", run=False)


def main(folder: str, out: str, method: str) -> None:
    trainer, grads = ours(folder, method, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                          more={"rollout_func": fixed_rollout})  # fmt: skip
    if trainer.accelerator.is_main_process:
        torch.save(grads, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
