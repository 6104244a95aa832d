"""verl's own functions are the oracle: what we put in its registries equals what it computes itself, cut as it cuts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from turnwise import Recipe, recipes
from turnwise.algebra.gate import Clip
from turnwise.errors import SettingError
from turnwise.integrations import padded

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from turnwise.integrations import verl, verl_support

pytestmark = pytest.mark.filterwarnings("ignore:turnwise/.* averages by")
NAMES = verl.register()
LOSSES = [name.removeprefix("turnwise/") for name in NAMES.losses]
ESTIMATORS = [name.removeprefix("turnwise/") for name in NAMES.estimators]
ROWS, LENGTH = 6, 9


def ragged(seed: int = 0) -> torch.Tensor:
    """Rows of other lengths, some with a tool's answer in the middle."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=random)
    mask[0] = True
    mask[0, 3:5] = False
    mask[2, 1] = False
    return mask


def step(seed: int = 0, along: bool = True) -> dict[str, torch.Tensor]:
    """A step whose masked positions hold nonsense that must not matter."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    mask = ragged(seed)
    old = -2 * draw(ROWS, LENGTH).abs() - 0.1
    logp = torch.where(mask, (old + 0.7 * draw(ROWS, LENGTH)).clamp(max=-1e-3), old)
    adv = 2 * (draw(ROWS, LENGTH) if along else draw(ROWS, 1).expand(ROWS, LENGTH))
    return {"old_log_prob": old, "log_prob": logp, "advantages": adv * mask, "response_mask": mask}


def actor(mode: str = "token-mean", **changes) -> ActorConfig:
    policy = {
        k: changes.pop(k) for k in list(changes) if k in ("clip_cov_ratio", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    }
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, **changes)
    for key, value in policy.items():
        object.__setattr__(config.policy_loss, key, value)
    if config.loss_scale_factor is not None:
        config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    return config


def slope(function, data: dict, config: ActorConfig, **more) -> tuple[torch.Tensor, torch.Tensor]:
    logp = data["log_prob"].clone().requires_grad_()
    data = {**data, "log_prob": logp, "response_mask": data["response_mask"].to(more.pop("mask_type", torch.bool))}
    loss, metrics = function(**data, loss_agg_mode=config.loss_agg_mode, config=config, **more)
    assert all(np.isfinite(x) for x in metrics.values())
    return loss.detach(), torch.autograd.grad(loss, logp)[0] * data["response_mask"]


# --------------------------------------------------------------------- lookup


def test_verls_own_lookup_finds_every_method():
    for name in NAMES.losses:
        assert core_algos.get_policy_loss_fn(name).__module__ == "turnwise.integrations.verl"
    for name in NAMES.estimators:
        assert core_algos.get_adv_estimator_fn(name).__module__ == "turnwise.integrations.verl_advantages"
    assert len(NAMES.losses) > 35 and len(NAMES.estimators) > 55


def test_every_method_is_registered_or_left_out_with_a_reason():
    out = verl.unsupported_methods()
    for name in verl_support.METHODS:
        assert (name in LOSSES) != ("loss: it " in out.get(name, "")), name
        assert (name in ESTIMATORS) != ("advantage: it " in out.get(name, "")), name


def test_options_and_own_recipes_reach_the_registry():
    mine = Recipe(advantage=recipes.build("rloo").advantage, gate=Clip(0.1, 0.3))
    verl.register(options={"sapo": {"pos": 2.0}}, methods={"mine": mine})
    try:
        data, config = step(), actor("seq-mean-token-mean", tau_pos=2.0)
        ours, theirs = (slope(core_algos.get_policy_loss_fn(n), data, config) for n in ("turnwise/sapo", "sapo"))
        torch.testing.assert_close(ours, theirs)
        assert core_algos.get_policy_loss_fn("turnwise/mine") and core_algos.get_adv_estimator_fn("turnwise/mine")
    finally:
        core_algos.POLICY_LOSS_REGISTRY.pop("turnwise/mine"), core_algos.ADV_ESTIMATOR_REGISTRY.pop("turnwise/mine")
        verl.register()


def test_wrong_options_are_told_in_words():
    with pytest.raises(SettingError, match="sapo"):
        verl.register(options={"sappo": {}})
    with pytest.raises(SettingError, match="no hyper-parameter"):
        verl.register(options={"sapo": {"posi": 2.0}})
    with pytest.raises(SettingError, match="vcpo cannot run inside verl: it rescales"):
        verl.register(options={"vcpo": {"cap": 4.0}})
    with pytest.raises(SettingError, match="'verl' for its loss_agg_mode"):
        verl.register(aggregate="token-mean")


@pytest.mark.slow
def test_the_plugin_registers_in_every_process_that_imports_verl():
    code = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; f('turnwise/sapo')"
    env = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "turnwise.integrations.verl_plugin"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, check=True)


# ----------------------------------------------------------- losses against verl's

FAR = 1e6  # verl's dual clip, out of the way
ROW = {"mode": "seq-mean-token-mean"}
NARROW = {**ROW, "clip_ratio_low": 0.1, "clip_ratio_high": 0.1}
TV = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}
SAME = [  # ours, verl's, verl's settings, whether A may differ inside a row
    ("ppo", {"dual": 3.0}, "vanilla", {}, True),
    ("dapo", {}, "vanilla", {"clip_ratio_high": 0.28, "clip_ratio_c": FAR}, True),
    ("grpo", {}, "vanilla", {**ROW, "clip_ratio_c": FAR}, True),
    ("two_sided_grpo", {"delta": 3.0}, "vanilla", ROW, True),
    ("dr_grpo", {"length": 7}, "vanilla", {"mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7, "clip_ratio_c": FAR}, True),
    ("gspo", {"low": 0.1, "high": 0.1}, "gspo", NARROW, False),
    ("gspo_token", {"low": 0.1, "high": 0.1}, "gspo", NARROW, True),
    ("sapo", {}, "sapo", ROW, True),
    ("gmpo", {"low": 0.2, "high": 0.3}, "geo_mean", {**ROW, "clip_ratio_high": 0.3}, False),
    ("kl_cov", {"fraction": 0.2, "beta": 0.7}, "kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}, True),
    # with a quota for all candidates, the lot decides nothing
    ("clip_cov", {"fraction": 1.0, "clip_low": 0.2, "clip_high": 0.2}, "clip_cov", {"clip_cov_ratio": 1.0}, True),
]  # fmt: skip
SLOPE = [  # verl writes these with log π where ours has a 1 of the same gradient: equal slopes, other loss values
    ("cispo", {"high": 1.2}, "cispo", {"clip_ratio_low": 1.0}, True),
    ("rloo", {}, "gpg", {"mode": "seq-mean-token-sum"}, True),
    ("asym_re", {}, "gpg", {}, True),
    ("kimi_opmd", {"tau": 0.35}, "dro", {"dro_beta": 0.7}, True),
    ("dppo_tv", {"low": 0.05, "high": 0.1}, "dppo_tv", TV, True),
    ("dppo_kl", {"limit": 0.01}, "dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 20.0}, True),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [*SAME, *SLOPE], ids=lambda case: f"{case[0]}-{case[2]}")
def test_losses_equal_verls_own(case, seed):
    name, hyper, other, settings, along = case
    if other not in core_algos.POLICY_LOSS_REGISTRY:
        pytest.skip(f"this verl has no {other}")
    data, config = step(seed, along), actor(**settings)
    ours = slope(verl.loss(name, **hyper), data, config)
    theirs = slope(core_algos.get_policy_loss_fn(other), data, config, mask_type=torch.float64)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-9)
    if case in SAME:
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-9)
    assert ours[1].abs().sum() > 0


@pytest.mark.parametrize("name, other", [("sapo", "sapo"), ("gspo_token", "gspo"), ("grpo", "vanilla")])
def test_rollout_correction_weights_are_multiplied_in(name, other):
    hyper = {"low": 0.2, "high": 0.2} if name.startswith("gspo") else {}
    data, config = step(4), actor("seq-mean-token-mean", clip_ratio_c=FAR)
    weights = torch.rand(ROWS, LENGTH, dtype=torch.float64) + 0.5
    ours = slope(verl.loss(name, **hyper), data, config, rollout_is_weights=weights)
    theirs = slope(core_algos.get_policy_loss_fn(other), data, config, rollout_is_weights=weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_verls_average_on_request(mode):
    data, config = step(5), actor(mode, clip_ratio_c=FAR)
    ours = slope(verl.loss("grpo", aggregate="verl"), data, config)
    torch.testing.assert_close(
        ours, slope(core_algos.get_policy_loss_fn("vanilla"), data, config), rtol=1e-6, atol=1e-9
    )


def test_another_average_than_the_methods_is_told():
    with pytest.warns(UserWarning, match="averages by seq-mean-token-mean"):
        slope(verl.loss("grpo"), step(), actor("token-mean"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slope(verl.loss("grpo"), step(), actor("seq-mean-token-mean"))


# ------------------------------------------------------------- micro-batches


def cut(data: dict, rows: slice) -> dict:
    return {key: value[rows] for key, value in data.items()}


def summed(name: str, data: dict, parts: list[slice], ranks: int = 1) -> torch.Tensor:
    """The slope as verl accumulates it: a loss for each micro-batch, gradients averaged over the ranks."""
    config = actor(verl_support.mode(recipes.build(name)))
    config.global_batch_info.update(
        dp_size=ranks, batch_num_tokens=int(data["response_mask"].sum()), global_batch_size=ROWS, loss_scale_factor=None
    )
    return torch.cat([slope(verl.loss(name), cut(data, rows), config)[1] for rows in parts]) / ranks


PLAIN = [name for name in LOSSES if not verl_support.plans_over_step(recipes.build(name))]


@pytest.mark.parametrize("name", PLAIN)
def test_micro_batches_and_ranks_sum_to_the_whole(name):
    data = step(1)
    whole = slope(verl.loss(name), data, actor(verl_support.mode(recipes.build(name))))[1]
    for ranks in (1, 2):
        pieces = summed(name, data, [slice(0, 2), slice(2, 3), slice(3, 6)], ranks)
        torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-10)


def test_few_losses_plan_over_the_whole_step():
    assert set(LOSSES) - set(PLAIN) == {"bapo", "sequence_mask", "clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", LOSSES)
def test_the_whole_step_equals_our_own_trainer(name):
    """``padded.loss`` is the objective of our learner; what verl adds itself is taken out of both."""
    data = step(2)
    fraction = {"clip_cov": {"fraction": 1.0}}.get(name, {})  # lots are drawn by other seeds there
    recipe = verl_support.without_verl_terms(recipes.build(name, **fraction))
    logp = data["log_prob"].clone().requires_grad_()
    loss, _ = padded.loss(recipe, logp, data["old_log_prob"], data["response_mask"], advantages=data["advantages"])
    ours = slope(verl.loss(name, **fraction), data, actor(verl_support.mode(recipe)))
    torch.testing.assert_close(
        ours[1], torch.autograd.grad(loss, logp)[0] * data["response_mask"], rtol=1e-6, atol=1e-10
    )
    torch.testing.assert_close(ours[0], loss.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_finite_whatever_the_rows(name):
    data = {key: value.float() if value.is_floating_point() else value for key, value in step(3).items()}
    data["response_mask"][1] = False  # a rejected row
    config = actor()
    config.global_batch_info.update(dp_size=1, batch_num_tokens=99, global_batch_size=ROWS)
    loss, grad = slope(core_algos.get_policy_loss_fn(f"turnwise/{name}"), data, config)
    assert loss.isfinite() and grad.isfinite().all() and grad.abs().sum() > 0
    data["response_mask"] = torch.zeros_like(data["response_mask"])  # a micro-batch of rejected rows
    loss, grad = slope(core_algos.get_policy_loss_fn(f"turnwise/{name}"), data, config)
    assert loss == 0 and (grad == 0).all()


# ------------------------------------------------------------------ advantages

UIDS = np.array(["a", "b", "a", "b", "a", "b"], dtype=object)


def rewards(mask: torch.Tensor, seed: int = 0, along: bool = False) -> torch.Tensor:
    """An outcome on the last sampled token, and with ``along`` something on every sampled token, as a KL in the reward is."""
    random = torch.Generator().manual_seed(seed)
    last = (torch.arange(LENGTH) * mask).argmax(1)
    out = torch.zeros(mask.shape).scatter(1, last[:, None], torch.randn(len(mask), 1, generator=random))
    return out + mask * 0.1 * torch.randn(mask.shape, generator=random) * along


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name, other",
    [
        ("grpo", "grpo"),
        ("dr_grpo", "grpo"),
        ("rloo", "rloo"),
        ("rloo", "rloo_vectorized"),
        ("reinforce_pp", "reinforce_plus_plus"),
        ("reinforce_pp_baseline", "reinforce_plus_plus_baseline"),
    ],
)
def test_estimators_equal_verls_own(name, other, seed):
    mask, config = ragged(seed), AlgoConfig(gamma=0.9, norm_adv_by_std_in_grpo=name == "grpo")
    given = {"token_level_rewards": rewards(mask, seed, along=True), "response_mask": mask.float(), "config": config}
    ours, returns = core_algos.get_adv_estimator_fn(f"turnwise/{name}")(**given, index=UIDS)
    by_std = {"norm_adv_by_std_in_grpo": name == "grpo"} if other == "grpo" else {}
    theirs, expected = core_algos.get_adv_estimator_fn(other)(**given, index=UIDS, **by_std)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if other == "reinforce_plus_plus":
        torch.testing.assert_close(returns, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_verls_own(seed):
    mask = ragged(seed)
    given = {"token_level_rewards": rewards(mask, seed, along=True), "values": torch.randn(ROWS, LENGTH)}
    theirs, expected = core_algos.get_adv_estimator_fn("gae")(**given, response_mask=mask.float(), gamma=0.9, lam=0.8)
    ours, returns = verl.estimator("ppo")(**given, response_mask=mask, config=AlgoConfig(gamma=0.9, lam=0.8))
    torch.testing.assert_close(ours, theirs * mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns, expected * mask, rtol=1e-4, atol=1e-5)


def test_a_group_of_one_gets_nothing_where_verl_gives_its_raw_reward():
    mask, uids = ragged(), np.array(["a", "a", "a", "a", "a", "alone"], dtype=object)
    given = {"token_level_rewards": rewards(mask), "response_mask": mask.float(), "index": uids}
    ours, _ = core_algos.get_adv_estimator_fn("turnwise/grpo")(**given)
    theirs, _ = core_algos.get_adv_estimator_fn("grpo")(**given)
    torch.testing.assert_close(ours[:5], theirs[:5], rtol=1e-4, atol=1e-5)
    assert (ours[5] == 0).all() and theirs[5].abs().sum() > 0
    ours, theirs = (core_algos.get_adv_estimator_fn(n)(**given)[0] for n in ("turnwise/rloo", "rloo"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # both compare it with 0


def test_rewards_off_the_sampled_tokens_and_rejected_rows_still_count():
    mask = ragged()
    paid = rewards(mask)
    paid[0, 4] = 2.0  # on a tool's answer
    mask[1] = False  # rejected by rollout correction, and still a sibling
    given = {"token_level_rewards": paid, "response_mask": mask.float(), "index": UIDS}
    ours, theirs = (core_algos.get_adv_estimator_fn(n)(**given)[0] for n in ("turnwise/grpo", "grpo"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_discounts_are_verls_unless_the_options_name_them():
    mask, config = ragged(), AlgoConfig(gamma=0.5)
    given = {"token_level_rewards": rewards(mask), "response_mask": mask, "config": config}
    credit_from_config, by_option = (
        verl.estimator("reinforce_pp")(**given),
        verl.estimator("reinforce_pp", gamma=1.0)(**given),
    )
    assert not torch.equal(credit_from_config[1], by_option[1])
    torch.testing.assert_close(
        by_option[1][1][mask[1]], given["token_level_rewards"][1].sum().expand(int(mask[1].sum()))
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_finite(name):
    mask = ragged(1)
    given = {
        "token_level_rewards": rewards(mask, 1),
        "response_mask": mask.long(),
        "index": UIDS,
        "config": AlgoConfig(),
    }
    adv, returns = core_algos.get_adv_estimator_fn(f"turnwise/{name}")(**given)
    assert adv.shape == mask.shape and adv.isfinite().all() and returns.isfinite().all()
    assert (adv[~mask] == 0).all() and adv.abs().sum() > 0 and adv.dtype == torch.float32


def test_what_an_estimator_lacks_is_told_in_words():
    mask = ragged()
    given = {"token_level_rewards": rewards(mask), "response_mask": mask}
    with pytest.raises(SettingError, match="pass index"):
        verl.estimator("grpo")(**given)
    with pytest.raises(SettingError, match="critic's values"):
        verl.estimator("ppo")(**given)
    with pytest.raises(SettingError, match="up to 9"):
        verl.estimator("dapo", limit=8, cache=2)(**given, index=UIDS)
    with pytest.raises(SettingError, match="gradient norm"):
        verl.estimator("oblr_po")


# ---------------------------------------------------------- verl's own callers


def test_verls_trainer_calls_our_estimator():
    trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    from verl import DataProto

    mask = ragged()
    tensors = {"token_level_rewards": rewards(mask), "response_mask": mask.long()}
    found = {}
    for name in ("turnwise/grpo", "grpo"):
        data = DataProto.from_dict(dict(tensors), non_tensors={"uid": UIDS})
        found[name] = trainer.compute_advantage(data, name, config=AlgoConfig(adv_estimator=name)).batch["advantages"]
    torch.testing.assert_close(found["turnwise/grpo"], found["grpo"], rtol=1e-4, atol=1e-5)


def test_verls_engine_calls_our_loss_micro_batch_by_micro_batch():
    losses = pytest.importorskip("verl.workers.utils.losses")
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import assign_non_tensor

    torch.manual_seed(0)
    lengths, prompt = [4, 6, 3], 2
    whole = {
        "old_log_probs": [-torch.rand(n) for n in lengths],
        "advantages": [torch.randn(1).repeat(n) for n in lengths],
    }
    whole["response_mask"] = [torch.ones(n, dtype=torch.long) for n in lengths]
    whole["responses"], whole["prompts"] = whole["response_mask"], [torch.zeros(prompt, dtype=torch.long)] * 3
    sampled = [torch.randn(prompt + n) - 2 for n in lengths]

    def train(name: str, parts: list[list[int]]) -> torch.Tensor:
        config = actor("seq-mean-token-mean", clip_ratio_c=FAR)
        object.__setattr__(config.policy_loss, "loss_mode", name)
        logp = [x.clone().requires_grad_() for x in sampled]
        for rows in parts:
            nested = {
                k: torch.nested.as_nested_tensor([v[i] for i in rows], layout=torch.jagged) for k, v in whole.items()
            }
            data = TensorDict(nested, batch_size=[len(rows)])
            assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(lengths), global_batch_size=3)
            loss, _ = losses.ppo_loss(config, {"log_probs": torch.cat([logp[i] for i in rows])}, data)
            loss.backward()
        return torch.cat([x.grad for x in logp])

    expected = train("vanilla", [[0, 1, 2]])
    for parts in ([[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]]):
        torch.testing.assert_close(train("turnwise/grpo", parts), expected)


def test_overrides_name_real_settings_of_verl():
    known = {f"algorithm.{key}" for key in vars(AlgoConfig())} | {
        f"actor_rollout_ref.actor.{key}" for key in vars(actor())
    }
    for name in set(LOSSES) & set(ESTIMATORS) | {"ppo"}:
        for line in verl.overrides(name):
            key = line.split("=")[0]
            assert key == "critic.cliprange_value" or any(key == k or key.startswith(k + ".") for k in known), line
    assert "actor_rollout_ref.actor.kl_loss_coef=0.04" in verl.overrides("grpo")
    assert "algorithm.kl_ctrl.kl_coef=0.01" in verl.overrides("reinforce_pp")
    assert "algorithm.adv_estimator=gae" in verl.overrides("ppo")


def test_the_kl_verl_adds_is_the_one_taken_out():
    """grpo's loss here plus verl's own KL term is our whole grpo."""
    data, beta = step(6), 0.04
    reference = data["old_log_prob"] + 0.1
    logp, mask = data["log_prob"].clone().requires_grad_(), data["response_mask"]
    whole, _ = padded.loss("grpo", logp, data["old_log_prob"], mask, advantages=data["advantages"], reference=reference)
    kl = core_algos.agg_loss(core_algos.kl_penalty(logp, reference, "k3"), mask, "seq-mean-token-mean")
    part = slope(verl.loss("grpo", beta=beta), data, actor("seq-mean-token-mean"))[0]
    torch.testing.assert_close(part + beta * kl.detach(), whole.detach(), rtol=1e-6, atol=1e-9)


def test_a_config_without_global_counts_is_averaged_over_the_micro_batch():
    """Older verl: its actor multiplies each loss by the micro-batch's share itself."""
    data = step(1)
    config = SimpleNamespace(loss_agg_mode="seq-mean-token-mean")
    halves = [slope(verl.loss("grpo"), cut(data, rows), config)[1] / 2 for rows in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(torch.cat(halves), slope(verl.loss("grpo"), data, config)[1], rtol=1e-6, atol=1e-10)


# ---------------------------------------------------------------------- page


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text()
    try:
        for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL):
            exec(compile(block, "verl.md", "exec"), {})
    finally:
        verl.register()
