"""Messages between rank 0 and another rank: Python objects over a pipe that nobody else can open.

Tensors travel as arrays, which pickle faster than torch's storages and leave no shared memory behind. Knows no learner.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def _as_array(tensor: Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.detach().cpu().contiguous().numpy(),)


def encode(message: object) -> memoryview:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _as_array}
    pickler.dump(message)
    return buffer.getbuffer()


def send(connection: Connection, message: object) -> None:
    connection.send_bytes(encode(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
