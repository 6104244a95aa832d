"""Customer service: a scripted customer, a database of orders, rules, and tools that do not enforce the rules.

The customer asks for one to three things (the difficulty) and says an order's number when asked. The agent looks the order up and
either does what the customer wants or says sorry, as the rules demand. An episode succeeds when the database ends in the state
that the rules allow, whatever was said; only then is the reward 1.

In the spirit of tau-bench, written for small models. The customer knows neither the rules nor the database.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments import base
from turnwise.environments.base import LimitedEpisode

RULES = (
    "you serve customers. ask for the order number, look the order up, act, then say done or sorry. "
    "cancel or move only open orders. refund only orders that came at most 30 days ago. touch no order of another customer."
)
PEOPLE = ("ann", "bob", "eva", "joe", "kim", "max", "pia", "tom")
ITEMS = ("lamp", "desk", "sofa", "vase", "rug", "clock")
CITIES = ("rome", "oslo", "bern", "kyiv", "lima")
WISHES = ("cancel", "refund", "move")
ORDERS = 5  # in the database
REFUND_DAYS, MAX_DAYS = 30, 60
TURNS = 6  # for each request
MAX_CALLS = 4  # in one turn
FINAL = ("done", "sorry")


TOOLS = (
    base.tool_schema("look", "read an order", order="integer"),
    base.tool_schema("cancel", "cancel an order", order="integer"),
    base.tool_schema("refund", "pay the price back", order="integer"),
    base.tool_schema("move", "send to another city", order="integer", city="string"),
)


@dataclass(frozen=True)
class ServiceRequest:
    """What a customer wants done with an order."""

    wish: str
    order: int
    item: str
    city: str = ""

    @property
    def text(self) -> str:
        return f"please {self.wish} my {self.item}" + (f" to {self.city}" if self.city else "") + "."


Database = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class ServiceTask:
    """A customer, their requests, and the orders as they are at the start."""

    customer: str
    requests: tuple[ServiceRequest, ...]
    orders: Mapping[int, Mapping[str, Any]]

    def start(self) -> Database:
        return {number: dict(order) for number, order in self.orders.items()}

    @property
    def goal(self) -> Database:
        """The database after every request that the rules allow."""
        database = self.start()
        for request in self.requests:
            if is_allowed(request.wish, database[request.order], self.customer):
                perform(request.wish, database[request.order], request.city)
        return database


def is_allowed(wish: str, order: Mapping[str, Any], customer: str) -> bool:
    """The rules."""
    if order["customer"] != customer:
        return False
    if wish == "refund":
        return order["state"] == "came" and order["days"] <= REFUND_DAYS
    return bool(order["state"] == "open")


def perform(wish: str, order: dict[str, Any], city: str = "") -> None:
    """The effect of a tool, allowed or not."""
    if wish == "move":
        order["city"] = city
    else:
        order["state"] = {"cancel": "cancelled", "refund": "refunded"}[wish]


class CustomerService(LimitedEpisode):
    """One conversation."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {difficulty: TURNS * difficulty for difficulty in difficulties}
    max_turns = limits[3]
    tools: Sequence[dict[str, Any]] = TOOLS
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1, 2), "context": 320, "max_tokens": 14, "copying": True, "cold_steps": 150, "cold_batch": 24,
    }  # fmt: skip
    deterministic = True
    request: int  # number of the present one
    number_said: bool  # by the customer, of the present order

    def begin(self, seed: int) -> Sequence[Message]:
        def sample(rng: random.Random) -> ServiceTask:
            numbers, customer = rng.sample(range(10, 100), ORDERS), rng.choice(PEOPLE)
            orders: Database = {}
            for number, item in zip(numbers, rng.sample(ITEMS, ORDERS)):
                # a quarter belongs to others, whose orders the rules forbid to touch
                owner = customer if rng.random() < 0.75 else rng.choice([p for p in PEOPLE if p != customer])
                state, city = rng.choice(("open", "came")), rng.choice(CITIES)
                days = rng.randint(1, MAX_DAYS)
                orders[number] = {"item": item, "customer": owner, "city": city, "state": state, "days": days}
            requests = []
            for number in numbers[: self.difficulty]:
                wish = rng.choice(WISHES)
                city = rng.choice(CITIES) if wish == "move" else ""
                requests.append(ServiceRequest(wish, number, orders[number]["item"], city))
            return ServiceTask(customer, tuple(requests), orders)

        self.task = base.sample_problem(sample, seed, self.split)
        self.database, self.request, self.number_said, self.looked = self.task.start(), 0, False, False
        greeting = base.user_message(f"i am {self.task.customer}. {self._current.text}")
        return [{"role": "system", "content": RULES}, greeting]

    @property
    def _current(self) -> ServiceRequest:
        return self.task.requests[min(self.request, len(self.task.requests) - 1)]

    def act(self, action: Action) -> Step:
        if action.calls or action.faults:
            replies = [self._call(call) for call in action.calls[:MAX_CALLS]]
            replies += [(base.tool_message("", f"error: {fault[:80]}"), True) for fault in action.faults[:MAX_CALLS]]
            counts = {"tool_calls": len(action.calls), "tool_errors": sum(failed for _, failed in replies)}
            return Step([message for message, _ in replies], info=counts)
        # the customer answers: the number, the next request, or a farewell
        words = base.plain_words(action.text)
        if words in FINAL:
            self.request += 1
            self.number_said = self.looked = False
            if self.request < len(self.task.requests):
                return Step([base.user_message(self._current.text)])
            right = self.database == self.task.goal
            return Step([base.user_message("bye.")], float(right), terminated=True, info={"success": right})
        if "number" in words:
            self.number_said = True
            return Step([base.user_message(f"it is {self._current.order}.")])
        return Step([base.user_message("please help me.")], info={"tool_errors": 1})

    def _call(self, call: ToolCall) -> tuple[Message, bool]:
        """The tool's reply, and whether it is an error."""
        number, city = call.arguments.get("order"), call.arguments.get("city", "")
        offered = call.name in (tool["function"]["name"] for tool in TOOLS)
        order = self.database.get(number) if isinstance(number, int) else None
        if not offered or order is None or (call.name == "move" and city not in CITIES):
            problem = "no such order" if offered and order is None else "no such tool or city"
            return base.tool_message(call.name, f"error: {problem}", call.id), True
        if call.name == "look":
            self.looked = self.looked or number == self._current.order
            state = f"came {order['days']} days ago" if order["state"] == "came" else order["state"]
            text = f"{order['item']} of {order['customer']} to {order['city']}, {state}"
            return base.tool_message("look", text, call.id), False
        perform(call.name, order, str(city))
        return base.tool_message(call.name, "ok", call.id), False

    def state_key(self) -> str:
        changed = [(n, order) for n, order in sorted(self.database.items()) if order != self.task.orders[n]]
        return f"{self.request} {self.number_said} {self.looked} {changed}"

    def hint(self) -> str:
        return "look the order up before you act, and say sorry where the rules forbid it."

    # ---- scripted policies
    def oracle(self) -> Action:
        """Ask, look, act if the rules allow it and it is not done yet, then say so."""
        request = self._current
        if not self.number_said:
            return base.text_action("order number?")
        if not self.looked:
            return base.tool_action("look", order=request.order)
        if self.database[request.order] != self.task.goal[request.order]:
            return _act(request)
        allowed = is_allowed(request.wish, self.task.orders[request.order], self.task.customer)
        return base.text_action("done" if allowed else "sorry")

    def random_action(self, rng: random.Random) -> Action:
        acts = [base.text_action(text) for text in ("order number?", *FINAL)]
        return rng.choice([*acts, base.tool_action("look", order=self._current.order), _act(self._current)])

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle's conversation, but where it has to judge, half of the time anything that a clerk might do."""
        action = self.oracle()
        # what to ask and to look up is plain; only the verdict is a judgement
        judges = self.number_said and self.looked and not (action.text == "done" and self.database != self.task.start())
        if not judges or rng.random() < 0.5:
            return action
        return rng.choice([_act(self._current), base.text_action("sorry")])


def _act(request: ServiceRequest) -> Action:
    return base.tool_action(request.wish, order=request.order, **({"city": request.city} if request.city else {}))
