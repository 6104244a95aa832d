"""Grammars: what is sampled matches, the learner finds the same masks from the ids, and nothing else changes."""

from __future__ import annotations

import asyncio
import importlib
import json
from dataclasses import replace

import pytest
import torch
from support.schemas import matches, random_grammar

from turnwise.core.batch import pack
from turnwise.core.records import Group, Sampling, Stop, Task, Trajectory
from turnwise.core.signals import Signal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.grammar import Grammars
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import GrammarError
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.rollout.episode import sampled_turn
from turnwise.store.trajectory_codec import decode, encode

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON, ANSWER = f"json_schema:{json.dumps(SCHEMA)}", "regex:(yes|no)( [a-z]{2,4}){1,3}\\."
STOP = (1,)  # <|end|>
TOKENIZER = tiny_tokenizer(['{"name": "red", "age": 12} yes no hello world'] * 4, 340)
PROMPT = TOKENIZER.encode("hello")


@pytest.fixture(scope="module")
def generator() -> LocalGenerator:
    return make()


def make(seed: int = 0, **options) -> LocalGenerator:
    grammars = Grammars(TOKENIZER, STOP)
    model = tiny_model(len(TOKENIZER), seed, hidden=64)
    return LocalGenerator(model, TOKENIZER, slots=16, context=512, stop_ids=STOP, grammars=grammars, **options)


def ask(generator, *samplings, ids=None, seed=0):
    """Completions of one batch."""

    async def one(session, sampling):
        try:
            return await session.generate(ids or PROMPT, sampling)
        finally:
            session.close()

    async def play():
        sessions = [generator.open(seed + n) for n in range(len(samplings))]
        return await asyncio.gather(*map(one, sessions, samplings))

    return asyncio.run(play())


def text(completion) -> str:
    return TOKENIZER.decode([token for token in completion.tokens if token not in STOP])


def batch_of(completions, replay, temperature=1.0):
    turns = [sampled_turn(c, context=tuple(PROMPT), temperature=temperature) for c in completions]
    members = tuple(Trajectory(str(n), Task("x", 0), (turn,)) for n, turn in enumerate(turns))
    return pack([Group("0", Task("x", 0), members)], replay)


def ratios(batch, learner):
    logp = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    return (logp - batch.behaviour.x - batch.mass.x).exp()


# ------------------------------------------------------------------ what is sampled matches


@pytest.mark.parametrize(
    "count", [pytest.param(24, id="a_few"), pytest.param(1000, id="a_thousand", marks=pytest.mark.thorough)]
)
def test_texts_under_random_schemas_and_regular_expressions_match(generator, count):
    done = 0
    for begin in range(0, count, 12):
        grammars = [random_grammar(seed) for seed in range(begin, min(count, begin + 12))]
        made = ask(generator, *(Sampling(max_tokens=200, grammar=grammar) for grammar in grammars), seed=begin)
        for grammar, completion in zip(grammars, made):
            if completion.stop == Stop.TOKEN:  # else its budget ended first
                assert matches(grammar, text(completion)), (grammar, text(completion))
                done += 1
    assert done >= 0.95 * count


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 2.0}])
def test_a_grammar_comes_before_every_filter(generator, how):
    for completion in ask(generator, *(Sampling(max_tokens=80, grammar=g, **how) for g in (ANSWER, PERSON))):
        assert completion.stop != Stop.TOKEN or matches(completion.grammar, text(completion))
    assert completion.stop == Stop.TOKEN  # the schema bounds its texts


def test_requests_without_a_grammar_are_the_same_beside_one_with_a_grammar(generator):
    free = Sampling(max_tokens=12)
    alone, (beside, _) = ask(generator, free)[0], ask(generator, free, Sampling(max_tokens=40, grammar=PERSON))
    # ``ask`` names sessions by their place, so both have the same seed
    assert beside.tokens == alone.tokens and not beside.grammar
    assert torch.allclose(torch.tensor(beside.logp), torch.tensor(alone.logp), atol=1e-6)  # another size of batch


def test_a_stop_string_ends_a_text_inside_its_grammar(generator):
    (made,) = ask(generator, Sampling(max_tokens=80, grammar=PERSON, stop=('"age"',)))
    assert made.stop == Stop.STRING and text(made).endswith('"age": ')  # one token


def test_a_turn_goes_on_where_it_was_begun(generator):
    (whole,) = ask(generator, Sampling(max_tokens=80, grammar=PERSON))
    head = whole.tokens[:9]
    (rest,) = ask(generator, Sampling(max_tokens=80, grammar=PERSON, begun=9), ids=[*PROMPT, *head])
    assert [*head, *rest.tokens] == list(whole.tokens) and rest.begun == 9
    with pytest.raises(GrammarError, match="does not allow"):
        ask(generator, Sampling(grammar=PERSON, begun=len(PROMPT)))


