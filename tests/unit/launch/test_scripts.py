"""The batch scripts run for real, against a stand-in for Slurm: what every rank sees, ports, signals, requeueing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Two nodes with two tasks each, unless SLURM_NTASKS says otherwise; the highest exit code comes back, as from srun.
SRUN = """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do shift; done
per_node=$((SLURM_NTASKS / SLURM_NNODES)); pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_NODEID=$((task / per_node)) SLURM_LOCALID=$((task % per_node)) "$@" & pids+=($!)
done
echo "${pids[@]}" > "$FAKE/pids"
code=0
for pid in "${pids[@]}"; do wait "$pid" || { now=$?; [ $now -gt $code ] && code=$now; }; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
  "show hostnames") printf 'first\\nsecond\\n' ;;
  "show job") echo "JobId=$4 JobState=${FAKE_STATE:-RUNNING}" ;;
  "requeue "*) echo "$2" >> "$FAKE/requeued" ;;
esac
"""
SCANCEL = """#!/usr/bin/env bash
[ "$2" = "$FAKE_JOB" ] && kill -s "${1#--signal=}" $(cat "$FAKE/pids")
"""
# Plays the pipeline: says what it was given, then ends, fails, or waits for a signal and stops cleanly.
DSPARK = """
import json, os, pathlib, signal, sys, time
fake = pathlib.Path(os.environ["FAKE"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
row = {**{name: os.environ.get(name) for name in names}, "words": sys.argv[1:]}
(fake / f"rank-{row['RANK']}.json").write_text(json.dumps(row))
if sys.argv[1] == "fails":
    sys.exit(4)
def stop(number, frame):
    if row["RANK"] == "0":
        pathlib.Path(os.environ["DSPARK_STOP_NOTE"]).write_text(signal.Signals(number).name)
    sys.exit(0)
if sys.argv[1] == "starts":
    (fake / f"ready-{row['RANK']}").touch()
    time.sleep(1)
if sys.argv[1] == "waits":
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stop)
    (fake / f"ready-{row['RANK']}").touch()
    time.sleep(60)
"""


class Stand:
    """A folder with fake commands and the environment of a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            self._write(name, text)
        self._write("dspark", f"#!{sys.executable}\n{DSPARK}")
        self.environ = {
            "PATH": f"{folder}:/usr/bin:/bin", "FAKE": str(folder), "FAKE_JOB": "1234",
            "DSPARK": str(folder / "dspark"),
            "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_NNODES": "2", "SLURM_NTASKS": "4",
        }  # fmt: skip

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / name).chmod(0o755)

    def start(self, script: str, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(ROOT / "slurm" / script), *words], env={**self.environ, **environ}, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, script: str, *words: str, **environ: str) -> tuple[int, str]:
        process = self.start(script, *words, **environ)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def ranks(self) -> list[dict[str, Any]]:
        rows = [json.loads(path.read_text()) for path in self.folder.glob("rank-*.json")]
        return sorted(rows, key=lambda row: int(row["RANK"]))

    def requeued(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().split() if path.exists() else []

    def wait_ready(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(list(self.folder.glob("ready-*"))) < count:
            assert time.monotonic() < deadline, "ranks did not start"
            time.sleep(0.02)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


@pytest.mark.case("SLM-05")
def test_every_rank_reads_its_own_numbers_on_its_own_node(stand: Stand) -> None:
    code, output = stand.run("stage.sbatch", "train", "-c", "a file.yaml")
    assert code == 0, output
    rows = stand.ranks()
    assert [row["RANK"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "1"]
    assert {(row["WORLD_SIZE"], row["LOCAL_WORLD_SIZE"], row["MASTER_ADDR"]) for row in rows} == {("4", "2", "first")}
    assert all(row["words"] == ["train", "-c", "a file.yaml"] for row in rows)
    assert "restart 0: dspark train" in output


@pytest.mark.case("SLM-06")
def test_port_follows_from_the_job_and_can_be_set(stand: Stand) -> None:
    seen = set()
    for job in range(1000, 1100, 11):
        assert stand.run("stage.sbatch", "train", SLURM_JOB_ID=str(job), SLURM_NTASKS="2")[0] == 0
        ports = {int(row["MASTER_PORT"]) for row in stand.ranks()}
        assert len(ports) == 1 and 20000 <= min(ports) < 30000
        seen |= ports
    assert len(seen) == len(range(1000, 1100, 11))
    stand.run("stage.sbatch", "train", DSPARK_PORT="4242")
    assert {row["MASTER_PORT"] for row in stand.ranks()} == {"4242"}


@pytest.mark.case("SLM-06")
def test_a_taken_port_is_named_with_what_to_do(stand: Stand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, output = stand.run("stage.sbatch", "train", DSPARK_PORT=port)
    assert code == 98 and f"port {port} is already in use" in output and "launch.port" in output


@pytest.mark.case("SLM-07")
@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_the_signal_reaches_all_ranks_and_the_job_is_requeued(stand: Stand, name: str) -> None:
    process = stand.start("stage.sbatch", "waits", DSPARK_STOP_SIGNAL=name)
    stand.wait_ready(4)
    process.send_signal(getattr(signal, f"SIG{name}"))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert stand.requeued() == ["1234"] and f"SIG{name}" in output


@pytest.mark.case("SLM-07")
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_kills_no_process_that_has_no_handlers_yet(stand: Stand, name: str) -> None:
    process = stand.start("stage.sbatch", "starts")
    stand.wait_ready(4)
    process.send_signal(getattr(signal, f"SIG{name}"))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output


def test_array_tasks_do_their_share_and_requeue_themselves_only(stand: Stand) -> None:
    array = {
        "SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "7", "FAKE_JOB": "50_3",
        "SLURM_NTASKS": "1", "SLURM_NNODES": "1",
    }  # fmt: skip
    assert stand.run("shards.sbatch", "targets", "-c", "x.yaml", **array)[0] == 0
    assert stand.ranks()[0]["words"] == ["targets", "-c", "x.yaml", "--array", "3/8"]
    stand.run("shards.sbatch", "targets", DSPARK_SHARES="16", **array)
    assert stand.ranks()[0]["words"][-1] == "3/16"
    process = stand.start("shards.sbatch", "waits", **array)
    stand.wait_ready(1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=30) == 0
    assert stand.requeued() == ["50_3"]


def test_finished_failed_and_cancelled_jobs_are_not_requeued(stand: Stand) -> None:
    assert stand.run("stage.sbatch", "train")[0] == 0
    assert stand.run("stage.sbatch", "fails")[0] == 4
    process = stand.start("stage.sbatch", "waits", FAKE_STATE="CANCELLED")
    stand.wait_ready(4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert stand.requeued() == []


def test_site_file_is_sourced_and_a_missing_one_is_an_error(stand: Stand, tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("export DSPARK_MASTER_ADDR=10.0.0.1\n", encoding="utf-8")
    assert stand.run("stage.sbatch", "train", DSPARK_SITE=str(site))[0] == 0
    assert stand.ranks()[0]["MASTER_ADDR"] == "10.0.0.1"
    assert stand.run("stage.sbatch", "train", DSPARK_SITE=str(tmp_path / "none.sh"))[0] == 2


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    paths = [str(path) for path in sorted((ROOT / "slurm").iterdir())]
    run = subprocess.run(["shellcheck", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
