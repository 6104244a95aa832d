"""The columns a step puts on a batch: every key that ``Batch.put`` takes is declared here, is a signal, or is a piece.

    Column.ADVANTAGE              one column
    (Column.PENALTY_WEIGHT, 2)    one of several: by the position of a penalty, of a candidate, or by a level
    Signal.REFERENCE              a measured signal (``core/signals.py``)
    piece, (piece, "name")        a plan or the memory of one piece of a recipe, read by that piece only

A plain string that names no column or signal is refused. This module does not know who writes or reads a column.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum

from turnwise.core.signals import Signal
from turnwise.errors import SignalError, nearest


class Column(StrEnum):
    """The plan of a step, by name. The level stands first in each comment."""

    # credit: once per batch
    ADVANTAGE = "advantage"  # TOKEN, TURN or TRAJECTORY: what each item is credited with
    BATCH_INDEX = "batch_index"  # BATCH: how many batches were credited before this one
    CURRENT_VERSION = "current_version"  # TOKEN: sampled by the present weights, so sampler and learner must agree
    # control: once per optimiser step
    FREEZE_POLICY = "freeze_policy"  # BATCH: present where only the penalties are optimised, for critics
    UPDATED_TURNS = "updated_turns"  # TURN: which turns this step updates; absent: all
    # plan: once per optimiser step, over all of it
    WEIGHT = "weight"  # TOKEN: averaging weight of the gain, 0 for masked tokens
    TOKEN_SHARE = "token_share"  # TOKEN: weight of an even mean over the kept tokens, for statistics
    GAIN_GRADIENT = "gain_gradient"  # TOKEN: ∂ gain / ∂ log π, for ratios that couple trajectories
    NO_GRADIENT = "no_gradient"  # TRAJECTORY: its gradient is exactly 0, so a forward pass is enough
    VOCABULARY_SIZE = "vocabulary_size"  # BATCH: entries of the policy's vocabulary
    PENALTY_WEIGHT = "penalty_weight"  # TOKEN, with the penalty's position: averaging weight, where not the gain's
    PENALTY_GRADIENT = "penalty_gradient"  # TOKEN, with the position: ∂ cost / ∂ log π, where it couples trajectories
    PENALTY_COST = "penalty_cost"  # TOKEN, with the position: that penalty's cost, spread evenly over the kept tokens
    PENALTY_METRIC = "penalty_metric"  # TOKEN, with the position and a name: a number it reports, spread the same way
    # measurement
    RESET_REFERENCE = "reset_reference"  # BATCH: present where the present policy becomes the reference
    CANDIDATE = "candidate"  # TOKEN, with its position: id of a token drawn beside the sampled one; "count": how many
    ROW = "row"  # with a level: the item's row in the batch it was split from


DECLARED: dict[str, Column | Signal] = {str(key): key for key in (*Column, *Signal)}


def checked_key(key: Hashable) -> Hashable:
    """The key as it is stored; an undeclared name raises."""
    name = key[0] if isinstance(key, tuple) and key else key
    if not isinstance(name, str):
        return key
    if name not in DECLARED:
        raise SignalError(f"{name!r} is no column of a batch; declare it in core/columns.py; {nearest(name, DECLARED)}")
    return DECLARED[name] if key is name else key
