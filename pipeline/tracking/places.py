"""Where tracking lives: the store, MLflow's artifacts, and the local folders with its journals and records."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.artifact import Artifact
from pipeline.config import Config


def store_uri(config: Config) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else an sqlite file in the work directory."""
    default = f"sqlite:///{config.work_dir.resolve() / 'mlflow.db'}"
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or default


def artifact_location(config: Config, experiment: str) -> str | None:
    """Where a new MLflow experiment keeps its files; None leaves it to the server."""
    if config.tracking.artifact_location is None and store_uri(config).startswith("sqlite:"):
        return str(config.work_dir.resolve() / "mlartifacts" / experiment)
    return config.tracking.artifact_location


def parent_folder(config: Config, experiment: str) -> Path:
    """Record of an experiment's parent run."""
    return config.work_dir / "runs" / experiment / ".tracking"


def reuse_folder(config: Config, artifact: Artifact) -> Path:
    """Journal of the child run that shows another experiment's artifact in this one."""
    return parent_folder(config, config.experiment) / f"{artifact.stage}-{artifact.fingerprint}"
