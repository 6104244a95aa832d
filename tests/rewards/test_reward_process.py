"""Reward functions in processes that can be killed: hangs, crashes, memory, prints, and what becomes of the other answers."""

from __future__ import annotations

import math
import os
import signal
import threading

import pytest

from turnwise.errors import HostFault, SettingError
from turnwise.rewards.conventions import AnswerGroup, AnswerSample
from turnwise.rewards.functions import LocalReward, RewardLimits, check_rewards, open_rewards
from turnwise.rewards.process import ProcessSettings, ScoringPool
from turnwise.rewards.spec import RewardSpec, parse_rewards

SOURCE = """
import os, sys, time
from fractions import Fraction

def one(completion, **columns):
    if completion == "loop":
        while True: pass
    if completion == "sleep": time.sleep(1000)
    if completion == "exit": os._exit(3)
    if completion == "leave": sys.exit(0)
    if completion == "integer": return float(Fraction("1e30000000"))
    if completion == "memory": return len(bytearray(1 << 40))
    if completion == "deep": return one_deep()
    if completion == "raise": raise KeyError("x")
    if completion == "print": print("hello"); sys.stdin.read()
    return {"nan": float("nan"), "huge": 10**400, "text": "seven", "none": None, "dict": {"score": 2, "acc": 0.5, "pred": "x"},
            "empty": {}, "list": [1], "true": True, "verdict": {"score": 0.5, "success": False}}.get(completion, 1)

def one_deep(): return one_deep()

def together(prompts, completions, completion_ids=None, **columns):
    if "sleep" in completions: time.sleep(1000)
    if "raise" in completions: raise ValueError("no")
    if "short" in completions: return [1.0]
    return [float(c == max(completions)) for c in completions]

async def later(completion, **columns):
    import asyncio
    await asyncio.sleep(1000 if completion == "sleep" else 0)
    return len(completion)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": 2.0 * (data_source == "d")}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos=None, **options):
    assert len({len(x) for x in (data_sources, solution_strs, ground_truths, extra_infos)}) == 1
    return [{"score": float(s == g), "n": e["n"] * (d == "d")}
            for d, s, g, e in zip(data_sources, solution_strs, ground_truths, extra_infos)]

def needs_label(completion, label): return 1.0
def takes_nothing(): return 1.0
def all_columns(completions, **columns): return [float(len(columns["label"]))] * len(completions)
BROKEN = 3
"""
LIMITS = RewardLimits(seconds=3.0, memory_mib=1024)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def reward(file):
    opened = {}

    def of(name: str):
        if name not in opened:
            opened[name] = open_rewards(parse_rewards([f"{file}:{name}"]), LIMITS)[0]
        return opened[name]

    yield of
    for function in opened.values():
        function.close()


def group(*texts: str, prompt="question", **columns) -> AnswerGroup:
    answers = tuple(AnswerSample(t, [{"role": "assistant", "content": t}], [1, 2]) for t in texts)
    return AnswerGroup(prompt, answers, columns)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("loop", "no answer within 3 s"),
        ("sleep", "no answer within 3 s"),
        ("integer", "no answer within 3 s"),
        ("exit", "ended with status 3"),
        ("leave", "SystemExit"),
        ("memory", "MemoryError"),
        ("deep", "RecursionError"),
        ("raise", "KeyError: 'x' (my_rewards.py line"),
        ("nan", "returned nan"),
        ("huge", "beyond the range"),
        ("text", "returned 'seven'"),
        ("list", "returned [1]"),
        ("empty", "with 'score'"),
    ],
)
def test_one_bad_answer_fails_alone_and_the_pool_goes_on(reward, answer, words):
    before, bad, after = reward("one").score(group("a", answer, "b"))
    assert words in bad.fault and bad.score is None
    assert (before.score, after.score) == (1.0, 1.0) and not before.fault + after.fault


