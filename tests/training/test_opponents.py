"""Self-play against older policies and scripted players: what is trained, what a resume repeats, what is refused."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from support.agent_runs import SMALL, same, weights

from turnwise.config.settings import Settings
from turnwise.config.values import Opponents
from turnwise.core.records import Completion, Sampling, Stop, Task
from turnwise.engines.generator.paired_generators import OpponentPool
from turnwise.environments import load, make
from turnwise.errors import SettingError
from turnwise.rollout.episode import Episode, EpisodeLimits, OtherSeats
from turnwise.rollout.renderer import Renderer
from turnwise.store.checkpoint import load_checkpoint
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api
from turnwise.training.build import byte_tokenizer, seat_plan

GAME = {**SMALL, "cold_steps": 1, "cold_demos": 8, "steps": 4, "checkpoint_every": 1, "max_tokens": 6, "eval_tasks": 0}
GAME |= {"lr": 3e-3, "schedule": "constant", "warmup": 0, "env": "support.two_seats:Longer", "group_size": 4}
PAST = "past,keep=2,every=1"


class Says:
    """A session that answers with one text and keeps what it was asked."""

    def __init__(self, renderer, text, logp):
        self.tokens, self.logp, self.asked, self.closed = tuple(renderer.encode_turn(text)), logp, [], False

    async def generate(self, ids, sampling):
        self.asked.append(tuple(ids))
        n = len(self.tokens)
        return Completion(self.tokens, [self.logp] * n, [0.0] * n, [7] * n, Stop.TOKEN)

    def close(self):
        self.closed = True


def played(seat):
    renderer = Renderer(byte_tokenizer())
    mine, theirs = Says(renderer, "left 1", -0.5), Says(renderer, "right 1", -9.0)
    others = OtherSeats(seat, theirs, {"seat": seat})
    task, limits = Task("nim", 3), EpisodeLimits(turns=12, context=2000)
    episode = Episode("0", task, make("nim"), mine, renderer, Sampling(), limits, others=others)
    return asyncio.run(episode.run()), mine, theirs, renderer


@pytest.mark.parametrize("seat", load("nim").agents)
def test_only_the_tokens_of_the_policys_seat_are_recorded_as_sampled(seat):
    trajectory, mine, theirs, _ = played(seat)
    assert trajectory.turns and theirs.asked and theirs.closed
    assert {turn.agent for turn in trajectory.turns} == {seat} and trajectory.facts == {"seat": seat}
    assert all(tuple(turn.tokens) == mine.tokens and set(turn.logp) == {-0.5} for turn in trajectory.turns)


@pytest.mark.parametrize("seat", load("nim").agents)
def test_what_others_say_is_context_of_the_policys_next_turn(seat):
    trajectory, mine, theirs, _ = played(seat)
    read = []
    for turn, asked in zip(trajectory.turns, mine.asked, strict=True):
        read = [*([] if turn.restart else read), *turn.context]
        assert tuple(read) == asked  # what is trained on is what was sampled from
        read += turn.tokens
    theirs_read = sum(turn.context[i : i + len(theirs.tokens)] == theirs.tokens for turn in trajectory.turns
                      for i in range(len(turn.context)))  # fmt: skip
    assert theirs_read >= len(trajectory.turns) - 1


def test_success_is_that_of_the_policys_own_seat():
    outcomes = {seat: played(seat)[0] for seat in load("nim").agents}
    for trajectory in outcomes.values():
        assert trajectory.success == (trajectory.reward > 0) and trajectory.reward != 0


def test_all_episodes_of_a_task_have_the_same_seat_and_tasks_have_both():
    nim = load("nim")
    plan = seat_plan(Settings(env="nim", opponents="scripted:random"), nim, None, None)
    seat = lambda number: plan("0.0", Task("nim", number), nim(), None).seat  # noqa: E731
    seats = [seat(number) for number in range(40)]
    assert set(seats) == set(nim.agents) and seat(3) == seats[3]


def weight(version):
    return {"w": torch.full((2,), float(version))}


def test_the_pool_is_bounded_and_spread_over_the_run():
    pool = OpponentPool(keep=4, every=2)
    for version in range(41):
        pool.offer(weight(version), version)
        assert len(pool.policies) <= 4 and 0 in pool.policies
    versions = sorted(pool.policies)
    assert versions[-1] == 40 and max(b - a for a, b in pairwise(versions)) <= 20
    assert all((policy["w"] == version).all() for version, policy in pool.policies.items())


def test_the_pool_of_the_latest_holds_the_latest_and_copies_of_them():
    pool, live = OpponentPool(keep=3, every=1, latest=True), weight(0)
    for version in range(9):
        live["w"].fill_(version)
        pool.offer(live, version)
    assert {v: policy["w"][0].item() for v, policy in pool.policies.items()} == {6: 6.0, 7: 7.0, 8: 8.0}


def test_a_restored_pool_chooses_as_before_and_takes_no_version_twice():
    pool, again = OpponentPool(keep=3, every=1, seed=5), OpponentPool(keep=3, every=1, seed=5)
    for version in range(7):
        pool.offer(weight(version), version)
    again.load_state_dict(pool.state_dict())
    again.offer(weight(99), 6)  # a resumed run publishes its last version again
    assert again.policies[6]["w"][0] == 6
    assert [again.choose(v) for v in range(20)] == [pool.choose(v) for v in range(20)]
    assert len({pool.choose(v) for v in range(40)}) == 3


@pytest.mark.slow
def test_a_run_against_older_policies_resumes_bit_for_bit(tmp_path):
    whole = api.train(**{**GAME, "opponents": PAST}, out=str(tmp_path), name="whole")
    api.train(**{**GAME, "opponents": PAST, "steps": 2}, out=str(tmp_path), name="cut")
    saved = load_checkpoint(tmp_path / "cut" / "checkpoints").state["opponents"]
    assert [entry["version"] for entry in saved["policies"]] == [0, 2] and saved["newest"] == 2
    resumed = api.resume(str(tmp_path / "cut"), steps=4, quiet=True)
    assert same(weights(whole), weights(resumed))
    assert not same(weights(whole), load_file(tmp_path / "whole" / "initial" / "model.safetensors"))


@pytest.mark.slow
def test_batches_of_both_generators_do_not_depend_on_how_long_the_game_takes(tmp_path):
    game = {**GAME, "env": "support.two_seats:SlowLonger", "opponents": PAST, "steps": 3}
    one, other = (api.train(**game, out=str(tmp_path), name=name) for name in ("one", "other"))
    assert same(weights(one), weights(other))


def test_older_policies_play_with_rollouts_that_run_ahead(tmp_path):
    summary = api.train(**{**GAME, "opponents": PAST, "staleness": 1, "steps": 3}, out=str(tmp_path), name="x")
    assert summary["steps"] == 3


def trajectories(run):
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        return [t for summary in ledger.groups() for t in ledger.group(summary.group_id).trajectories]


@pytest.mark.parametrize("opponents", ["scripted:random", PAST])
def test_a_run_records_who_played_and_trains_no_token_of_the_opponent(opponents, tmp_path):
    api.train(**{**GAME, "opponents": opponents, "steps": 2}, out=str(tmp_path), name="x")
    played = trajectories(tmp_path / "x")
    assert len(played) == 16 and {t.facts["seat"] for t in played} <= {"first", "second"}
    for trajectory in played:
        assert trajectory.facts["opponent"] in ("random", 0.0, 1.0)
        assert {turn.agent for turn in trajectory.turns} == {trajectory.facts["seat"]} and len(trajectory.turns) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("passed", "past"),
        ("scripted", "scripted:NAME"),
        ("self,keep=2", "only `past`"),
        ("past,kep=2", "keep"),
        ("past,keep=0", "a number >= 1"),
        ("past,keep=two", "keep"),
        ("past,pool=oldest", "latest"),
    ],
)
def test_a_setting_that_names_nobody_is_refused(text, words):
    with pytest.raises(SettingError, match=words):
        Opponents.parse(text)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"env": "guess"}, "one seat"),
        ({"method": "arpo"}, "forks episodes"),
        ({"opponents": "past,every=x"}, "every"),
        ({"opponents": "scripted:nobody"}, "oracle"),
    ],
)
def test_other_players_are_refused_where_there_are_none(changed, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        api.train(**{**GAME, "opponents": PAST, **changed}, out=str(tmp_path))
