"""``turnwise credit-bench``: the credit of every method against the true advantage of each turn of a frozen policy.

The truth is A = Q − V: what is earned after this answer in this state, minus what the policy earns from the state. A world that
is deterministic is enumerated: every answer that the policy gives with a probability worth counting, every state that follows,
and values backwards from the end. Where there are too many states, episodes are forked at each turn, half of the forks for one
estimate of A and half for another, whose errors are independent: products of the two have the right mean.

A method is scored by its credit slots alone (reward and advantage), on the same groups: no gate, no penalty, one average.
"""

from __future__ import annotations

import copy
import math
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise import recipes
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import NoGate
from turnwise.algebra.objective import Objective
from turnwise.algebra.ratio import OnPolicy
from turnwise.config.settings import Settings
from turnwise.core.batch import Batch, pack
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TURN
from turnwise.core.protocols import Listener
from turnwise.core.records import Group, Status, Task, Trajectory, Turn
from turnwise.core.seeds import stable_seed
from turnwise.core.signals import TOKEN_CRITIC, TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import EnvironmentFault, SettingError
from turnwise.evaluation.evaluator import evaluate
from turnwise.maths.statistics import wilson
from turnwise.recipes import signatures
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.episode import ForkPoint
from turnwise.rollout.renderer import Dialogue, Renderer
from turnwise.rollout.strategies import Independent
from turnwise.store.atomic import write_json
from turnwise.store.rundir import installed_versions
from turnwise.training import build, engines
from turnwise.training.evaluation import select_policy
from turnwise.training.interrupt import run_async
from turnwise.training.plan import EnvSpec, RunPlan
from turnwise.training.refusals import refuse, requirements
from turnwise.training.trainer import COLD_STEPS, cold_start
from turnwise.training.watch import RunEvents, silent

Ids = tuple[int, ...]
Key = tuple[Ids, str, str]  # what the policy reads, the state behind it, who acts
TRUE, RANDOM = "the true advantage", "random numbers"  # the two ends of the scale
SMALLEST = 1e-4  # an answer with a smaller probability is not listed
ROWS = 256  # sequences of one forward pass
WARM = 2  # batches before the scored ones, in which memories of methods begin
DRAWS = 1000  # of a bootstrap
NEGLIGIBLE = 1e-6  # weight of an answer in the exact gradient
CRITICS = {*TOKEN_CRITIC, *TURN_CRITIC, *TURN_CRITIC_TARGET, Signal.ACTION_VALUE, Signal.OLD_ACTION_VALUE}
NEUTRAL = 0.1  # of the spread of A: below, a turn has no sign to be wrong about


# ------------------------------------------------------------------ the policy


@dataclass
class FrozenPolicy:
    """A model's probabilities, in float64 behind its last hidden state."""

    model: Any
    stop_ids: Sequence[int]
    max_tokens: int
    context: int
    temperature: float

    @torch.no_grad()
    def states(self, sequences: Sequence[Ids], last: Sequence[int]) -> list[Tensor]:
        """The states after the last position of each sequence and ``last`` positions before it, [last + 1, D]."""
        decoder, out = self.model.get_decoder(), [torch.empty(0)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda n: len(sequences[n]))
        for i in range(0, len(order), ROWS):
            part = order[i : i + ROWS]
            longest = len(sequences[part[-1]])  # nothing attends to the padding behind a shorter one
            rows = torch.tensor([sequences[n] + (0,) * (longest - len(sequences[n])) for n in part])
            for hidden, n in zip(decoder(rows.to(self.model.device)).last_hidden_state, part):
                out[n] = hidden[len(sequences[n]) - 1 - last[n] : len(sequences[n])].double()
        return out

    @torch.no_grad()
    def chances(self, states: Tensor) -> Tensor:
        head = self.model.get_output_embeddings().weight.double()
        return torch.softmax(states @ head.T / self.temperature, -1)

    def answers(self, prompts: Sequence[Ids]) -> list[dict[Ids, float]]:
        """All that the policy may answer to each prompt, with probabilities: from the likely beginnings to their ends."""
        listed: list[dict[Ids, float]] = [{} for _ in prompts]
        begun: list[tuple[int, Ids, float]] = [(n, (), 1.0) for n in range(len(prompts))]
        while begun:
            longer: list[tuple[int, Ids, float]] = []
            for i in range(0, len(begun), ROWS):
                part = begun[i : i + ROWS]
                states = self.states([prompts[n] + ids for n, ids, _ in part], [0] * len(part))
                p = self.chances(torch.cat(states)).cpu() * torch.tensor([chance for *_, chance in part])[:, None]
                rows, columns = (p >= SMALLEST).nonzero(as_tuple=True)
                for row, token, chance in zip(rows.tolist(), columns.tolist(), p[rows, columns].tolist()):
                    n, ids = part[row][0], (*part[row][1], token)
                    room = min(self.max_tokens, self.context - len(prompts[n]))
                    if token in self.stop_ids or len(ids) >= room:
                        listed[n][ids] = chance
                    else:
                        longer.append((n, ids, chance))
            begun = longer
        return listed

    def slopes(self, turns: Sequence[tuple[Ids, Ids]]) -> tuple[Tensor, Tensor]:
        """∂ log π of each token = (one-hot − π) hᵀ, by the weights of the output layer: both factors, token by token."""
        states = torch.cat(self.states([a + b[:-1] for a, b in turns], [len(b) - 1 for _, b in turns]))
        chosen = torch.tensor([token for _, tokens in turns for token in tokens])
        error = -self.chances(states)
        error[torch.arange(len(chosen)), chosen.to(error.device)] += 1
        return error.float().cpu(), states.float().cpu()


