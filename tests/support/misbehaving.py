"""Environments that end, block or disturb their process. Imports little, because a new process imports it."""

from __future__ import annotations

import os

from turnwise.core.protocols import Step


class Patient:
    """An environment that asks for ever."""

    def reset(self, seed):
        return [{"role": "user", "content": f"seed {seed}"}]

    def step(self, action):
        return Step([{"role": "user", "content": "again"}], reward=0.5)


class Random(Patient):
    def reset(self, seed):
        return [{"role": "user", "content": os.urandom(8).hex()}]


class Exits(Patient):
    def step(self, action):
        os._exit(3)


class Crashes(Patient):
    def step(self, action):
        os.abort()


class HoldsTheInterpreter(Patient):
    def step(self, action):
        return Step(
            info={"facts": {"n": float(len(str(7 ** (10**9))))}}
        )  # one multiplication that no signal interrupts


class Spins(Patient):
    def step(self, action):
        while True:
            pass


class Prints(Patient):
    def step(self, action):
        print("hello from the environment", flush=True)
        os.write(1, b"and from below Python\n")
        return super().step(action)


class Odd(Patient):
    def step(self, action):
        return "nonsense"


class NumPyReward(Patient):
    def step(self, action):
        import numpy as np

        return Step([], np.float32(0.5), np.bool_(True), False, {"success": np.bool_(True), "tool_calls": np.int64(2)})


class Starved(Patient):
    def step(self, action):
        raise OSError(24, "Too many open files")


class EndedByTheKernel(Patient):
    def step(self, action):
        os.kill(os.getpid(), 9)  # as the kernel does where memory runs out


class Stopped(Patient):
    def step(self, action):
        os.kill(os.getpid(), 19)  # as somebody's SIGSTOP does
