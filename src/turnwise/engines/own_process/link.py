"""The process that holds the generator, and the pipe to it: start it, send and receive objects, say how it ended.

Knows processes and bytes; does not know what the messages mean.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from turnwise.errors import GeneratorLost

WORKER = "turnwise.engines.own_process.worker"
START_SECONDS = 300.0  # until the process has imported torch and built its generator
END_SECONDS = 2.0  # for a process whose pipe broke to show how it ended


class WorkerLink:
    """One process and its pipe. It ends with this object, or with this process, however that ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the run, which then ends this process
            )
        self.connection = Connection(ours.detach())
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            try:
                self.connection.send_bytes(data)
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
            status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return GeneratorLost("the generator process closed its pipe")
        if status < 0:
            return GeneratorLost(f"the generator process was ended by {signal.Signals(-status).name}")
        return GeneratorLost(f"the generator process ended with status {status}{self._last_line()}")

    def _last_line(self) -> str:
        if self.log.closed:
            return ""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.log.close()