# ------------------------------------------------------- every state, every answer


@dataclass
class Place:
    """A state in which the policy acts. ``answers``: by their ids, probability, who earns what at once, and the next state."""

    key: Key
    env: Any
    dialogue: Dialogue
    answers: dict[Ids, tuple[float, Mapping[str, float], Place | None]] = field(default_factory=dict)
    missing: float = 0.0  # probability of the answers that are not listed


class World:
    """One task with all that the policy can do in it."""

    def __init__(self, spec: EnvSpec, task: Task, policy: FrozenPolicy, renderer: Renderer, most: int) -> None:
        self.spec, self.policy, self.renderer, self.context = spec, policy, renderer, spec.limits.context
        self.places: dict[Key, Place] = {}
        self.paid = False  # whether players earn apart; else each turn is credited with what all earn
        self._values: dict[tuple[int, int, str], float] = {}
        env = spec.make(task)
        first = read_messages(env.reset(task.seed), "reset")
        self.horizon = min(spec.limits.turns, getattr(env, "max_turns", spec.limits.turns))
        self.names_states = env.state_key() is not None
        root = self._place(env, renderer.open(first, spec.tools, spec.limits.history))
        if root is None:
            raise SettingError(f"the first prompt of {task.key} fills the context; write a larger --context")
        self.root = root
        frontier = [self.root]
        for _ in range(self.horizon):
            known = len(self.places)
            for place, answers in zip(frontier, policy.answers([p.key[0] for p in frontier])):
                total = sum(answers.values())
                place.missing = 1 - total
                for ids, chance in answers.items():
                    place.answers[ids] = (chance / total, *self._step(place, ids))
                if len(self.places) > most:
                    raise SettingError(f"more than {most} states of {task.key} can be reached; write --forks 16, a lower "
                                       "--difficulty or more --states")  # fmt: skip
            frontier = list(self.places.values())[known:]
            if not frontier:
                break

    def _place(self, env: Any, dialogue: Dialogue) -> Place | None:
        """The place of this state; None where the context leaves no room for an answer."""
        if len(dialogue.ids) >= self.context:
            return None
        key = tuple(dialogue.ids), env.state_key() if self.names_states else "", str(getattr(env, "agent", "agent"))
        return self.places.setdefault(key, Place(key, env, dialogue))

    def _step(self, place: Place, ids: Ids) -> tuple[Mapping[str, float], Place | None]:
        """What an answer earns, and where it leads. The place itself stays as it is."""
        env, d = copy.deepcopy(place.env), place.dialogue
        dialogue = replace(d, messages=[*d.messages], ids=[*d.ids], new_ids=[], masked_ids=[])
        step = read_step(env.step(self.renderer.append_sampled(dialogue, ids)))
        earned = dict(step.info.get("paid", {}))
        self.paid = self.paid or bool(earned)
        earned[place.key[2]] = earned.get(place.key[2], 0.0) + step.reward
        if step.terminated or step.truncated:
            return earned, None
        self.renderer.append_observation(dialogue, step.messages, context=step.context)
        return earned, self._place(env, dialogue)

    def value(self, place: Place | None, left: int, agent: str) -> float:
        """What ``agent`` earns on average from here, with ``left`` turns to go."""
        if place is None or not left:
            return 0.0
        if (at := (id(place), left, agent)) not in self._values:
            self._values[at] = sum(p * self._after(earned, to, left, agent) for p, earned, to in place.answers.values())
        return self._values[at]

    def _after(self, earned: Mapping[str, float], to: Place | None, left: int, agent: str) -> float:
        now = earned.get(agent, 0.0) if self.paid else sum(earned.values())
        return now + self.value(to, left - 1, agent)

    def advantage(self, key: Key, ids: Ids, left: int) -> float:
        """A of an answer; NaN where it or its state is not listed."""
        place = self.places.get(key)
        if place is None or ids not in place.answers:
            return math.nan
        _, earned, to = place.answers[ids]
        return self._after(earned, to, left, key[2]) - self.value(place, left, key[2])

    def gradient(self) -> dict[tuple[Ids, Ids], float]:
        """The weights of ∇ log π(answer | prompt) in the exact gradient: visits × π × A, summed over the turns of an episode."""
        weights: dict[tuple[Ids, Ids], float] = {}
        visits = {self.root.key: 1.0}
        for left in range(self.horizon, 0, -1):
            following: dict[Key, float] = {}
            for key, share in visits.items():
                place = self.places[key]
                base = self.value(place, left, key[2])
                for ids, (p, earned, to) in place.answers.items():
                    at = (key[0], ids)
                    gain = self._after(earned, to, left, key[2]) - base
                    weights[at] = weights.get(at, 0.0) + share * p * gain
                    if to is not None and share * p > 1e-12:
                        following[to.key] = following.get(to.key, 0.0) + share * p
            visits = following
        return {at: weight for at, weight in weights.items() if abs(weight) > NEGLIGIBLE}


