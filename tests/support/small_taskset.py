"""A taskset of verifiers for tests: sums of two digits. Needs the package; only its tests import this."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(10):
            for b in range(10):
                data = SumData(prompt=f"{a}+{b}?", system_prompt="add.", answer=str(a + b))
                yield SumTask(data, self.config.task)
