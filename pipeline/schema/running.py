"""What surrounds a run: `tracking`, `launch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pipeline.schema.base import Count, Section, execution


class Tracking(Section):
    enabled: bool = execution(True, "MLflow")
    uri: str | None = execution(
        None, "tracking store; null takes MLFLOW_TRACKING_URI, else an sqlite file in the work directory"
    )
    artifact_location: str | None = execution(None, "where MLflow keeps artifacts; null beside the store")

    def problems(self) -> Iterator[str]:
        schemes = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
        if self.uri is not None and self.uri.partition(":")[0].partition("+")[0] not in schemes:
            yield (
                "uri: MLflow no longer writes plain folders; use http(s)://host:port, sqlite:////path/to/mlflow.db, "
                "or leave it out for an sqlite file in the work directory"
            )


class Launch(Section):
    """How `dspark submit` and `dspark run` start processes."""

    nodes: Count = execution(1, "nodes of the train job")
    processes_per_node: Count = execution(1, "ranks per node")
    array_tasks: Count = execution(1, "array tasks of the sharded stages")
    partition: str | None = execution(None, "Slurm partition")
    account: str | None = execution(None, "Slurm account")
    gres: str | None = execution(None, "e.g. gpu:8")
    time_limit: str | None = execution(None, "Slurm time limit, e.g. 24:00:00")
    site_file: str | None = execution(None, "sourced in the body of every batch script")
    stop_signal: Literal["SIGTERM", "SIGUSR1", "SIGUSR2"] | None = execution(
        None, "asks a run to save and end, beside SIGTERM; null: Slurm sends SIGUSR1, SIGUSR2 works too"
    )
    grace_seconds: Count = execution(120, "between that signal and the kill", le=65535)
    port: Annotated[int, Field(ge=1024, le=65535)] | None = execution(None, "rendezvous; null derives it from the job")
