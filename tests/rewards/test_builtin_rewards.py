"""Built-in rewards: right answers, wrong ones, and answers made to confuse or stall them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import SettingError
from turnwise.rewards import builtin
from turnwise.rewards.conventions import AnswerGroup, AnswerSample
from turnwise.rewards.functions import RewardLimits, check_rewards, open_rewards
from turnwise.rewards.spec import parse_rewards


def scores(text: str, answers, seconds: float = 5.0, **columns) -> list[float | None]:
    """The scores that a reward gives in its process."""
    function = open_rewards(parse_rewards([text]), RewardLimits(seconds=seconds))[0]
    try:
        check_rewards([function], columns)
        outcomes = function.score(AnswerGroup("q", tuple(AnswerSample(a) for a in answers), columns))
        assert not any(o.fault for o in outcomes), outcomes
        return [o.score for o in outcomes]
    finally:
        function.close()


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("42", "42", True),
        (" 42. ", 42, True),
        ("1,000", "1000", True),
        ("3.0", "3", True),
        ("-0", "0", True),
        ("1,00", "100", False),
        ("Paris", "paris", True),
        ("I think <answer>Paris</answer>", "Paris", True),
        ("<answer>London</answer> no, <answer>Paris</answer>", "Paris", True),
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        ("steps\n#### 72", "reasoning\n#### 72", True),
        ("<think>is it 7? <answer>7</answer></think>8", "7", False),
        ("either 7 or 8", "7", False),
        ("", "7", False),
        ("７", "7", True),
        ("B", ["A", "B"], True),
        ("\\boxed{7", "7", False),
    ],
)
def test_exact(completion, answer, right):
    assert builtin.exact(completion, answer) == {"score": float(right), "success": right}


def test_exact_without_an_answer_does_not_apply():
    assert builtin.exact("7", None) is None


def test_exact_as_a_whole_and_with_case():
    assert builtin.exact("<answer>7</answer>", "7", whole=True)["score"] == 0.0
    assert builtin.exact("paris", "Paris", ignore_case=False)["score"] == 0.0


@given(st.text(max_size=200), st.text(max_size=50))
def test_exact_never_raises_and_accepts_the_answer_itself(completion, answer):
    assert builtin.exact(completion, answer)["score"] in (0.0, 1.0)
    assert builtin.exact(answer, answer)["score"] == 1.0


@pytest.mark.parametrize("bomb", ["9" * 90_000, "1e30000000", "<answer>" * 20_000, "\\boxed{" * 20_000, "#" * 90_000])
def test_exact_stays_fast_on_long_answers(bomb):
    assert scores("exact", [bomb, "7"], answer="7") == [0.0, 1.0]


# ---------------------------------------------------------- regex, JSON schema


def test_regex():
    assert scores("regex:pattern=^<think>.*</think>", ["<think>a\nb</think>c", "c"]) == [1.0, 0.0]
    assert builtin.regex("ab", pattern="a", full=True) == 0.0


def test_a_catastrophic_pattern_is_cut_and_counts_as_no_match():
    assert scores("regex:pattern=(a+)+$", ["a" * 60 + "b", "aaa"], seconds=1.0) == [0.0, 1.0]


def test_a_wrong_pattern_is_refused_at_the_door():
    with pytest.raises(SettingError, match="no regular expression"):
        scores("regex:pattern=(", ["a"])


def test_json_schema(tmp_path):
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answers = ['{"a": 1}', '{"a": "x"}', '```json\n{"a": 2}\n```', "a", "[" * 5000, "{}"]
    assert scores("json_schema", answers, schema=schema) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    assert scores(f"json_schema:file={tmp_path}/s.json", ["1", '"x"']) == [1.0, 0.0]
    assert scores("json_schema", ["1"], schema=None) == [None]


# ----------------------------------------------------------------- math, code


@pytest.mark.slow
def test_math_and_an_expression_that_never_ends():
    pytest.importorskip("math_verify")
    answers = ["\\boxed{\\frac{1}{2}}", "0.5", "It is $\\frac{2}{4}$.", "9^{9^{9^{9}}}", "2", "", "\\boxed{"]
    assert scores("math", answers, seconds=4.0, answer="1/2") == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow(tier="test")
def test_code_with_tests():
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    right = "Here:\n```python\ndef f(x):\n    return x + 1\n```"
    answers = [
        right,
        "def f(x): return 2",
        "def f(x): return",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "f =",
    ]
    assert scores("code", answers, tests=tests) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert scores("code:partial=yes", answers[:2], tests=tests) == [1.0, 0.5]
    assert scores("code:seconds=1", ["while True: pass"], tests="assert True") == [0.0]


@pytest.mark.slow
def test_code_that_reads_and_prints():
    tests = '{"inputs": ["2", "5"], "outputs": ["4\\n", "10"]}'
    assert scores("code", ["print(int(input()) * 2)", "print(4)", "import sys; sys.exit()"], tests=tests) == [
        1.0,
        0.0,
        0.0,
    ]


# ------------------------------------------------------------------- majority


def label_by_counting(votes):
    """An oracle: after each vote, the answer that has more votes than any had before takes the lead."""
    best, leader = 0, None
    for n, vote in enumerate(votes):
        count = sum(v == vote for v in votes[: n + 1])
        if vote is not None and count > best:
            best, leader = count, vote
    return leader


@given(st.lists(st.sampled_from(["a", "b", "c", None]), max_size=9))
def test_the_label_is_the_most_frequent_vote_and_the_first_to_get_there(votes):
    label = builtin.majority_vote(votes)
    assert label == label_by_counting(votes)
    if label is not None:
        assert all(votes.count(label) >= votes.count(other) for other in votes if other is not None)


@given(st.lists(st.sampled_from(["#### 1", "#### 2", "#### 3"]), min_size=1, max_size=9), st.randoms())
def test_where_one_answer_leads_order_does_not_matter(answers, rng):
    counts = sorted((answers.count(a) for a in set(answers)), reverse=True)
    shuffled = rng.sample(answers, len(answers))
    by_answer = dict(zip(answers, builtin.majority(answers)))
    if counts[0] > sum(counts[1:2]):
        assert [by_answer[a] for a in shuffled] == builtin.majority(shuffled)
    assert sum(builtin.majority(answers)) == counts[0]


def test_a_vote_needs_no_reference_and_runs_in_its_process():
    assert scores("majority", ["it is #### 4", "\\boxed{4.0}", "5"]) == [1.0, 1.0, 0.0]
    found = scores(
        "majority:pattern=answer: *(\\w+)", ["answer: Rome", "answer: Oslo then answer: rome", "a call", "a call"]
    )
    assert found == [1.0, 1.0, 0.0, 0.0]  # the last match counts, and what does not match has no vote
    assert builtin.majority(["no", "no"], pattern="answer: (.*)") == [0.0, 0.0]


def test_a_vote_reads_the_last_message_of_the_policy():
    said = lambda *texts: [{"role": "assistant", "content": t} for t in texts]  # noqa: E731
    dialogues = [
        said("search", "answer: x"),
        [*said("answer: x"), {"role": "user", "content": "right."}],
        said("answer: y"),
        [],
    ]
    assert builtin.majority(dialogues, pattern="answer: (.*)") == [1.0, 1.0, 0.0, 0.0]


def test_a_vote_refuses_what_is_no_pattern():
    with pytest.raises(SettingError, match="no regular expression"):
        scores("majority:pattern=(", ["x"])
