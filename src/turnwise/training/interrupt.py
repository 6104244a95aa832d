"""SIGTERM and SIGINT as a request to stop: after the current step with a checkpoint, or at once where there is no step.

Does not know what a step does, nor how a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

GRACE_SECONDS = 60.0  # for the current step to finish; then the run stops without a new checkpoint
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RunStopped(KeyboardInterrupt):
    """A signal stopped the run. Derives from KeyboardInterrupt so that no ``except Exception`` of an environment swallows it."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text)
        self.number = number
        self.exit_code = 128 + number


class StopSignals:
    """While entered, the first signal requests a stop, and a second one stops at once."""

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self.grace = grace
        self.received = 0  # the signal's number
        self._deferred = False
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers. Only the main thread may: elsewhere, such as in a notebook's worker, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._timer is not None:
                self._timer.cancel()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal only sets ``received``, and stops the run when ``grace`` seconds have passed."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def raise_if_received(self) -> None:
        if self.received:
            raise RunStopped(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received or not self._deferred:
            raise RunStopped(self.received or number)
        self.received = number
        self._timer = threading.Timer(self.grace, signal.raise_signal, (number,))
        self._timer.daemon = True
        self._timer.start()
