"""Trackers for Weights & Biases, MLflow and Trackio: thin wrappers, imported on use. They know no metric."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.core.protocols import Tracker
from turnwise.errors import SettingError, nearest
from turnwise.observe.metric_names import finite_number


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingError(f"tracking with {module} needs it installed: pip install 'turnwise[{module}]'") from error


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    numbers = {name: finite_number(value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if value is not None}


class Wandb:
    def __init__(self, project: str, name: str, settings: Mapping[str, Any]) -> None:
        # the name is the id, so that a resumed run continues in the same place
        self._run = _import("wandb").init(project=project, name=name, id=name, config=dict(settings), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, project: str, name: str, settings: Mapping[str, Any]) -> None:
        self._mlflow = _import("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(_finite(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio:
    def __init__(self, project: str, name: str, settings: Mapping[str, Any]) -> None:
        self._trackio = _import("trackio")
        self._trackio.init(project=project, name=name, config=dict(settings), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(_finite(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


SERVICES: dict[str, Callable[[str, str, Mapping[str, Any]], Tracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def service(kind: str, project: str, name: str, settings: Mapping[str, Any]) -> Tracker:
    """``service("wandb", "turnwise", "first-try", {...})``"""
    if kind not in SERVICES:
        raise SettingError(f"there is no tracker {kind!r}: {nearest(kind, SERVICES)}")
    return SERVICES[kind](project, name, settings)
