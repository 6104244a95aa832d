"""The process that holds the generator, and the pipe to it: send and receive objects, say in words how it was lost.

Knows processes and objects; does not know what the messages mean.
"""

from __future__ import annotations

import pickle
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from turnwise.errors import GeneratorLost
from turnwise.workers.process import WorkerProcess, WorkerStuck

WORKER = "turnwise.engines.own_process.worker"
START_SECONDS = 300.0  # until the process has imported torch and built its generator
END_SECONDS = 2.0  # for a process whose pipe broke to show how it ended


class WorkerLink:
    """One process and its pipe. It ends with this object, or with this process, however that ends. ``seconds``: until a process
    that does not read its pipe is given up."""

    def __init__(self, seconds: float) -> None:
        self._worker = WorkerProcess(WORKER, seconds=seconds)
        self._lock = threading.Lock()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._worker.process

    @property
    def connection(self) -> Connection:
        return self._worker.connection

    def send(self, message: object) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            try:
                self._worker.send_bytes(data)
            except WorkerStuck as stuck:
                raise GeneratorLost(f"the generator process does not answer: {stuck}") from None
            except OSError:
                raise self.lost() from None

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self.lost() from None

    def first_answer(self) -> Any:
        """The answer to the first message, which takes longest."""
        until = time.monotonic() + START_SECONDS
        while not self.connection.poll(0.2):
            if self.process.poll() is not None:
                raise self.lost()
            if time.monotonic() > until:
                raise GeneratorLost(f"the generator process has not started within {START_SECONDS:.0f} s")
        return self.receive()

    def lost(self) -> GeneratorLost:
        """How the process ended, in words."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return GeneratorLost("the generator process closed its pipe")
        return GeneratorLost(f"the generator process {self._worker.how_it_ended()}")

    def close(self) -> None:
        """End the process."""
        self._worker.close()
