"""What users see of a run: trackers, live progress, curves and reports. Knows no method and computes nothing trained on."""

from turnwise.observe.plot import curves
from turnwise.observe.progress import LivePanel, PlainLog, show_progress
from turnwise.observe.report import comparison, table, transcript
from turnwise.observe.tracker_services import SERVICES, service
from turnwise.observe.trackers import JsonLines, TensorBoard, Trackers, read_rows

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
