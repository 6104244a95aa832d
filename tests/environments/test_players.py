"""One contract for every environment of this room: good play wins, blind play does not, splits share nothing."""

import random

import pytest
from support.players import SPLITS, play, success_rate

from turnwise.environments import load, make
from turnwise.environments.checker.fuzz import malformed_actions
from turnwise.errors import SettingError

NAMES = ("countdown", "guess", "keydoor", "lookup")
LEVELS = [(name, difficulty) for name in NAMES for difficulty in load(name).difficulties]
MOST_BLIND = {("countdown", 1): 0.35, ("guess", 1): 0.4}  # few possibilities: 4 signs, 4 candidates


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "difficulty"), LEVELS)
def test_oracle_always_wins(name, difficulty, split):
    assert success_rate(name, difficulty, split, "oracle") == 1.0


@pytest.mark.parametrize(("name", "difficulty"), LEVELS)
def test_blind_play_rarely_wins(name, difficulty):
    assert success_rate(name, difficulty, "train", "random_action") <= MOST_BLIND.get((name, difficulty), 0.2)


@pytest.mark.parametrize(("name", "difficulty"), LEVELS)
def test_demonstrator_is_mediocre(name, difficulty):
    assert 0.3 <= success_rate(name, difficulty, "train", "demonstrate") <= 0.55


@pytest.mark.parametrize(("name", "difficulty"), LEVELS)
def test_seed_decides_everything(name, difficulty):
    def texts(seed):
        rng = random.Random(1)
        return play(make(name, difficulty), seed, lambda env: env.demonstrate(rng))[0]

    assert [texts(seed) for seed in range(10)] == [texts(seed) for seed in range(10)]
    assert len({str(make(name, difficulty).reset(seed)) for seed in range(30)}) > 10


@pytest.mark.parametrize(("name", "difficulty"), LEVELS)
def test_splits_share_no_episode(name, difficulty):
    train, held_out = (
        {str(play(make(name, difficulty, split), seed, lambda env: env.oracle())[0]) for seed in range(100)}
        for split in SPLITS
    )
    assert not train & held_out


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_short(name):
    for difficulty in load(name).difficulties:
        for seed in range(50):
            prompt = " ".join(message["content"] for message in make(name, difficulty).reset(seed))
            assert len(prompt.split()) <= 70
            assert prompt.isascii()


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_answered_and_counted(name):
    for label, action in malformed_actions(load(name).tools).items():
        env = make(name)
        env.reset(0)
        step = env.step(action)
        assert step.messages and step.messages[0]["content"], label
        assert step.reward == 0.0, label
        assert step.info["tool_errors"] == 1, label


@pytest.mark.parametrize("name", ("guess", "keydoor", "lookup"))
def test_after_the_end_nothing_is_earned(name):
    env = make(name)
    play(env, 3, lambda env: env.oracle())
    again = env.step(env.oracle())
    assert again.reward == 0.0 and again.terminated and again.info["success"]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_settings_raise(name):
    with pytest.raises(SettingError, match="no difficulty 9"):
        make(name, 9)
    with pytest.raises(SettingError, match="did you mean 'train'"):
        make(name, 1, "trian")