def test_what_a_function_may_return(reward):
    outcomes = reward("one").score(group("none", "dict", "true", "verdict", "print"))
    assert [o.score for o in outcomes] == [None, 2.0, 1.0, 0.5, 1.0]
    assert [o.success for o in outcomes] == [None, None, True, False, None]
    assert outcomes[1].extra == {"acc": 0.5} and not any(o.fault for o in outcomes)


@pytest.mark.slow
def test_a_function_of_the_whole_group_sees_it_without_the_culprit(reward):
    outcomes = reward("together").score(group("a", "sleep", "z"))
    assert [o.score for o in outcomes] == [0.0, None, 1.0] and "no answer" in outcomes[1].fault
    assert [o.score for o in reward("together").score(group("a", "raise", "b"))] == [0.0, None, 1.0]


def test_a_list_of_another_length_is_refused(reward):
    outcomes = reward("together").score(group("short", "b"))
    assert all("1 values for 2 answers" in o.fault for o in outcomes if o.fault) and outcomes[1].fault


@pytest.mark.slow
def test_coroutines_run_at_the_same_time_and_are_cut(reward):
    outcomes = reward("later").score(group("aa", "sleep", "b"))
    assert [o.score for o in outcomes] == [2.0, None, 1.0]


def test_the_signature_with_solution_str(reward):
    function = reward("verl")
    check_rewards([function], ["data_source", "ground_truth"])
    outcomes = function.score(group("7", "8", data_source="d", ground_truth="7"))
    assert [o.score for o in outcomes] == [1.0, 0.0] and outcomes[0].extra == {"source": 2.0}


def test_the_signature_with_solution_strs_gets_the_columns_as_lists(reward):
    function = reward("verl_batch")
    check_rewards([function], ["data_source", "ground_truth"])
    outcomes = function.score(group("7", "8", data_source="d", ground_truth="7", extra_info={"n": 3}))
    assert [o.score for o in outcomes] == [1.0, 0.0] and outcomes[1].extra == {"n": 3.0}
    with pytest.raises(SettingError, match="requires 'ground_truth', and no row has such a column"):
        check_rewards([function], ["data_source", "truth"])


