"""The chain on a real two-node cluster: whole, stopped, preempted, hit by node failures, failed, and resubmitted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain import STAGES
from tests.conftest import Proof
from tests.slurm.cluster import ENDED, Cluster
from tests.stages.test_readme import BY_HAND

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DSPARK = str(Path(sys.executable).with_name("dspark"))
SMALL = [
    "tracking.enabled=false", "target.tiny.train_steps=10", "train.steps=12", "train.save_every=4",
    "train.validate_every=12",
    "calibrate.num_prompts=8", "calibrate.max_new_tokens=8", "evaluate.num_prompts=4", "evaluate.max_new_tokens=8",
    "evaluate.bootstrap=50", "profile.max_batch_tokens=8", "profile.repeats=1",
]  # fmt: skip
WIDE = ["launch.nodes=2", "launch.array_tasks=2", "launch.gres=gpu:1"]


class Site:
    """The cluster with one work directory on it."""

    def __init__(self, cluster: Cluster, work_dir: Path) -> None:
        self.cluster, self.work_dir = cluster, work_dir

    def words(self, *overrides: str) -> list[str]:
        settings = [f"work_dir={self.work_dir}", f"launch.site_file={self.cluster.site}", *SMALL, *overrides]
        return ["-c", "configs/debug.yaml", *settings]

    def submit(self, *overrides: str) -> dict[str, Any]:
        self.cluster.run(DSPARK, "submit", *self.words(*overrides), cwd=ROOT)
        return dict(json.loads((self.work_dir / "runs" / "debug" / "slurm" / "jobs.json").read_text()))

    def sbatch(self, *words: str) -> str:
        """Submit a script by hand, as its own first lines say; the job id."""
        environ = [f"DSPARK={DSPARK}", f"DSPARK_SITE={self.cluster.site}"]
        logs = f"--output={self.work_dir}/%x-%A.out"
        return self.cluster.run("env", *environ, "sbatch", "--parsable", logs, *words, cwd=ROOT).strip()

    def status(self, *overrides: str) -> dict[str, dict[str, Any]]:
        text = self.cluster.run(DSPARK, "status", "--json", *self.words(*overrides), cwd=ROOT)
        return {row["stage"]: row for row in json.loads(text)}


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(cluster, tmp_path_factory.mktemp("work"))


def steps_of(folder: Path) -> list[int]:
    """Optimizer steps in the order they were logged, whole lines only; validation has rows of its own."""
    path = folder / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    rows = [json.loads(line) for line in whole]
    return [row["step"] for row in rows if row["split"] == "train"]


@pytest.mark.parametrize("script", ["stage.sbatch", "shards.sbatch"])
def test_sbatch_accepts_the_scripts(cluster: Cluster, script: str) -> None:
    cluster.run("sbatch", "--test-only", "--gres=gpu:2", str(ROOT / "slurm" / script), "train")


@pytest.fixture(scope="module")
def chain(site: Site) -> dict[str, Any]:
    """The whole chain, submitted and ended, on which the other tests build. Stage -> its job."""
    jobs = site.submit(*WIDE)
    site.cluster.wait(jobs["export"]["job_id"], 900)
    return jobs


def test_submit_runs_the_whole_chain_on_two_nodes(site: Site, chain: dict[str, Any]) -> None:
    assert sorted(chain) == sorted(STAGES)
    folder = site.work_dir / "runs" / "debug" / "slurm"
    logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.out")}
    ends = {state for job in chain.values() for state in site.cluster.states(job["job_id"])}
    assert ends == {"COMPLETED"}, logs
    rows = site.status()
    assert {row["state"] for row in rows.values()} == {"done"}
    assert all(rows[name]["slurm"]["job_id"] == job["job_id"] for name, job in chain.items())
    assert {row["slurm"]["state"] for row in rows.values()} == {"ended"}
    assert "Every stage is finished." in (site.work_dir / "runs" / "debug" / "report.html").read_text(encoding="utf-8")
    assert "2 rank(s)" in (folder / f"debug-train-{chain['train']['job_id']}.out").read_text()
    assert site.submit(*WIDE) == chain  # all done: nothing new


def test_a_train_job_survives_time_limit_preemption_and_node_failure(site: Site, chain: dict[str, Any]) -> None:
    steps = 300
    overrides = [f"train.steps={steps}", "train.save_every=10", "train.learning_rate=1e-3"]
    train = ["train", *site.words(*overrides)]
    job = site.sbatch("--nodes=2", "--job-name=long", "--signal=B:USR1@60", str(ROOT / "slurm/stage.sbatch"), *train)
    follows = site.sbatch(f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "--wrap=true")
    folder = Path(site.status(*overrides)["train"]["path"])
    cluster, log = site.cluster, site.work_dir / f"long-{job}.out"

    def trained_on(restarts: int) -> None:
        """Wait until this start of the job has logged steps of its own."""
        old: list[int] = []

        def reached() -> bool:
            facts = cluster.facts(job)
            assert facts["JobState"] not in ENDED, log.read_text()[-3000:]
            if facts["Restarts"] != str(restarts) or facts["JobState"] != "RUNNING":
                old[:] = steps_of(folder)  # what the start before it leaves
                return False
            return max(steps_of(folder), default=0) >= max(old, default=0) + 12

        cluster.until(reached, 300, f"steps after {restarts} restarts")

    trained_on(restarts=0)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # what Slurm sends before the time limit
    trained_on(restarts=1)
    urgent = site.sbatch("--partition=urgent", "--nodes=2", "--exclusive", "--job-name=urgent", "--wrap=true")
    cluster.wait(urgent, 300)
    trained_on(restarts=2)
    subprocess.run(["kill", "-9", str(cluster.node_pid("node2"))], check=True)
    cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    cluster.start_node("node2")
    cluster.run("scontrol", "update", "nodename=node2", "state=resume", check=False)  # refused where it is back already
    cluster.until(lambda: cluster.facts(job)["Restarts"] == "3", 120, "requeue after the node failure")
    assert cluster.wait(job, 400) == ["COMPLETED"], log.read_text()[-3000:]
    assert cluster.facts(job)["Restarts"] == "3"
    assert steps_of(folder) == list(range(1, steps + 1))
    assert json.loads((folder / "manifest.json").read_text())["stage"] == "train"
    assert [f"restart {count}:" in log.read_text() for count in range(4)] == [True] * 4
    assert cluster.wait(follows, 60) == ["COMPLETED"]  # it waited through every restart


@pytest.mark.case("SLM-01")
@pytest.mark.case("SLM-04")
def test_a_job_near_its_time_limit_is_told_stops_and_goes_on(site: Site, proof: Proof, request: Any) -> None:
    """The timer is Slurm's own. It looks twice a minute, so the signal comes up to 30 s before the time asked for."""
    if not proof.full:
        pytest.skip("waits minutes for Slurm's own timer: part of `make prove`; the signal itself is tested above")
    request.getfixturevalue("chain")
    overrides = ["train.steps=100000", "train.save_every=5000", "train.validate_every=100000"]
    limit = ["--time=2", "--signal=B:USR1@30"]
    script = str(ROOT / "slurm/stage.sbatch")
    job = site.sbatch("--nodes=2", "--job-name=timer", *limit, script, "train", *site.words(*overrides))
    folder = Path(site.status(*overrides)["train"]["path"])
    cluster, log = site.cluster, site.work_dir / f"timer-{job}.out"

    def restarted() -> bool:
        assert cluster.facts(job)["JobState"] not in ENDED, log.read_text()[-3000:]
        return log.exists() and "restart 1: dspark" in log.read_text()

    cluster.until(restarted, 300, "second start")
    saved = int((folder / "checkpoints" / "latest").read_text().partition("-")[2])
    assert "stopped (signal SIGUSR1); requeueing" in log.read_text() and "TIMEOUT" not in cluster.states(job)
    cluster.until(lambda: f"goes on after step {saved} " in log.read_text(), 100, f"start from step {saved}")
    cluster.until(lambda: steps_of(folder)[-1] > saved, 100, f"step after {saved}")
    cluster.run("scancel", job)
    cluster.wait(job, 60)
    assert steps_of(folder) == list(range(1, steps_of(folder)[-1] + 1))