# ------------------------------------------------------------- sampled turns, truth


@dataclass
class Turns:
    """Every scored turn of all batches. ``truth``: two estimates of A with independent errors, or the exact one twice."""

    task: np.ndarray
    batch: np.ndarray
    cell: np.ndarray  # equal for the same answer in the same state with as many turns to go
    truth: np.ndarray  # [2, turns]
    signed: np.ndarray  # whether the sign of A is known and matters
    known: np.ndarray  # whether the truth is


def read_prompts(trajectory: Trajectory) -> Iterator[Ids]:
    """What the policy read before each turn."""
    ids: Ids = ()
    for turn in trajectory.turns:
        ids = (*(() if turn.restart else ids), *turn.context)
        yield ids
        ids = (*ids, *turn.tokens)


@dataclass
class Bench:
    """A frozen policy in its environment, and the batches that it sampled."""

    name: str
    spec: EnvSpec
    renderer: Renderer
    model: Any
    tasks: Sequence[Task]
    size: int
    seed: int

    def __post_init__(self) -> None:
        s = self.spec.settings
        model = copy.deepcopy(self.model).eval().to(engines.select_device(s))
        self.policy = FrozenPolicy(model, self.renderer.stop_ids, s.max_tokens, s.context, s.temperature)
        self.play = build.make_play(self.spec, self.renderer, build.sampling_settings(s), record_masked=True)
        self.generator = engines.make_local_generator(s, copy.deepcopy(self.model), self.renderer, dialogues=s.slots)

    def sample(self, purpose: str, tasks: Sequence[Task], size: int, options: Any) -> list[tuple[Trajectory, ...]]:
        """``size`` episodes of each task; ``options(n, i)`` are those of one."""

        def one(key: str, task: Task, sample: int) -> Any:
            session = self.generator.open(stable_seed(self.seed, purpose, key))
            return self.play(f"{purpose}.{key}", task, session, **options(int(key.split(".")[0]), sample))

        played = run_async(evaluate(tasks, size, one, wave=self.spec.settings.slots)).trajectories
        if failed := [t.reason for row in played for t in row if t.status == Status.FAILED]:
            raise EnvironmentFault(f"{len(failed)} episodes failed: {failed[0]}")
        return list(played)

    def batch(self, number: int, points: dict[str, list[ForkPoint]]) -> list[Group]:
        """One group of each task, and the fork points of their episodes."""
        name = f"b{number}"
        noted = lambda n, i: {"fork_points": points.setdefault(f"{name}.{n}.{i}", [])}  # noqa: E731
        rows = self.sample(name, self.tasks, self.size, noted)
        return [Group(f"{name}.{n}", task, row) for n, (task, row) in enumerate(zip(self.tasks, rows))]

    def worlds(self, most: int) -> list[World]:
        return [World(self.spec, task, self.policy, self.renderer, most) for task in self.tasks]

    def forked(self, places: Mapping[Any, tuple[int, ForkPoint]], count: int) -> dict[Any, np.ndarray]:
        """What ``count`` forks from each place earn."""
        points = list(places.values())
        tasks = [self.tasks[n] for n, _ in points]
        rows = self.sample("fork", tasks, count, lambda n, i: {"fork_from": points[n][1]})
        return {key: np.array([t.reward for t in row]) for key, row in zip(places, rows)}


