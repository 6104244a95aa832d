"""Demonstrations: of the very task where somebody can show it, else a share of the batch; and the shelf of an offline run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from turnwise import environments
from turnwise.core.records import Group, Origin, Task, Trajectory, Turn
from turnwise.data.dataset import read_dataset
from turnwise.data.demonstrations import DemonstrationContext, Demonstrations, RowDemonstrator, ScriptedDemonstrator
from turnwise.data.offline_source import OfflineSource, ShuffledSampler, split_held_out
from turnwise.data.replay import inline_fork, trajectory_reader
from turnwise.data.tokenize import DialogueTokenizer, build_groups, rows_by_task
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_tokenizer
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.store.ledger import SqliteLedger
from turnwise.tasks.task_source import TaskList, shuffled_index

RENDERER = Renderer(tiny_tokenizer([], 300))
CONTEXT = DemonstrationContext(
    lambda task: environments.make(task.environment, task.difficulty),
    DialogueTokenizer(RENDERER, 4096),
    EpisodeLimits(8, 4096),
)


def fresh(key, seed=3, size=2):
    task = Task("guess", seed)
    turn = Turn((1,), (2,), (-0.5,), version=(0,))
    return Group(key, task, tuple(Trajectory(f"{key}.{i}", task, (turn,)) for i in range(size)))


def shown(demos, groups, step=0):
    asyncio.run(demos.prepare([g.task for g in groups], step))
    return demos.mix(groups, step)


def rows_of(tmp_path, *rows):
    path = tmp_path / "demos.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_dataset(path, "guess")


def oracle(seed=3):
    return shown(Demonstrations(0, demonstrator=ScriptedDemonstrator("oracle", CONTEXT)), [fresh("0", seed)])[
        0
    ].trajectories[-1]


def test_a_player_shows_the_very_task_of_each_group():
    mixed = shown(
        Demonstrations(0, demonstrator=ScriptedDemonstrator("oracle", CONTEXT)), [fresh("0", 3), fresh("1", 4)]
    )
    assert [len(g.trajectories) for g in mixed] == [3, 3]
    for g in mixed:
        last = g.trajectories[-1]
        assert last.origin == Origin.EXPERT and last.task == g.task and last.success and not last.turns[0].logp


def test_a_row_of_a_known_task_is_told_again_and_paid_by_the_environment(tmp_path):
    played = oracle()
    row = {"messages": list(played.messages), "seed": 3, "reward": 99.0}
    demos = Demonstrations(0, demonstrator=RowDemonstrator(rows_by_task(rows_of(tmp_path, row)), CONTEXT))
    told = shown(demos, [fresh("0")])[0].trajectories[-1]
    assert told.reward == played.reward != 99.0 and told.success
    assert [t.tokens for t in told.turns] == [t.tokens for t in played.turns]
    assert demos.metrics() == {"demos/played": 1.0}


@pytest.mark.parametrize("spoil", ["another prompt", "cut short", "too long"])
def test_a_row_the_environment_does_not_recognise_counts_as_written(tmp_path, spoil):
    said = list(oracle().messages)
    if spoil == "another prompt":
        said[0] = {**said[0], "content": "something else"}
    elif spoil == "cut short":
        first = next(n for n, m in enumerate(said) if m["role"] == "assistant")
        said = [*said[:first], {"role": "assistant", "content": "hm"}]
    else:
        said += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "more"}]
    rows = [{"messages": said, "seed": 3, "reward": 0.25}, {"messages": said, "seed": 4}]
    demos = Demonstrations(0, demonstrator=RowDemonstrator(rows_by_task(rows_of(tmp_path, *rows)), CONTEXT))
    mixed = shown(demos, [fresh("0", 3), fresh("1", 4)])
    assert [g.trajectories[-1].reward for g in mixed] == [0.25, 1.0]
    assert demos.metrics() == {"demos/as written": 2.0}


def test_a_task_nobody_shows_is_counted(tmp_path):
    row = {"messages": list(oracle().messages), "seed": 3}
    demos = Demonstrations(0, demonstrator=RowDemonstrator(rows_by_task(rows_of(tmp_path, row)), CONTEXT))
    assert [len(g.trajectories) for g in shown(demos, [fresh("0", 3), fresh("1", 99)])] == [3, 2]
    assert demos.metrics()["demos/missing: no row of this task"] == 1.0


def test_rows_without_a_task_are_a_share_of_the_batch_in_seeded_passes(tmp_path):
    rows = rows_of(tmp_path, *[{"prompt": f"p{i}", "completion": str(i)} for i in range(5)])
    taskless = build_groups(rows, CONTEXT.tokenizer)
    demos = Demonstrations(1, share=0.2, taskless=taskless)
    mixed = demos.mix([fresh("0", size=8)], 0)
    assert len(mixed) == 3 and all(len(g.trajectories) == 1 for g in mixed[1:]), "2 of 10 rows"
    seen = Counter(g.trajectories[0].id.split(":", 1)[1] for g in mixed[1:])
    for step in range(1, 5):
        seen += Counter(g.trajectories[0].id.split(":", 1)[1] for g in demos.mix([fresh("0", size=8)], step)[1:])
    assert set(seen.values()) == {2}, "two whole passes"
    first, second = Demonstrations(1, taskless=taskless), Demonstrations(1, taskless=taskless)
    first.mix([fresh("0", size=12)], 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.mix([fresh("0", size=12)], 1) == first.mix([fresh("0", size=12)], 1)


def test_tasks_from_a_list_come_once_in_a_pass():
    tasks = tuple(Task("guess", i, difficulty=1 + i % 2) for i in range(6))
    supply = TaskList("guess", listed=tasks, seed=3)
    assert [{supply.draw(n) for n in range(6 * k, 6 * k + 6)} for k in range(2)] == [set(tasks)] * 2
    assert [supply.draw(n) for n in range(6)] != [supply.draw(n) for n in range(6, 12)]
    assert {supply.draw(n, 2).difficulty for n in range(9)} == {2}
    with pytest.raises(SettingError, match="no tasks"):
        TaskList("guess")


# ----------------------------------------------------------------------- shelf


def pairs(tmp_path, n):
    return build_groups(
        rows_of(tmp_path, *[{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(n)]), CONTEXT.tokenizer
    )


def test_a_shelf_accounts_for_every_use(tmp_path):
    groups = pairs(tmp_path, 5)
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        offline_source = OfflineSource(groups, 2, ShuffledSampler(5, 1), ledger)
        seen = Counter()
        for step in range(5):
            taken = asyncio.run(offline_source.collect_step(step))
            ledger.train([g.id for g in taken], step)
            seen.update(g.task.seed for g in taken)
            assert all(len(g.trajectories) == 2 for g in taken)
        assert set(seen.values()) == {2} and ledger.group_counts().trained == 10


def test_a_shelf_goes_on_where_it_was(tmp_path):
    first, second = ShuffledSampler(7, 3), ShuffledSampler(7, 3)
    for _ in range(9):
        first.next()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.next() for _ in range(9)] == [second.next() for _ in range(9)]
    assert first.metrics() == {"passes_over_data": 18 / 7}
    assert sorted(shuffled_index(0, n, 7) for n in range(7)) == list(range(7))


def test_a_tenth_of_the_prompts_is_held_back_by_content(tmp_path):
    groups = pairs(tmp_path, 40)
    learned, kept = split_held_out(groups)
    assert len(kept) == 4 and len(learned) == 36 and not {g.id for g in kept} & {g.id for g in learned}
    assert {g.id for g in split_held_out(groups[::-1])[1]} == {g.id for g in kept}
    assert split_held_out(groups[:9]) == (groups[:9], [])
    twice = [{"prompt": f"p{i % 20}", "chosen": "a", "rejected": str(i)} for i in range(60)]
    learned, kept = split_held_out(build_groups(rows_of(tmp_path, *twice), CONTEXT.tokenizer))
    context = lambda g: g.trajectories[0].turns[0].context  # noqa: E731
    assert not {context(g) for g in learned} & {context(g) for g in kept}, "a prompt is on one side only"


# ------------------------------------------------------------------------ past


def test_rows_of_one_prompt_are_all_trained_on(tmp_path):
    rows = [{"prompt": "which?", "chosen": f"yes {n}", "rejected": "no"} for n in range(30)]
    groups = build_groups(rows_of(tmp_path, *rows), CONTEXT.tokenizer)
    assert split_held_out(groups) == (groups, [])


def test_a_forked_trajectory_stands_alone():
    from turnwise.core.batch import pack
    from turnwise.core.records import Fork

    task = Task("guess", 1)
    turn = lambda c, t: Turn(c, t, (-0.5,) * len(t), version=(0,) * len(t))  # noqa: E731
    parent = Trajectory("p", task, (turn((1, 2), (3,)), turn((4,), (5, 6)), turn((7,), (8,))))
    child = Trajectory("c", task, (turn((), (9,)), turn((10,), (11,))), fork=Fork("p", 1, 1))
    grand = Trajectory("g", task, (turn((12,), (13,)),), fork=Fork("c", 0, 1))
    book = {t.id: t for t in (parent, child, grand)}
    together = pack([Group("0", task, (parent, child, grand))])
    for i, t in enumerate((parent, child, grand)):
        single = inline_fork(t, book.__getitem__)
        assert single.fork is None and single.id == t.id
        assert pack([Group("0", task, (single,))]).sequences.ids.tolist() == together.select([i]).sequences.ids.tolist()
    assert trajectory_reader({"x": Trajectory("x", task, (Turn((), ()),))}.__getitem__)("x") is None
