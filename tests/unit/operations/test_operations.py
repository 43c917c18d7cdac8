"""status, verify, repair, lineage, gc on real artifacts of the data stage."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.chain import resolve
from pipeline.config import Config, load
from pipeline.errors import DataError, Stopped
from pipeline.operations.status import describe
from pipeline.progress import progress
from pipeline.trace import traced

ROOT = Path(__file__).resolve().parents[3]
DEBUG = str(ROOT / "configs/debug.yaml")


def words(work_dir: Path) -> list[str]:
    return ["-c", DEBUG, f"work_dir={work_dir}", "tracking.enabled=false"]


def config(work_dir: Path, *overrides: str) -> Config:
    return load(DEBUG, [f"work_dir={work_dir}", *overrides])


@pytest.fixture
def data(work_dir: Path) -> Path:
    """A work directory with a finished data stage; returns the artifact's folder."""
    assert main(["data", *words(work_dir)]) == 0
    return resolve(config(work_dir))["data"].path


def flip(path: Path, at: int = 10) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_verify_names_the_bad_file_and_repair_restores_it(
    work_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = data / "train-00000.jsonl"
    good, other = shard.read_bytes(), (data / "calibration-00000.jsonl").stat().st_mtime_ns
    assert main(["verify", *words(work_dir)]) == 0
    flip(shard)
    assert main(["verify", *words(work_dir)]) == 4
    assert "train-00000.jsonl: damaged" in capsys.readouterr().err
    assert main(["repair", *words(work_dir)]) == 0
    assert shard.read_bytes() == good
    assert (data / "calibration-00000.jsonl").stat().st_mtime_ns == other, "good shards are kept"
    assert main(["verify", *words(work_dir)]) == 0


def test_status_says_what_exists_and_which_field_differs(
    work_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["status", *words(work_dir), "--json"]) == 0
    rows = {row["stage"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["data"]["state"] == "done"
    assert rows["data"]["path"] == str(data)
    assert rows["train"]["state"] == "absent"
    assert main(["status", *words(work_dir), "data.shard_rows=7", "--json"]) == 0
    rows = {row["stage"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["data"]["state"] == "absent"
    assert "data.shard_rows (48 there, 7 here)" in rows["data"]["note"]


def test_status_tells_running_failed_and_stopped_apart(work_dir: Path) -> None:
    artifact = resolve(config(work_dir))["tokens"]
    artifact.create()
    assert describe(artifact)["state"] == "partial"
    with pytest.raises(ValueError, match="boom"), traced(artifact):
        assert describe(artifact)["state"] == "running"
        raise ValueError("boom")
    assert describe(artifact)["state"] == "failed"
    assert "boom" in describe(artifact)["note"]
    with pytest.raises(Stopped), traced(artifact):
        raise Stopped("signal SIGUSR1")
    assert describe(artifact)["state"] == "stopped"
    assert "SIGUSR1" in describe(artifact)["note"]


def test_status_shows_how_far_a_run_is_and_when_it_ends(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bar says travels with the heartbeat, so that another process can see it."""
    monkeypatch.setattr("pipeline.trace.HEARTBEAT_SECONDS", 0.02)
    artifact = resolve(config(work_dir))["answers"]
    artifact.create()
    with traced(artifact), progress(total=40, what="answers", unit="rows", done=8) as bar:
        bar.advance(16)
        deadline = time.monotonic() + 20
        while (describe(artifact)["progress"] or {}).get("done") != 24 and time.monotonic() < deadline:
            time.sleep(0.02)
        found = describe(artifact)
    assert found["state"] == "running" and "answers: 24/40 rows, " in found["note"] and " left; " in found["note"]
    told = found["progress"]
    assert (told["done"], told["total"], told["unit"]) == (24, 40, "rows") and told["seconds_left"] > 0
    assert describe(artifact)["progress"] is None


def test_status_keeps_the_error_that_came_first(work_dir: Path) -> None:
    """Another rank fails a moment later, for want of the first."""
    artifact = resolve(config(work_dir))["train"]
    artifact.create()
    (artifact.path / "metrics.jsonl").write_text('{"step": 12, "split": "train"}\n')
    with pytest.raises(RuntimeError), traced(artifact):
        with pytest.raises(DataError), traced(artifact):
            raise DataError("the loss is not finite\nrow-3")
        raise RuntimeError("connection closed by peer")
    row = describe(artifact)
    assert row["note"] == "step 12 of 60; DataError: the loss is not finite"
    assert row["error"] == "DataError: the loss is not finite\nrow-3"
    assert json.loads((artifact.path / "failed.json").read_text())["exit_code"] == DataError.exit_code


def test_status_shows_slurm_jobs_beside_the_artifacts_they_were_submitted_for(
    work_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins for sbatch and squeue: tests/slurm asks the real ones."""
    for name, text in (("sbatch", 'echo >> "$0.calls"; echo $((40 + $(wc -l < "$0.calls")))'), ("squeue", "")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["submit", *words(work_dir), "launch.array_tasks=4"]) == 0
    queued = ["41|RUNNING|None"] * 2 + ["41|PENDING|Resources", "42|PENDING|Dependency"]
    (tmp_path / "squeue").write_text("#!/bin/bash\nprintf '%s\\n' '" + "' '".join(queued) + "'\n")

    def rows(*overrides: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["status", *words(work_dir), "--json", *overrides]) == 0
        return {row["stage"]: row["slurm"] for row in json.loads(capsys.readouterr().out)}

    found = rows()
    assert found["data"]["job_id"] == "41" and found["data"]["state"] == "1 PENDING (Resources), 2 RUNNING"
    assert found["answers"]["state"] == "PENDING (Dependency)" and found["train"]["state"] == "ended"
    assert found["data"]["log"] == str(work_dir / "runs/debug/slurm/debug-data-41_%a.out")
    assert found["train"]["log"].endswith("debug-train-45.out")
    assert rows("train.steps=61")["train"] is None, "the job was submitted for another artifact"
    assert main(["status", *words(work_dir)]) == 0
    assert "Slurm job 42: PENDING (Dependency); " in capsys.readouterr().out
    (tmp_path / "squeue").write_text("#!/bin/bash\necho no controller >&2; exit 1\n")
    assert rows()["answers"]["state"] == "unknown, squeue does not answer here"


def test_status_does_not_call_a_killed_run_running(work_dir: Path) -> None:
    artifact = resolve(config(work_dir))["tokens"]
    artifact.create()
    child = os.fork()
    if child == 0:
        with traced(artifact):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert describe(artifact)["state"] == "partial"


@pytest.mark.parametrize(
    ("stage", "kept", "told"),
    [
        ("export", [], "0 of 2 layouts written"),
        ("export", ["speculators"], "1 of 2 layouts written"),
        ("profile", [], "nothing published yet"),
        ("train", [], "nothing published yet"),
        ("evaluate", [], "0 shards published"),
    ],
)
def test_status_counts_what_a_killed_stage_publishes(work_dir: Path, stage: str, kept: list[str], told: str) -> None:
    artifact = resolve(config(work_dir, "export.layouts=[deepspec,speculators]"))[stage]
    artifact.create()
    for name in [*kept, ".tmp/host.1.deepspec"]:
        (artifact.path / name).mkdir(parents=True)
    assert describe(artifact)["note"] == f"{told}; killed or never finished: the same command goes on"


def test_lineage_leads_back_to_the_sources_and_forward_to_what_was_made(
    work_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = resolve(config(work_dir))
    for name in ("answers", "tokens"):
        chain[name].create()
    capsys.readouterr()
    assert main(["lineage", "tokens", *words(work_dir), "--json"]) == 0
    back = json.loads(capsys.readouterr().out)["made_from"]
    assert [item[1][0] for item in back] == ["answers", "data"]
    assert main(["lineage", data.name[:6], *words(work_dir), "--json"]) == 0
    forward = json.loads(capsys.readouterr().out)["made_into"]
    assert [item[1] for item in forward] == [
        ["answers", chain["answers"].fingerprint],
        ["tokens", chain["tokens"].fingerprint],
    ]
    assert main(["lineage", "nothing", *words(work_dir)]) == 2


def test_gc_lists_and_deletes_only_what_no_experiment_reaches(
    work_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loose = resolve(config(work_dir, "data.shard_rows=7"))["data"]
    loose.create()
    assert main(["gc", *words(work_dir)]) == 0
    assert "1 of 2 artifacts are unreferenced" in capsys.readouterr().out
    assert loose.path.exists()
    assert main(["gc", *words(work_dir), "--yes"]) == 0
    assert not loose.path.exists()
    assert data.exists()


def test_gc_keeps_what_its_own_configuration_finds_again(
    work_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial with other settings takes the experiment's links over; the file's own artifacts are no garbage yet."""
    trial = [*words(work_dir), "data.shard_rows=7"]
    assert main(["data", *trial]) == 0
    assert main(["gc", *words(work_dir), "--yes"]) == 0
    assert "0 of 2 artifacts are unreferenced" in capsys.readouterr().out and data.exists()
    assert main(["gc", *trial]) == 0
    assert "1 of 2 artifacts are unreferenced" in capsys.readouterr().out


def test_an_edited_request_or_a_damaged_manifest_is_named_and_repaired(
    work_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = data / "request.json"
    request.write_text(request.read_text().replace('"seed": 0', '"seed": 1'))
    assert main(["verify", *words(work_dir)]) == 4
    assert "request.json: damaged" in capsys.readouterr().err
    assert main(["repair", *words(work_dir)]) == 0
    (data / "manifest.json").write_text("{")
    assert main(["status", *words(work_dir), "--json"]) == 0
    assert main(["verify", *words(work_dir)]) == 4
    assert main(["repair", *words(work_dir)]) == 0
    assert main(["verify", *words(work_dir)]) == 0