@dataclass(frozen=True)
class SampledTurn:
    """``left``: turns to go, itself included, or the number of the turn where no world says how many there are."""

    task: int
    batch: int
    key: Key
    left: int
    turn: Turn
    point: ForkPoint
    following: SampledTurn | None


def sampled_turns(batches: Sequence[Sequence[Group]], points: Any, worlds: Sequence[World]) -> list[SampledTurn]:
    """Every turn, in the order in which batches are packed."""
    rows: list[SampledTurn] = []
    for b, groups in enumerate(batches):
        for k, group in enumerate(groups):
            named, horizon = (worlds[k].names_states, worlds[k].horizon) if worlds else (True, 0)
            for t in group.trajectories:
                following, some = None, list[SampledTurn]()
                for n, (turn, prompt) in reversed(list(enumerate(zip(t.turns, read_prompts(t))))):
                    key = (prompt, (turn.state or "") if named else "", turn.agent)
                    following = SampledTurn(k, b, key, horizon - n, turn, points[t.id][n], following)
                    some.append(following)
                rows += reversed(some)
    return rows


def exact_truth(rows: Sequence[SampledTurn], worlds: Sequence[World]) -> np.ndarray:
    """A of each turn, [turns]; NaN where its answer is not listed."""
    return np.array([worlds[r.task].advantage(r.key, tuple(r.turn.tokens), r.left) for r in rows])


