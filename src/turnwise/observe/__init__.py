"""What a run shows: trackers, live progress, curves and reports. Knows no method and computes nothing trained on."""

from turnwise.observe.metrics import JsonLines, TensorBoard, Trackers, read_rows
from turnwise.observe.plot import curves
from turnwise.observe.progress import LivePanel, PlainLog, show_progress
from turnwise.observe.report import comparison, table, transcript
from turnwise.observe.services import SERVICES, service

__all__ = [
    "SERVICES",
    "JsonLines",
    "LivePanel",
    "PlainLog",
    "TensorBoard",
    "Trackers",
    "comparison",
    "curves",
    "read_rows",
    "service",
    "show_progress",
    "table",
    "transcript",
]
