
from support.players import play

from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import text_action, tool_action
from turnwise.environments.builtin.lookup import COUNTS, MAX_CALLS, WORLDS, Lookup, Question, fictional_world


def test_worlds_hold_together():
    for number in range(0, WORLDS, 20):
        here = fictional_world("train", number)
        assert len(here.names) == sum(COUNTS.values()) == len(set(here.names))
        assert len(here.notes) == sum(map(len, here.facts.values())) == len(set(here.notes))
        for name, facts in here.facts.items():
            assert name in facts.get("capital", name) or here.facts[facts["capital"]]["land"] == name
            assert "spouse" not in facts or here.facts[facts["spouse"]]["spouse"] == name
            assert set(facts.values()) <= set(here.names)


def test_splits_share_no_question_with_its_answer():
    def asked(split, hops):
        env = Lookup(difficulty=hops, split=split)
        return {env.reset(seed)[0]["content"] + " ".join(env.question.names) for seed in range(300)}

    assert not any(asked("train", hops) & asked("held_out", hops) for hops in (1, 2, 3))


def test_a_name_means_something_else_in_each_world():
    """Else remembering would do instead of reading."""
    answers = {}
    for number in range(60):
        for name, facts in fictional_world("train", number).facts.items():
            for relation, other in facts.items():
                answers.setdefault((name, relation), []).append(other)
    commonest = [max(map(found.count, found)) / len(found) for found in answers.values() if len(found) >= 8]
    assert sum(commonest) / len(commonest) < 0.35


def test_a_world_is_made_once():
    assert fictional_world("train", 3) is fictional_world("train", 3)


def test_every_note_is_found_by_what_it_is_about():
    here = fictional_world("train", 0)
    assert all(here.index.top(f"{relation} of {name}", 1) == [n] for (name, relation), n in here.number.items())


def test_question_text():
    question = Question(("zelo", "mika", "toba"), ("founder", "birthplace"))
    assert question.text == "what is the birthplace of the founder of zelo?"
    assert question.answer == "toba"


def test_tool_messages():
    env = Lookup()
    env.reset(0)
    about = f"{env.question.relations[0]} of {env.question.names[0]}"
    step = env.step(Action("", calls=(ToolCall("search", {"query": about}, id="c1"),)))
    (message,) = step.messages
    assert message["role"] == "tool" and message["name"] == "search" and message["tool_call_id"] == "c1"
    assert message["content"] == f"the {about} is {env.question.answer}."
    assert step.info == {"tool_calls": 1, "tool_errors": 0, "facts": {"question": 1.0, "uncovered": 1.0}}
    assert env.step(tool_action("search", query="qqqq")).messages[0]["content"] == "nothing found"


def test_too_many_calls_are_answered_but_not_run():
    env = Lookup()
    env.reset(0)
    step = env.step(Action("", calls=(ToolCall("search", {"query": "founder"}),) * (MAX_CALLS + 2)))
    assert len(step.messages) == MAX_CALLS + 2 and step.info["tool_errors"] == 2


def test_answers_are_read_leniently_in_case_and_end_only():
    texts = {"Answer: {}.": True, "i think\nanswer: {}": True, "{}": False, "answer: {} maybe": False}
    for text, right in texts.items():
        env = Lookup()
        env.reset(1)
        step = env.step(text_action(text.format(env.question.answer.upper())))
        assert step.info.get("success", False) is right


def test_guessing_without_searching_never_ends_well():
    _, step, _ = play(Lookup(difficulty=2), 0, lambda env: text_action(f"answer: {env.question.names[0]}"))
    assert step.terminated and step.info["success"] is False


def test_facts_say_what_was_found():
    env = Lookup(difficulty=2)
    env.reset(0)
    first, second = (f"{relation} of {name}" for name, relation in zip(env.question.names, env.question.relations))
    told = [env.step(tool_action("search", query=query)).info["facts"] for query in (first, "qqqq", second, second)]
    assert [fact["uncovered"] for fact in told] == [1.0, 0.0, 2.0, 0.0]
    end = env.step(env.oracle())
    assert end.info["facts"] == {"answer": 1.0} and end.info["success"]


def test_the_state_key_begins_empty():
    env = Lookup(difficulty=3)
    env.reset(0)
    assert env.state_key() == ""
    env.step(env.oracle())
    assert env.state_key()
