"""A process that serves this one over a pipe: start it, send bytes, notice a pipe that nobody reads, say how it ended.

It runs a module of this package and ends with this process, however that ends. Knows processes and bytes; not what messages mean.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from turnwise.engines.sockets import set_timeout


class PipeStuck(OSError):
    """The other process has read nothing for too long: it is stopped or stuck."""


class PipedProcess:
    """``module`` is started with the number of its end of the pipe. ``seconds``: until a write that nobody reads raises
    ``PipeStuck``; a message that does not fit the pipe's buffer waits for its reader."""

    def __init__(self, module: str, seconds: float) -> None:
        ours, theirs = socket.socketpair()
        set_timeout(ours, socket.SO_SNDTIMEO, seconds)
        self.seconds = seconds
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the run, which then ends this process
            )
        self.connection = Connection(ours.detach())

    def send_bytes(self, data: Any) -> None:
        """After ``PipeStuck`` half a message may be in the pipe: the process is of no use any longer."""
        try:
            self.connection.send_bytes(data)
        except BlockingIOError:
            raise PipeStuck(f"it has read nothing for {self.seconds:.0f} s: it is stopped or stuck") from None

    def how_it_ended(self) -> str:
        """How the process ended, in words; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}" + (f": {last}" if (last := self._last_line()) else "")

    def _last_line(self) -> str:
        if self.log.closed:
            return ""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.log.close()
