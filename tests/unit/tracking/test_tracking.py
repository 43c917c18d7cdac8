"""Tracking against a real sqlite store, and a real server that goes away, comes back or is slow (TRK cases)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifact import Artifact, write_json
from pipeline.config import Config, load, validate
from pipeline.errors import ConfigError
from pipeline.tracking import NullTracker, note_reuse, open_tracker
from pipeline.tracking import delivery as delivery_module
from pipeline.tracking.tracker import MlflowTracker, store_uri
from tests.conftest import Proof
from tests.ranks import run_ranks

mlflow_tracking = pytest.importorskip("mlflow.tracking")
ROOT = Path(__file__).resolve().parents[3]


def make_config(work_dir: Path, *overrides: str) -> Config:
    return load(ROOT / "configs" / "debug.yaml", [f"work_dir={work_dir}", *overrides])


def make_artifact(work_dir: Path, *, stage: str = "train", mark: object = 0) -> Artifact:
    artifact = Artifact(work_dir, stage, {"stage": stage, "format": 1, "mark": mark})
    artifact.create()
    return artifact


def opened(config: Config, artifact: Artifact) -> MlflowTracker:
    tracker = open_tracker(config, artifact.stage, artifact, inputs={})
    assert isinstance(tracker, MlflowTracker)
    return tracker


def runs(config: Config, kind: str = "stage") -> list[Any]:
    client = mlflow_tracking.MlflowClient(tracking_uri=store_uri(config))
    experiment = client.get_experiment_by_name(config.experiment)
    return (
        [] if experiment is None else client.search_runs([experiment.experiment_id], f"tags.`dspark.kind` = '{kind}'")
    )


def history(config: Config, run: Any, key: str) -> list[tuple[int, float]]:
    client = mlflow_tracking.MlflowClient(tracking_uri=store_uri(config))
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, key))


# ------------------------------------------------------------------------------------------------ one run


def four_ranks(work_dir: Path) -> str:
    config = make_config(work_dir)
    tracker = open_tracker(config, "train", make_artifact(work_dir), inputs={})
    tracker.metrics({"loss": 1.0}, step=1)
    tracker.close()
    return type(tracker).__name__


@pytest.mark.case("TRK-01")
def test_four_ranks_make_one_run(work_dir: Path) -> None:
    kinds = run_ranks(four_ranks, 4, work_dir)
    assert kinds == ["MlflowTracker", *["NullTracker"] * 3]
    config = make_config(work_dir)
    (run,), (parent,) = runs(config), runs(config, "parent")
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert history(config, run, "loss") == [(1, 1.0)]


@pytest.mark.case("TRK-02")
@pytest.mark.case("TRK-05")
def test_resume_goes_on_in_the_same_run_without_repeated_steps(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make_artifact(work_dir)
    config = make_config(work_dir)
    tracker = opened(config, artifact)
    for step in range(1, 6):
        tracker.metrics({"loss": 1 / step}, step=step)
    write_json(artifact.path / "stopped.json", {"reason": "signal SIGTERM"})
    tracker.close("KILLED")
    (run,) = runs(config)
    assert run.info.status == "KILLED" and run.data.tags["stopped"] == "signal SIGTERM"

    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # what some launchers leave behind changes nothing
    monkeypatch.setenv("WORLD_SIZE", "2")
    resumed_config = make_config(work_dir, "train.micro_batch_tokens=99")
    tracker = opened(resumed_config, artifact)
    for step in range(4, 9):
        tracker.metrics({"loss": 1 / step}, step=step)
    tracker.close()
    (run,) = runs(config)
    assert history(config, run, "loss") == [(step, 1 / step) for step in range(1, 9)]
    assert run.info.status == "FINISHED"
    assert run.data.params["train.micro_batch_tokens"] == "8192"
    assert run.data.tags["resume-1.train.micro_batch_tokens"] == "99"
    assert run.data.tags["resume-1.world_size"] == "2"

    other = make_artifact(work_dir, mark="another learning rate")
    opened(make_config(work_dir, "train.learning_rate=0.1"), other).close()
    assert len(runs(config)) == 2 and len(runs(config, "parent")) == 1


def test_crash_is_failed_and_the_parent_shows_it(work_dir: Path) -> None:
    config = make_config(work_dir)
    opened(config, make_artifact(work_dir)).close("FAILED")
    assert [run.info.status for run in (*runs(config), *runs(config, "parent"))] == ["FAILED", "FAILED"]


def test_reuse_by_another_experiment_is_one_tagged_child(work_dir: Path) -> None:
    artifact = make_artifact(work_dir)
    first, second = make_config(work_dir), make_config(work_dir, "experiment=second")
    opened(first, artifact).close()
    artifact.finish()
    for config in (first, second, second):
        note_reuse(config, "train", artifact, inputs={})
    assert len(runs(first)) == 1
    (child,) = runs(second)
    assert child.data.tags["reused_from"] == artifact.fingerprint and child.info.status == "FINISHED"


@pytest.mark.case("TRK-06")
def test_what_is_not_finite_is_counted_and_not_sent(work_dir: Path) -> None:
    config, artifact = make_config(work_dir), make_artifact(work_dir)
    tracker = opened(config, artifact)
    tracker.metrics({"tau": float("nan"), "loss": 1.0}, step=1)
    tracker.metrics({"tau": float("inf"), "loss": 2.0}, step=2)
    tracker.metrics({"tau": "not a number", "loss": 3.0}, step=3)
    tracker.close()
    (run,) = runs(config)
    assert history(config, run, "tau") == []
    assert history(config, run, "tau.not_finite") == [(1, 1.0), (2, 2.0)]
    assert history(config, run, "loss") == [(1, 1.0), (2, 2.0)]


@pytest.mark.case("TRK-07")
def test_no_secret_in_params_tags_or_files(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "swordfish-0123"
    monkeypatch.setenv("HF_TOKEN", secret)
    config, artifact = make_config(work_dir), make_artifact(work_dir)
    note = artifact.path / "note.yaml"
    note.write_text(f"a:\n  api_key: {secret}\n  uri: http://user:{secret}@host\n", encoding="utf-8")
    tracker = opened(config, artifact)
    tracker.params({"a": {"b": [{"api_key": secret}]}, "uri": f"http://user:{secret}@host"})
    tracker.tags({"password": secret})
    tracker.file(note, "notes")
    tracker.close()
    note.unlink()
    everything = [path for path in work_dir.rglob("*") if path.is_file()]
    assert any(path.name == "note.yaml" for path in everything)
    assert [path for path in everything if secret.encode() in path.read_bytes()] == []
    assert secret not in "".join(capsys.readouterr())


@pytest.mark.case("TRK-04")
def test_out_of_the_box_store_works_and_a_folder_store_is_refused_early(work_dir: Path) -> None:
    config = make_config(work_dir)
    opened(config, make_artifact(work_dir)).close()
    assert (work_dir / "mlflow.db").is_file()
    for uri in ("file:./mlruns", "./mlruns", "/data/mlruns"):
        with pytest.raises(ConfigError, match="sqlite"):
            validate({**config.model_dump(), "tracking": {"uri": uri}})


def test_disabled_is_nothing_at_all(work_dir: Path) -> None:
    artifact = make_artifact(work_dir)
    tracker = open_tracker(make_config(work_dir, "tracking.enabled=false"), "train", artifact, inputs={})
    assert isinstance(tracker, NullTracker)
    assert not (artifact.path / "tracking").exists()


# ------------------------------------------------------------------------------------------------ a server with moods


class Server:
    """MLflow's own application over sqlite on a fixed port; can be stopped, restarted, and told to take its time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.delay, self.calls_left = folder, 0.0, 10**9
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._server: Any = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        from mlflow.server import app
        from werkzeug.serving import make_server

        def moody(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            self.calls_left -= 1
            if self.calls_left < 0:
                start_response("503 Service Unavailable", [])
                return [b""]
            time.sleep(self.delay)
            return app(environ, start_response)

        self._server = make_server("127.0.0.1", self.port, moody, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from mlflow.server import handlers

    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{tmp_path}/server.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path / "served"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # the server sets it for itself; this takes it back afterwards
    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(delivery_module, "_RETRY_SECONDS", (0.3,))
    monkeypatch.setattr(delivery_module, "_FLUSH_SECONDS", 0.2)
    made = Server(tmp_path)
    yield made
    made.stop()


def longest_call(tracker: MlflowTracker, steps: range, pause: float = 0.0) -> float:
    longest = 0.0
    for step in steps:
        began = time.monotonic()
        tracker.metrics({"loss": float(step)}, step=step)
        longest = max(longest, time.monotonic() - began)
        time.sleep(pause)
    return longest


@pytest.mark.case("TRK-03")
def test_server_that_dies_at_step_5_and_returns(
    work_dir: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    config, artifact = make_config(work_dir, f"tracking.uri={server.uri}"), make_artifact(work_dir)
    tracker = opened(config, artifact)
    assert longest_call(tracker, range(1, 6), pause=0.1) < 2
    server.stop()
    assert longest_call(tracker, range(6, 20), pause=0.1) < 2
    tracker.close("FAILED")
    assert capsys.readouterr().err.count("warning") == 1
    server.start()
    tracker = opened(config, artifact)  # the restarted run goes back to step 10 and sends what was left
    longest_call(tracker, range(10, 31))
    tracker.close()
    (run,) = runs(config)
    assert history(config, run, "loss") == [(step, float(step)) for step in range(1, 31)]
    assert run.info.status == "FINISHED"


@pytest.mark.case("TRK-03")
def test_server_that_fails_after_three_calls_and_recovers_within_the_run(work_dir: Path, server: Server) -> None:
    server.start()
    server.calls_left = 3
    config, artifact = make_config(work_dir, f"tracking.uri={server.uri}"), make_artifact(work_dir)
    tracker = opened(config, artifact)
    longest_call(tracker, range(1, 11), pause=0.1)
    server.calls_left = 10**9
    time.sleep(1)
    tracker.close()
    (run,) = runs(config)
    assert history(config, run, "loss") == [(step, float(step)) for step in range(1, 11)]
    assert len(runs(config, "parent")) == 1


@pytest.mark.case("TRK-03")
def test_absent_server_costs_a_warning_and_reuse_sends_the_rest(
    work_dir: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    config, artifact = make_config(work_dir, f"tracking.uri={server.uri}"), make_artifact(work_dir)
    tracker = opened(config, artifact)
    assert longest_call(tracker, range(1, 4)) < 2
    tracker.close()
    assert capsys.readouterr().err.count("warning") == 1
    artifact.finish()
    server.start()
    note_reuse(config, "train", artifact, inputs={})
    (run,) = runs(config)
    assert history(config, run, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert run.info.status == "FINISHED" and run.info.start_time <= run.info.end_time


@pytest.mark.case("TRK-03")
def test_slow_server_never_holds_a_step(work_dir: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.tracking.tracker._CLOSE_SECONDS", 0.5)
    server.start()
    server.delay = 30.0
    config, artifact = make_config(work_dir, f"tracking.uri={server.uri}"), make_artifact(work_dir)
    tracker = opened(config, artifact)
    assert longest_call(tracker, range(1, 11), pause=0.05) < 2
    tracker.close()
    lines = [json.loads(line) for line in (artifact.path / "tracking" / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line.get("metrics", {})] == list(range(1, 11))


# ------------------------------------------------------------------------------------------------ kill -9

VICTIM = """
import sys, itertools
from pathlib import Path
from tests.unit.tracking.test_tracking import make_artifact, make_config, opened
import pipeline.tracking.delivery as delivery
delivery._FLUSH_SECONDS = 0.01
work_dir = Path(sys.argv[1])
tracker = opened(make_config(work_dir), make_artifact(work_dir))
print("logging", flush=True)
for step in itertools.count(1):
    tracker.metrics({"loss": float(step)}, step=step)
"""


@pytest.mark.prove
@pytest.mark.case("TRK-08")
def test_kill_while_logging_leaves_a_readable_store(work_dir: Path, proof: Proof) -> None:
    config = make_config(work_dir)
    kills = proof.size(2, 10)
    for index in range(kills):
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(work_dir)], cwd=ROOT, stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert victim.stdout is not None and victim.stdout.readline() == b"logging\n"
        time.sleep(0.5 + 0.13 * index)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
    tracker = opened(config, make_artifact(work_dir))
    tracker.close()
    (run,) = runs(config)
    steps = [step for step, _ in history(config, run, "loss")]
    assert run.info.status == "FINISHED" and len(steps) > 10
    assert steps == list(range(1, len(steps) + 1))
    proof.note("kill -9 while logging, metrics in the store, each once", f"{kills} kills, {len(steps)} metrics")