def forked_truth(rows: Sequence[SampledTurn], bench: Bench, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A of each turn from the two halves of its forks, [2, turns], and the interval of both together, [2, turns]: Wilson's for
    each value, combined by their distances from the estimates (Newcombe), because forks are few and often earn all the same."""
    if len({r.key[2] for r in rows}) > 1:
        raise SettingError("forks do not say what players earn apart; take a smaller task, which can be enumerated")
    place = lambda r: (r.task, r.key, r.left)  # noqa: E731
    earned = bench.forked({place(r): (r.task, r.point) for r in rows}, count)
    everything = np.concatenate([*earned.values(), [0.0]])
    low, span = everything.min(), np.ptp(everything) or 1.0
    halves, bounds = np.zeros((2, len(rows))), np.zeros((2, len(rows)))
    for n, r in enumerate(rows):
        before, after = earned[place(r)], earned[place(r.following)] if r.following else np.zeros(0)
        middle = count // 2
        for half, part in enumerate((slice(0, middle), slice(middle, None))):
            halves[half, n] = r.turn.reward + (after[part].mean() if len(after) else 0.0) - before[part].mean()
        ends = [wilson(float(((x - low) / span).sum()), count) if len(x) else None for x in (after, before)]
        gaps = [(i.estimate - i.low, i.high - i.estimate) if i else (0.0, 0.0) for i in ends]
        estimate = r.turn.reward + (after.mean() if len(after) else 0.0) - before.mean()
        bounds[:, n] = (estimate - span * math.hypot(gaps[0][0], gaps[1][1]),
                        estimate + span * math.hypot(gaps[0][1], gaps[1][0]))  # fmt: skip
    return halves, bounds


# -------------------------------------------------------------------- the methods


def credits(recipe: Recipe, learner: Any, batches: Sequence[Batch]) -> list[Tensor]:
    """The credit of each token of each batch. Memories of pieces grow from batch to batch, as in a run."""
    objective = Objective(recipe.advantage, OnPolicy(), NoGate(), Mean(TOKEN), reward=recipe.reward)
    out = []
    for batch in batches:
        ready = objective.before_measuring(batch)
        signals = objective.signals_before_batch
        ready = ready.put(learner.measure(ready, signals)) if signals else ready
        out.append(objective.credit(ready)[Column.ADVANTAGE].at(TOKEN).x.double())
    if not all(bool(x.isfinite().all()) for x in out):
        raise SettingError("its credit is not finite")
    return out


def why_not(settings: Mapping[str, Any], name: str, recipe: Recipe) -> str:
    """Why a method has no credit to score here; empty where it has."""
    try:
        refuse(RunPlan.from_caller({**settings, "method": name}, "", None, None), (requirements,))
    except SettingError as reason:
        return str(reason)
    objective = Objective(recipe.advantage, OnPolicy(), NoGate(), Mean(TOKEN), reward=recipe.reward)
    return "needs a trained critic" if recipe.critics and objective.signals & CRITICS else ""


# --------------------------------------------------------------------- the scores

SCORES = {  # what a table shows
    "correlation": "with the true advantage, over turns",
    "sign": "share of turns credited with the wrong sign; 0 counts half",
    "luck": "share of the credit's variance that is not the same for the same answer in the same state",
    "bias": "share of the rest that is not the true advantage; says nothing where luck may be all",
    "gradient": "cosine of a batch's gradient with that of the true advantages of the same turns",
    "exact": "cosine of a batch's gradient with the exact gradient of the expected reward",
}


@dataclass
class Scorer:
    """Scores credits. Intervals: bootstrap over tasks, since turns and groups of one task are not independent."""

    turns: Turns
    batches: Sequence[Batch]
    slopes: Sequence[tuple[Tensor, Tensor]]
    exact: Tensor | None  # [tasks, parameters]
    tasks: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.scored: dict[bytes, dict[str, list[float]]] = {}
        draw = np.random.default_rng(self.seed).multinomial(self.tasks, [1 / self.tasks] * self.tasks, DRAWS)
        self.weights = np.concatenate([np.ones((1, self.tasks)), draw])  # the estimate first
        t = self.turns
        self.again = t.known & (self._visits(t.known * 1.0)[1] > 0)[t.cell]
        truths = [self.gradients([self.of_tokens(b, np.where(t.known, a, 0.0)) for b in range(len(self.batches))])
                  for a in t.truth]  # fmt: skip
        self.true = [(a + b) / 2 for a, b in zip(*truths)]
        self.true_size = [a @ b.T for a, b in zip(*truths)]

    def of_tokens(self, b: int, values: np.ndarray) -> Tensor:
        """Values of all turns as values of the tokens of one batch."""
        batch = self.batches[b]
        own = torch.from_numpy(values[self.turns.batch == b])
        return own[batch.tree.ancestor(TOKEN, TURN)]

    def gradients(self, credit: Sequence[Tensor]) -> list[Tensor]:
        """Of each batch, the gradient of each task's group by the output layer, [tasks, parameters]."""
        out = []
        for b, ((error, states), x) in enumerate(zip(self.slopes, credit)):
            x = (x * self.of_tokens(b, self.turns.known)).to(error.dtype)
            of_task = self.of_tokens(b, self.turns.task)
            parts = [(error[at] * x[at, None]).T @ states[at] for at in (of_task == k for k in range(self.tasks))]
            out.append(torch.stack([part.flatten() for part in parts]))
        return out

    def __call__(self, credit: Sequence[Tensor]) -> dict[str, list[float]]:
        """Each score with its interval: estimate, low, high. Many methods share one credit: it is scored once."""
        size = torch.cat(list(credit)).abs().max().clamp(min=1e-300)
        if (same := torch.cat(list(credit)).div(size).float().numpy().tobytes()) not in self.scored:
            self.scored[same] = self._score(credit)
        return self.scored[same]

    def _score(self, credit: Sequence[Tensor]) -> dict[str, list[float]]:
        means = []
        for batch, x in zip(self.batches, credit):
            turn, count = batch.tree.ancestor(TOKEN, TURN), batch.tree.count(TURN)
            sums = torch.zeros(count, dtype=torch.float64).index_add(0, turn, x)
            means.append(sums / torch.bincount(turn, minlength=count).clamp(min=1))
        c, t = torch.cat(means).numpy(), self.turns
        r = _correlation(self._moments(c, t.known))
        error = np.where(np.abs(c) < 1e-9, 0.5, np.sign(c) != np.sign(t.truth.mean(0)))
        wrong = self._sums(error * t.signed) / self._sums(t.signed * 1.0)
        again, a, square = self._moments(c, self.again), t.truth.mean(0), self._mean_product(c, c)
        spread, steady = again["cc"] - square, self._repeated(c) - square
        luck = 1 - steady / np.where(spread > 0, spread, np.nan)
        along = (again["ca"] - self._mean_product(c, a)) ** 2 / (again["aa"] - self._mean_product(a, a))
        bias = 1 - along / np.where(luck < 1 - 1e-9, steady, np.nan)
        given = self.gradients(credit)
        cosine = self._cosine(given, self.true, self.true_size)
        columns = {"correlation": r, "sign": wrong, "luck": luck, "bias": bias, "gradient": cosine}
        if self.exact is not None:
            columns["exact"] = self._cosine(given, [self.exact] * len(given), [self.exact @ self.exact.T] * len(given))
        return {name: _with_interval(x) for name, x in columns.items()}

    def _sums(self, x: np.ndarray) -> np.ndarray:
        return self.weights @ np.bincount(self.turns.task, weights=x, minlength=self.tasks)

    def _moments(self, c: np.ndarray, which: np.ndarray) -> dict[str, np.ndarray]:
        a, b = np.where(which, self.turns.truth, 0.0)
        c, n = np.where(which, c, 0.0), self._sums(which * 1.0)
        products = {"a": (a + b) / 2, "aa": a * b, "c": c, "cc": c * c, "ca": c * (a + b) / 2}
        return {name: self._sums(x) / n for name, x in products.items()}

    def _visits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each cell, the sum of x and its products between batches: siblings of a group are not independent, batches are."""
        t, count = self.turns, len(self.batches)
        cells = np.bincount(t.cell * count + t.batch, weights=x, minlength=count * (t.cell.max() + 1))
        by_batch = cells.reshape(-1, count)
        return by_batch.sum(1), by_batch.sum(1) ** 2 - (by_batch**2).sum(1)

    def _repeated(self, c: np.ndarray) -> np.ndarray:
        """The mean square of what a credit is on average for an answer in a state: of two visits in different batches, c · c'."""
        which = self.again * 1.0
        square = self._visits(c * which)[1] / np.maximum(self._visits(which)[1], 1)
        return self._sums(square[self.turns.cell] * which) / self._sums(which)

    def _mean_product(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Of the means of x and y, from products between batches, too: the square of a mean of few groups is mostly its error."""
        parts = [self.again * (self.turns.batch == b) for b in range(len(self.batches))]
        xs, ys, ones = (np.array([self._sums(v * part) for part in parts]) for v in (x, y, np.ones(len(x))))
        products = ones.sum(0) ** 2 - (ones**2).sum(0)
        return (xs.sum(0) * ys.sum(0) - (xs * ys).sum(0)) / np.where(products > 0, products, np.nan)

    def _cosine(self, given: Sequence[Tensor], true: Sequence[Tensor], true_size: Sequence[Tensor]) -> np.ndarray:
        """The mean over batches of the cosine, for each draw of tasks."""
        form = lambda x: np.einsum("dk,kl,dl->d", self.weights, x.numpy(), self.weights)  # noqa: E731
        with np.errstate(invalid="ignore", divide="ignore"):
            each = [form(g @ t.T) / np.sqrt(form(g @ g.T) * form(size)) for g, t, size in zip(given, true, true_size)]
            return np.mean(each, axis=0)


def _correlation(m: Mapping[str, np.ndarray]) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.sqrt(np.maximum(m["cc"] - m["c"] ** 2, 0.0) * np.maximum(m["aa"] - m["a"] ** 2, 0.0))
        return np.asarray(np.where(size > 1e-12, (m["ca"] - m["c"] * m["a"]) / size, np.nan))


def _with_interval(x: np.ndarray) -> list[float]:
    """The estimate and the bounds of its 95 % interval; NaN where the credit has no spread."""
    drawn = x[1:][np.isfinite(x[1:])]
    if not math.isfinite(x[0]) or not len(drawn):
        return [math.nan] * 3
    return [float(x[0]), *(float(q) for q in np.quantile(drawn, [0.025, 0.975]))]


# --------------------------------------------------------------------- the report


@dataclass(frozen=True)
class CreditReport:
    """``facts``: what was measured, where, with what. ``rows``: a method each, with its scores or why it has none."""

    facts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        plain = lambda v: [None if x != x else x for x in v] if isinstance(v, list) else v  # noqa: E731
        return {**self.facts, "rows": [{name: plain(value) for name, value in row.items()} for row in self.rows]}

    def save(self, folder: str) -> None:
        """The report as a file of the folder, where one is given, named after the environment."""
        if not folder:
            return
        name = re.sub(r"\W+", "-", f"{self.facts['environment']}{'-forks' * bool(self.facts['forks'])}")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / f"credit-{name}.json", self.as_dict())

    def text(self) -> str:
        names = [name for name in SCORES if any(name in row for row in self.rows)]
        lines = [f"{k}: {v}" for k, v in self.facts.items() if not isinstance(v, dict)]
        lines += ["", f"{'':<24}" + "".join(f"{name:>24}" for name in names)]
        for row in (row for row in self.rows if names[0] in row):
            cells = (["–"] * 3 if row[n][0] != row[n][0] else [f"{x:.2f}" for x in row[n]] for n in names)
            numbers = "".join(f"{f'{a} [{b}, {c}]':>24}" for a, b, c in cells)
            lines.append(f"{row['method']:<24}{numbers}  {row['note']}")
        lines += [f"{row['method']:<24}{row['note']}" for row in self.rows if names[0] not in row]
        return "\n".join([*lines, "", *(f"{name}: {SCORES[name]}" for name in names)])


def start(source: str, settings: Settings, folder: Path | None, tasks: int, listen: Listener = silent) -> Bench:
    """The frozen policy: the model of ``folder``, or what a cold start makes of a fresh one."""
    s, spec = settings, EnvSpec.from_settings(settings)
    tokenizer = build.load_tokenizer(s, spec, folder)
    model, renderer = build.load_model(s, len(tokenizer), folder), build.make_renderer(s, tokenizer)
    steps = 0 if folder else (COLD_STEPS if s.model.tiny else 0) if s.cold_steps < 0 else s.cold_steps
    if steps:
        started = copy.deepcopy(model)  # its layers become a learner's
        cold_start(s, spec, tokenizer, started, steps, RunEvents(listen))
        model.load_state_dict(started.state_dict())
    name = f"cold start, {steps} steps" if steps else source if folder else str(s.model)
    return Bench(name, spec, renderer, model, spec.first_tasks("train", tasks), s.group_size or 8, s.seed)


def credit_bench(
    source: str, given: Mapping[str, Any], methods: str = "", forks: int = 0, tasks: int = 16, batches: int = 4,
    states: int = 4000, listen: Listener = silent,
) -> CreditReport:  # fmt: skip
    """``source``: a run, or an environment whose cold start is judged. ``forks``: of each turn; 0 enumerates."""
    names = methods.split(",") if methods else [*recipes.METHODS]
    for name in names:
        signatures.check_method(name)
    if min(tasks, batches, states) < 1:
        raise SettingError(f"{tasks} tasks, {batches} batches and {states} states; write a number above 0 for each")
    if forks and forks < 4:
        raise SettingError(f"--forks is {forks}; write at least 4, half of them for each estimate, or 0 to enumerate")
    run = (Path(source) / "run.json").is_file()
    settings, folder = select_policy(source if run else "", given if run else {**given, "env": source})
    bench, events, worlds = start(source, settings, folder, tasks, listen), RunEvents(listen), list[World]()
    if not forks:
        with events.stage("states", tasks, "tasks"):
            worlds = bench.worlds(states)
    points: dict[str, list[ForkPoint]] = {}
    with events.stage("episodes", batches + WARM, "batches"):
        groups = [bench.batch(n, points) for n in range(batches + WARM)]
    rows = sampled_turns(groups[WARM:], points, worlds)
    with events.stage("truth", len(rows), "turns"):
        exact = exact_truth(rows, worlds) if worlds else None
        halves, bounds = (np.stack([exact, exact]), None) if exact is not None else forked_truth(rows, bench, forks)
    known = np.isfinite(halves).all(0)
    middle = np.where(known, halves.mean(0), 0.0)
    matters = np.abs(middle) > NEUTRAL * middle[known].std()
    signed = known & (matters if bounds is None else (bounds[0] > 0) | (bounds[1] < 0))
    cells: dict[Any, int] = {}
    cell = np.array([cells.setdefault((r.task, r.key, r.left, tuple(r.turn.tokens)), len(cells)) for r in rows])
    of = lambda name: np.array([getattr(r, name) for r in rows])  # noqa: E731
    turns = Turns(of("task"), of("batch"), cell, np.where(known, halves, 0.0), signed, known)
    packed = [pack(each) for each in groups]
    said = [[(r.key[0], tuple(r.turn.tokens)) for r in rows if r.batch == b] for b in range(batches)]
    gradient = torch.stack([exact_gradient(world, bench.policy) for world in worlds]) if worlds else None
    score = Scorer(turns, packed[WARM:], [bench.policy.slopes(each) for each in said], gradient, len(bench.tasks))
    lot = np.random.default_rng(settings.seed)
    ends = {TRUE: turns.truth.mean(0), RANDOM: lot.standard_normal(len(rows))}
    out = [{"method": k, "note": "", **score([score.of_tokens(b, x) for b in range(batches)])} for k, x in ends.items()]
    learner = engines.make_learner(settings, copy.deepcopy(bench.model), recipes.build("grpo"))
    plain = {"env": settings.env, "difficulty": settings.difficulty}
    with events.stage("methods", len(names), "methods"):
        out += [one_method(name, plain, learner, packed, score) for name in names]
    outcomes = [t.solved for each in groups for group in each for t in group.trajectories]
    facts = {
        "environment": settings.env, "difficulty": list(settings.difficulty), "policy": bench.name,
        "success": round(float(np.mean(outcomes)), 4), "tasks": len(bench.tasks), "batches": batches, "group": bench.size,
        "turns": len(rows), "known": round(float(known.mean()), 4), "signed": int(signed.sum()),
        "forks": forks, "states": sum(len(w.places) for w in worlds),
        "unlisted": max((p.missing for w in worlds for p in w.places.values()), default=0.0), "seed": settings.seed,
        "commit": commit(), "versions": installed_versions(),
    }  # fmt: skip
    return CreditReport(facts, sorted(out, key=rank, reverse=True))


def exact_gradient(world: World, policy: FrozenPolicy) -> Tensor:
    """Of the expected reward of one task, by the output layer."""
    weights, total = world.gradient(), torch.zeros(())
    texts = list(weights)
    for i in range(0, len(texts), ROWS):
        part = texts[i : i + ROWS]
        error, states = policy.slopes(part)
        each = torch.tensor([weights[at] for at in part for _ in at[1]])
        total = total + (error * each[:, None]).T @ states
    return total.flatten()


def commit() -> str:
    """Of the source tree that runs; empty where it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def one_method(
    name: str, settings: Mapping[str, Any], learner: Any, packed: Sequence[Batch], score: Scorer
) -> dict[str, Any]:
    """Its scores, or why it has none: nothing that fails is left out."""
    try:
        recipe = recipes.build(name)
        if reason := why_not(settings, name, recipe):
            return {"method": name, "note": reason}
        credit = credits(recipe, learner, packed)[WARM:]
    except Exception as fault:
        return {"method": name, "note": f"{type(fault).__name__}: {fault}"[:300]}
    if all(bool((x == x[0]).all()) for x in credit):
        return {"method": name, "note": "the same credit for every token here"}
    strategy = type(recipe.strategy)
    note = "" if strategy is Independent else f"its own rollouts ({strategy.__name__}) are not used here"
    return {"method": name, "note": note, **score(credit)}


def rank(row: Mapping[str, Any]) -> float:
    value = row.get("correlation", [-2.0])[0]
    return math.inf if row["method"] == TRUE else -3.0 if value != value else value