# ------------------------------------------------------------------ the learner


@pytest.mark.parametrize("how", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.7}, {"temperature": 0.0}])
def test_the_ratio_of_an_unchanged_policy_is_one(generator, how):
    made = ask(generator, *(Sampling(max_tokens=60, grammar=g, **how) for g in (PERSON, ANSWER, "", PERSON)))
    learner = LocalLearner(tiny_model(len(TOKENIZER), 0, hidden=64), LearnerSettings())
    learner.replay = generator.grammars.replay
    batch = batch_of(made, learner.replay, how.get("temperature", 1.0))
    away = (ratios(batch, learner) - 1).abs()
    assert away.mean() < 1e-6 and away.max() < 5e-6  # float32 rounds log-probabilities near 8 to 5e-7
    double = LocalLearner(tiny_model(len(TOKENIZER), 0, hidden=64), LearnerSettings(dtype="float64"))
    torch.testing.assert_close(ratios(batch, double), torch.ones_like(ratios(batch, double)), atol=5e-6, rtol=0)


def test_the_mean_ratio_under_the_sampler_stays_one_after_the_policy_moved(generator):
    """Over all ids that a mask allows, Σ sampler · ratio = Σ policy over the mask = 1: only where both are normalised over it."""
    (made,) = ask(generator, Sampling(max_tokens=30, grammar=PERSON))
    moved = LocalLearner(tiny_model(len(TOKENIZER), 7, hidden=64), LearnerSettings(dtype="float64"))
    place = 5
    masks = generator.grammars.replay(PERSON, (), made.tokens)
    bits = torch.frombuffer(bytearray(masks[place]), dtype=torch.uint8)
    ids = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().nonzero().squeeze(1).tolist()
    assert 1 < len(ids) < len(TOKENIZER)
    others = [replace(made, tokens=[*made.tokens[:place], i], **cut(made, place + 1)) for i in ids]
    batch = batch_of(others, generator.grammars.replay)
    logp = moved.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x.view(len(ids), -1)[:, place]
    assert float(logp.exp().sum()) == pytest.approx(1, abs=1e-6)


def cut(completion, size):
    return {name: list(getattr(completion, name))[:size] for name in ("logp", "mass", "version")}


def test_masks_follow_their_tokens_through_splits_and_devices(generator):
    made = ask(generator, *(Sampling(max_tokens=60, grammar=g) for g in (PERSON, "", ANSWER, PERSON)))
    batch = batch_of(made, generator.grammars.replay)
    sizes = [len(c.tokens) for c in made]
    for order in ([2, 0], [1], [1, 2, 3]):
        part = batch.select(order)
        expected = torch.cat([batch.sequences.kept.mask_of.split(sizes)[k] for k in order])
        assert torch.equal(part.sequences.kept.mask_of, expected)
    assert len(batch.sequences.kept.masks) < sum(sizes) / 2  # few are distinct


def test_the_ledger_keeps_the_grammar_and_not_its_masks(generator):
    (made,) = ask(generator, Sampling(max_tokens=60, grammar=PERSON))
    turn = sampled_turn(made, context=tuple(PROMPT))
    trajectory = Trajectory("0", Task("x", 0), (turn,))
    record, blob = encode(trajectory)
    assert decode(record, blob) == trajectory and turn.grammar == PERSON and not turn.kept


def test_a_learner_without_a_tokenizer_says_so(generator):
    (made,) = ask(generator, Sampling(max_tokens=8, grammar=PERSON))
    with pytest.raises(GrammarError, match="give the learner"):
        batch_of([made], LocalLearner(tiny_model(len(TOKENIZER), 0, hidden=64)).replay)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('json_schema:{"type": "objct"}', "Invalid type: objct"),
        ("json_schema:{oops", "cannot be obeyed"),
        ("regex:(a", "unclosed group"),
        ("regex:a(?=b)", "look-around"),
        ("prose:anything", "write json_schema:, regex: or lark:"),
        ("regex:" + "a" * (1 << 19), "at most"),
    ],
)
def test_a_grammar_that_cannot_be_obeyed_is_refused_before_a_token_is_sampled(generator, grammar, words):
    with pytest.raises(GrammarError, match=words):
        ask(generator, Sampling(grammar=grammar))
    assert not generator.sessions


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(GrammarError, match=r"pip install 'turnwise-rl\[grammar\]'"):
        Grammars(TOKENIZER, STOP).start(PERSON)
    monkeypatch.undo()
    with pytest.raises(GrammarError, match="no fast form"):
        Grammars(object(), STOP).start(PERSON)