def test_conversational_prompts_give_message_lists(reward, tmp_path):
    (tmp_path / "shapes.py").write_text(
        "def f(prompts, completions, completion_ids, label, **k):\n"
        "    return [100 * isinstance(p, str) + 10 * isinstance(c, str) + len(i) + (l == 'x')"
        " for p, c, i, l in zip(prompts, completions, completion_ids, label)]\n"
    )
    f = open_rewards([RewardSpec("f", f"{tmp_path}/shapes.py:f")], LIMITS)[0]
    assert f.score(group("a", label="x"))[0].score == 113.0
    assert f.score(group("a", prompt=[{"role": "user", "content": "q"}], label="y"))[0].score == 2.0
    f.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("needs_label", "requires 'label', and no row has such a column; columns: answer"),
        ("takes_nothing", "takes no arguments; a reward function takes completions"),
        ("BROKEN", "has no function 'BROKEN'"),
        ("oen", "did you mean 'one'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_door(file, name, words):
    functions = open_rewards(parse_rewards([f"{file}:{name}"]), LIMITS)
    with pytest.raises(SettingError) as raised:
        check_rewards(functions, ["answer"])
    assert words in str(raised.value)
    functions[0].close()


def test_a_module_that_fails_or_ends_while_imported_is_refused_in_words(tmp_path):
    for source, words in (
        ("1/0", "ZeroDivisionError"),
        ("import os; os._exit(9)", "ended with status 9"),
        ("def f(", "line 1"),
    ):
        path = tmp_path / "broken.py"
        path.write_text(source)
        with pytest.raises(SettingError) as raised:
            check_rewards(open_rewards([RewardSpec("f", f"{path}:f")], LIMITS), [])
        assert words in str(raised.value)


def test_an_argument_that_cannot_be_pickled_fails_in_words(reward):
    assert "cannot be sent" in reward("one").score(group("a", odd=threading.Lock()))[0].fault


def test_a_process_killed_from_outside_costs_one_call(file):
    pool = ScoringPool(ProcessSettings("math:sqrt", "test", seconds=5), size=1)
    assert pool.call(args=(4,)) == {"value": 2.0}
    os.kill(pool.processes.workers[0].process.pid, signal.SIGKILL)
    try:
        assert pool.call(args=(9,)) == {"value": 3.0}
    except HostFault as fault:  # the signal arrived while the call was on its way
        assert "SIGKILL" in str(fault)
    assert pool.call(args=(9,)) == {"value": 3.0}
    pool.close()


def test_a_stopped_process_costs_one_call_and_is_no_fault_of_the_function():
    pool = ScoringPool(ProcessSettings("math:sqrt", "test", seconds=1), size=1)
    assert pool.call(args=(4,)) == {"value": 2.0}
    os.kill(pool.processes.workers[0].process.pid, signal.SIGSTOP)
    with pytest.raises(HostFault, match="was stopped by somebody"):
        pool.call(args=(9,))
    assert pool.call(args=(9,)) == {"value": 3.0}
    pool.close()


def test_a_death_while_a_function_loads_again_costs_one_call(tmp_path):
    """Only the first load says whether the function can be loaded; a later death is a fault of the host."""
    path, dying = tmp_path / "mine.py", tmp_path / "dying"
    path.write_text(f"import os\nif os.path.exists({str(dying)!r}): os.kill(os.getpid(), 9)\ndef f(x): return x")
    pool = ScoringPool(ProcessSettings(f"{path}:f", "test", seconds=5), size=1)
    assert pool.call(args=(4,)) == {"value": 4}
    dying.touch()
    pool.processes.workers[0].kill("test")
    with pytest.raises(HostFault, match="SIGKILL"):
        pool.call(args=(4,))
    dying.unlink()
    assert pool.call(args=(5,)) == {"value": 5}
    pool.close()


def test_nothing_of_the_pool_outlives_close(file):
    pool = ScoringPool(ProcessSettings("math:sqrt", "test", seconds=5), size=2)
    pool.call(args=(4,))
    pid = pool.processes.workers[0].process.pid
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_object_of_this_process_is_called_here():
    calls = []

    def mine(completion, answer):
        calls.append(completion)
        return completion == answer

    function = open_rewards([RewardSpec("mine", "object:mine")], LIMITS, {"object:mine": mine})[0]
    assert isinstance(function, LocalReward) and function.runs_here
    assert [o.success for o in function.score(group("a", "b", answer="a"))] == [True, False] and calls == ["a", "b"]


def test_an_object_is_asked_for_again():
    with pytest.raises(SettingError, match="resume"):
        open_rewards([RewardSpec("mine", "object:mine")], LIMITS)


def test_scores_are_finite(reward):
    outcomes = reward("one").score(group(*"abc", "nan"))
    assert all(o.fault or math.isfinite(o.score) for o in outcomes)


def test_a_starved_reward_process_says_so_and_its_answers_have_no_score(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(completion):\n    raise OSError(28 if completion == 'full' else 2, 'x')\n")
    f = open_rewards([RewardSpec("f", f"{path}:f")], LIMITS)[0]
    assert "FileNotFoundError" in f.score(group("a"))[0].fault
    with pytest.raises(HostFault, match="no space left on the disk"):
        f.score(group("full"))
    f.close()


def test_a_built_in_reward_whose_process_the_kernel_ended_gives_no_zero():
    f = open_rewards(parse_rewards(["exact"]), LIMITS)[0]
    assert f.score(group("7", answer="7"))[0].score == 1.0
    process = f._pool.processes.workers[0]
    os.kill(process.process.pid, signal.SIGSTOP)  # so that it dies during the call
    threading.Timer(0.3, os.kill, (process.process.pid, signal.SIGKILL)).start()
    with pytest.raises(HostFault, match="SIGKILL"):
        f.score(group("7", answer="7"))
    assert f.score(group("7", answer="7"))[0].score == 1.0
    f.close()
