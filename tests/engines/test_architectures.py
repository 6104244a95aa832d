"""Generator and learner agree with the stock forward on every family of causal LMs, or refuse it in words."""

from __future__ import annotations

import asyncio
import copy
import itertools

import pytest
import torch
from support.families import FAMILIES, make_family
from transformers import PreTrainedModel

from turnwise.core.batch import pack
from turnwise.core.records import Group, Sampling, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.attention_interface import use_eager_attention
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.model_runner import StockRunner
from turnwise.engines.learner import packed_forward, policy_check
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.policy_check import same_policy
from turnwise.errors import SettingError

REFUSED = {"Bert": "not a causal model", "Llama4Text": "does not separate its decoder from its head"}
SERVED = [name for name in FAMILIES if name not in REFUSED]
STOCK = ["Gemma2", "GptOss", "Qwen3Next", "Mamba", "Mamba2", "Falcon", "Bloom", "GPTJ"]


def play(generator: LocalGenerator, dialogues: int = 5) -> list[Trajectory]:
    """Two turns each, of different lengths; some prompts are equal, so rows split and share."""

    async def one(n: int) -> Trajectory:
        session, turns = generator.open(n), []
        ids = [3, 5, 7, 9] if n % 2 else [3, 5, 7]
        new = ids
        for _ in range(2):
            done = await session.generate(ids, Sampling(max_tokens=4 + 3 * (n % 3)))
            turns.append(Turn(context=new, tokens=done.tokens, logp=done.logp, mass=done.mass, version=done.version))
            new = [11, 12]
            ids = [*ids, *done.tokens, *new]
        session.close()
        return Trajectory(f"t{n}", Task("probe", 0), tuple(turns), {})

    async def all_of_them() -> list[Trajectory]:
        return list(await asyncio.gather(*(one(n) for n in range(dialogues))))

    return asyncio.run(all_of_them())


def plain_logp(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """log π of the sampled tokens by one plain forward."""
    ids = [i for turn in trajectory.turns for i in (*turn.context, *turn.tokens)]
    logp = torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float(), 1)
    picked, at, out = logp.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1), 0, []
    for turn in trajectory.turns:
        at += len(turn.context)
        out.append(picked[at - 1 : at - 1 + len(turn.tokens)])
        at += len(turn.tokens)
    return torch.cat(out)


def batch_of(trajectories: list[Trajectory]):
    return pack([Group("g", trajectories[0].task, tuple(trajectories))])


@pytest.mark.parametrize("name", SERVED)
def test_generator_and_learner_compute_the_stock_policy(name):
    stock = make_family(name)
    generator = LocalGenerator(copy.deepcopy(stock), slots=8, context=64, stop_ids=(2,))
    trajectories = play(generator)
    learner = LocalLearner(copy.deepcopy(stock), LearnerSettings())
    assert same_policy(learner, trajectories, 1e-4).max < 1e-3
    use_eager_attention(stock)  # Doge of Transformers 5.17 is not causal with another one
    with torch.no_grad():
        expected = torch.cat([plain_logp(stock, t) for t in trajectories])
    measured = learner.measure(batch_of(trajectories), frozenset({Signal.LOGP}))[Signal.LOGP].x
    torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-4)


def test_a_model_that_is_causal_only_with_its_mask_gets_it(monkeypatch):
    """Doge adds a bias to the causal mask; a Transformers that leaves that mask out lets every position see the future."""
    from transformers.models.doge import modeling_doge

    make = modeling_doge.create_causal_mask
    unless_fused = lambda config, **rest: None if config._attn_implementation == "sdpa" else make(config=config, **rest)  # noqa: E731
    monkeypatch.setattr(modeling_doge, "create_causal_mask", unless_fused)
    model = make_family("Doge")
    with torch.no_grad():
        long, short = (model(input_ids=torch.tensor([[3, 5, 7, 9][:n]]), use_cache=False).logits[:, :2] for n in (4, 2))
    assert (long - short).abs().max() > 1e-2
    trajectories = play(LocalGenerator(copy.deepcopy(model), slots=8, context=64, stop_ids=(2,)))
    assert same_policy(LocalLearner(copy.deepcopy(model), LearnerSettings()), trajectories, 1e-4).max < 1e-3


LONG = [[(7 * i + n) % 30 + 3 for i in range(24)] for n in range(4)]  # prompts that are longer than the fault below begins


def sampled_with(model):
    """The runner that was chosen, and the run's own check of long dialogues that it samples, as for step 1."""
    generator = LocalGenerator(copy.deepcopy(model), slots=8, context=64, stop_ids=())
    trajectories = asyncio.run(policy_check.sample(generator, LONG, 0))
    return generator.model_runner, same_policy(LocalLearner(copy.deepcopy(model), LearnerSettings()), trajectories)


