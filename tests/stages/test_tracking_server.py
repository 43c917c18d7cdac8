"""A real `mlflow server` is killed in the middle of a real training run, and comes back after it."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifact import Artifact
from pipeline.chain import resolve
from pipeline.config import Config
from pipeline.progress import say
from pipeline.runner import run_stage
from pipeline.tracking import delivery
from pipeline.tracking.tracker import MlflowTracker
from tests.conftest import Proof
from tests.stages.token_rows import prepare

SECRET = "swordfish-0123"
RECIPE = (
    "train.global_batch_size=4", "train.num_anchors=8", "train.validate_every=50", "train.save_every=50",
    "draft.init=random", "draft.markov_rank=4",
)  # fmt: skip


class Server:
    """`mlflow server` over sqlite on a port of its own. Killed with SIGKILL, all its processes at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """With a password in it, as people write them."""
        return f"http://me:{SECRET}@127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        store = [
            "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination", str(self.folder / "served"),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words, *store], start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 180
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < deadline, "mlflow server does not start"
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    made = Server(folder)
    yield made
    made.kill()


class Watch:
    """Notes when each step was recorded, and kills the server after one of them, once it has had some of them."""

    def __init__(self, server: Server, kill_at: int | None) -> None:
        self.server, self.kill_at, self.moments = server, kill_at, list[float]()
        self.artifact: Artifact | None = None
        self._metrics = MlflowTracker.metrics

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watch = self

        def metrics(self: MlflowTracker, values: dict[str, Any], step: int | None = None) -> None:
            watch._metrics(self, values, step)
            if "train/loss" in values:
                watch.moments.append(time.perf_counter())
                if step == watch.kill_at:
                    watch.wait_for_a_delivery()
                    watch.server.kill()
                    watch.moments.append(time.perf_counter())  # the kill's own time is nobody's step

        monkeypatch.setattr(MlflowTracker, "metrics", metrics)

    def wait_for_a_delivery(self) -> None:
        assert self.artifact is not None
        deadline = time.monotonic() + 60
        while not sent_bytes(self.artifact):
            assert time.monotonic() < deadline, "nothing was delivered to a server that answers"
            time.sleep(0.05)

    def medians(self, half: int) -> tuple[float, float]:
        """Milliseconds a step takes, before and after step `half`; the first steps warm up."""
        steps = [1000 * (b - a) for a, b in zip(self.moments, self.moments[1:], strict=False)]
        return statistics.median(steps[5:half]), statistics.median(steps[half + 1 :])


def trained(config: Config, watch: Watch) -> Artifact:
    artifact = watch.artifact = resolve(config)["train"]
    with pytest.MonkeyPatch.context() as patch:
        watch.install(patch)
        run_stage(config, "train", resolve(config))
    assert artifact.complete
    return artifact


def journal(artifact: Artifact) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (artifact.path / "tracking" / "journal.jsonl").read_text().splitlines()]


def sent_bytes(artifact: Artifact) -> int:
    (record,) = (artifact.path / "tracking").glob("*.json")
    return int(json.loads(record.read_text()).get("sent_bytes", 0))


def on_the_server(server: Server, artifact: Artifact) -> tuple[str, Counter[tuple[str, int]]]:
    """The run's status, and how often each (metric, step) of its history is there."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"http://127.0.0.1:{server.port}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.fingerprint = '{artifact.fingerprint}'")
    found: Counter[tuple[str, int]] = Counter()
    for key in run.data.metrics:
        found.update((key, point.step) for point in client.get_metric_history(run.info.run_id, key))
    return run.info.status, found


@pytest.mark.prove
@pytest.mark.case("TRK-03")
@pytest.mark.case("TRK-07")
def test_a_tracking_server_killed_mid_run_costs_no_step_and_no_metric(
    tmp_path: Path,
    server: Server,
    proof: Proof,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each killed run is paired with one whose server lives. Every metric is there once after the server's return."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(delivery, "_FLUSH_SECONDS", 0.1)  # the server is in use when it dies
    steps, pairs = proof.size((100, 1), (400, 5))
    half, work_dir = steps // 2, tmp_path / "work"
    server.start()
    config = prepare(work_dir, *RECIPE, f"tracking.uri={server.uri}")
    run_stage(config, "targets", resolve(config))
    changes = []
    for pair in range(pairs):
        figures = {}
        for name, kill_at, length in (("alive", None, steps + 2 * pair), ("killed", half, steps + 2 * pair + 1)):
            watch = Watch(server, kill_at)
            config = prepare(work_dir, *RECIPE, f"tracking.uri={server.uri}", f"train.steps={length}")
            artifact = trained(config, watch)
            figures[name] = watch.medians(half)
        assert 0 < sent_bytes(artifact) < (artifact.path / "tracking" / "journal.jsonl").stat().st_size
        server.start()
        run_stage(config, "train", resolve(config))  # reused; what the server missed is sent
        status, found = on_the_server(server, artifact)
        rows = journal(artifact)
        expected = {(key, row.get("step", 0)) for row in rows for key in row.get("metrics", {})}
        assert set(found) == expected and max(found.values()) == 1
        assert {step for key, step in found if key == "train/loss"} == set(range(1, length + 1))
        assert status == "FINISHED"
        (before, after), (left, right) = figures["killed"], figures["alive"]
        changes.append((after / before) / (right / left))
        proof.note(
            "median step before -> after the kill (same halves with the server alive)",
            f"{before:.2f} -> {after:.2f} ms ({left:.2f} -> {right:.2f} ms)",
        )
    say(f"step time after the kill, over that before, paired with runs whose server lives: {changes}")
    proof.note("median of the paired ratios", f"{statistics.median(changes):.3f} ({pairs} pairs of {steps} steps)")
    server.kill()
    printed = "".join(capsys.readouterr())
    assert printed.count("does not take the run's metrics") == pairs
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [] and SECRET not in printed