@pytest.mark.parametrize("line", BY_HAND)
def test_the_lines_of_the_readme_do_their_stage(line: str, site: Site, chain: dict[str, Any]) -> None:
    """Word for word but for the configuration file and the numbers of processes and GPUs."""
    overrides = ["targets.topk=12"] if "shards" in line else ["train.steps=4"]
    _, *words = shlex.split(line.replace("per-node=8", "per-node=1").replace("gpu:8", "gpu:1").replace("0-7", "0-1"))
    end = words.index("-c")
    job = site.sbatch(*words[:end], *site.words(*overrides), *words[end + 2 :])
    assert set(site.cluster.wait(job, 300)) == {"COMPLETED"}
    assert site.status(*overrides)[words[end - 1]]["state"] == "done"


def test_a_killed_array_task_is_completed_by_the_same_line(site: Site, chain: dict[str, Any]) -> None:
    overrides = ["targets.topk=16"]
    logs = f"--output={site.work_dir}/%x-%A_%a.out"
    script = str(ROOT / "slurm/shards.sbatch")
    line = ["--array=0-1", "--job-name=again", logs, script, "targets", *site.words(*overrides)]
    job = site.sbatch(*line)
    log = site.work_dir / f"again-{job}_1.out"
    site.cluster.until(lambda: log.exists() and "dspark targets" in log.read_text(), 60, "the start of task 1")
    site.cluster.run("scancel", "--full", "--signal=KILL", f"{job}_1")  # it imports torch: no shard yet
    assert sorted(site.cluster.wait(job, 300)) == ["CANCELLED", "COMPLETED"]
    folder = Path(site.status(*overrides)["targets"]["path"])
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}
    assert before and not (folder / "manifest.json").exists()
    assert site.cluster.wait(site.sbatch(*line), 300) == ["COMPLETED", "COMPLETED"]
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}
    assert (folder / "manifest.json").exists() and len(after) > len(before)
    assert {name: after[name] for name in before} == before


def test_a_failing_stage_cancels_what_depends_on_it(cluster: Cluster, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("not json\n" * 20, encoding="utf-8")
    site = Site(cluster, tmp_path / "work")
    settings = [f"data.sources=[{{path: {rows}}}]"]
    jobs = site.submit(*settings)
    assert cluster.wait(jobs["data"]["job_id"], 300) == ["FAILED"]
    assert cluster.wait(jobs["export"]["job_id"], 120) == ["CANCELLED"]
    facts = cluster.facts(jobs["data"]["job_id"])
    assert facts["ExitCode"] == "3:0"
    log = next((site.work_dir / "runs/debug/slurm").glob("debug-data-*.out")).read_text()
    assert "rows.jsonl" in log and "Traceback" not in log
    again = site.submit(*settings)
    assert again["data"]["job_id"] != jobs["data"]["job_id"]
    cluster.run("scancel", *(job["job_id"] for job in again.values()))