def test_a_mask_that_is_left_out_of_long_dialogues_only_is_noticed_at_construction(monkeypatch):
    from transformers.models.doge import modeling_doge

    make = modeling_doge.create_causal_mask

    def unless_long(config, **rest):
        long = rest["inputs_embeds"].shape[1] > 16 if rest.get("inputs_embeds") is not None else True
        return None if config._attn_implementation == "sdpa" and long else make(config=config, **rest)

    monkeypatch.setattr(modeling_doge, "create_causal_mask", unless_long)
    runner, report = sampled_with(make_family("Doge"))
    assert runner.model.config._attn_implementation == "eager" and report.mean < 1e-4


# the second shift is below a thousandth of the largest logit, and above the run's tolerance
@pytest.mark.parametrize("shift", [0.5, 0.003])
def test_a_cache_that_is_wrong_in_long_dialogues_only_is_not_used(monkeypatch, shift):
    from transformers.models.doge import modeling_doge

    forward = modeling_doge.DogeForCausalLM.forward

    def wrong_when_long(self, *args, past_key_values=None, **rest):
        out = forward(self, *args, past_key_values=past_key_values, **rest)
        out.logits = out.logits + 100.0  # a constant, which no policy depends on and a relative error does
        if past_key_values is not None and past_key_values.get_seq_length() > 16:
            out.logits[..., ::2] += shift
        return out

    monkeypatch.setattr(modeling_doge.DogeForCausalLM, "forward", wrong_when_long)
    runner, report = sampled_with(make_family("Doge"))
    assert not runner.cached and report.mean < 1e-4


def test_at_least_forty_families_are_served():
    assert len(SERVED) >= 40


@pytest.mark.parametrize("name", STOCK)
def test_what_was_refused_runs_by_its_own_forward(name, caplog):
    model = make_family(name)
    generator = LocalGenerator(copy.deepcopy(model), slots=4, context=32, stop_ids=(2,))
    assert isinstance(generator.model_runner, StockRunner)
    assert generator.describe().startswith("stock forward with its own cache")
    assert "decodes by its own forward, which is slow: " in caplog.text
    prepared = packed_forward.prepare(model)
    assert packed_forward.runs_separately(prepared.get_decoder())


@pytest.mark.parametrize("name", list(REFUSED))
def test_the_others_are_refused_in_words(name):
    with pytest.raises(SettingError, match=REFUSED[name]):
        packed_forward.prepare(make_family(name))


@pytest.mark.parametrize("name", ["Gemma2", "Mamba", "Granite", "GptOss"])
def test_gradients_are_those_of_the_stock_forward(name, kit):
    stock = make_family(name)
    batch = kit.weighted(kit.make_batch(restarts=False, temperature=1.0))
    learner = LocalLearner(copy.deepcopy(stock), LearnerSettings(lr=0.0, clip=float("inf")))
    learner._backward(batch, kit.Linear())
    stock.requires_grad_(True)
    loss, sequences, weights = torch.zeros(()), batch.sequences, batch["weight"].x
    for a, b in itertools.pairwise(sequences.start.tolist()):
        mine = ((sequences.sampled_at >= a) & (sequences.sampled_at < b)).nonzero().squeeze(1)
        logits = stock(input_ids=sequences.ids[None, a:b], use_cache=False).logits[0]
        at = sequences.sampled_at[mine]
        logp = torch.log_softmax(logits.float(), 1)[at - a - 1, sequences.ids[at]]
        loss = loss + (weights[mine] * (logp + 0.1 * logp**2)).sum()
    loss.backward()
    for (n, p), q in zip(learner.model.named_parameters(), stock.parameters()):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4, msg=n)


def test_a_published_weight_reaches_the_stock_runner():
    model = make_family("Gemma2")
    generator = LocalGenerator(copy.deepcopy(model), slots=4, context=64, stop_ids=(2,))
    before = play(generator, 2)
    weights = {name: p.detach() * 1.1 for name, p in model.named_parameters()}
    asyncio.run(generator.publish(weights, 1))
    after = play(generator, 2)
    assert before != after
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
        expected = plain_logp(model, after[0])
    torch.testing.assert_close(
        torch.tensor([x for turn in after[0].turns for x in turn.logp]), expected, rtol=1e-3, atol=1e-4
    )


def test_a_context_that_is_full_does_not_overflow_learned_positions():
    """Finished rows stay in the batch for some steps; their ids must not pass the end of a position table."""
    model = make_family("CodeGen")
    generator = LocalGenerator(model, slots=4, context=16, stop_ids=(2,), tick=8)

    async def run():
        sessions = [generator.open(n) for n in range(3)]

        async def one(n, session):
            done = await session.generate([3] * (4 + 5 * n), Sampling(max_tokens=50))
            session.close()
            return done

        return await asyncio.gather(*(one(n, session) for n, session in enumerate(sessions)))

    done = asyncio.run(run())
    assert all(len(c.tokens) <= 16 - (4 + 5 * n) for n, c in enumerate(done))
