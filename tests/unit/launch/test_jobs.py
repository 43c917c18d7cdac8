"""The chain as sbatch calls, rendered without Slurm."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch.jobs import Job, command, line, node_lines, plan, ranks_per_node
from launch.local import stage_command
from pipeline.config import Config, load

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = ["-c", "configs/debug.yaml", "experiment=night run"]


def config(*overrides: str) -> Config:
    return load(ROOT / "configs" / "debug.yaml", overrides)


def jobs(*overrides: str, finished: tuple[str, ...] = ()) -> dict[str, Job]:
    return {job.stage: job for job in plan(config(*overrides), ARGUMENTS, finished)}


def test_every_unfinished_stage_is_one_job_after_the_one_before() -> None:
    rows = jobs(finished=("data", "answers"))
    assert list(rows) == ["tokens", "targets", "train", "calibrate", "profile", "evaluate", "export"]
    words = command(rows["train"], after="77")
    assert "--dependency=afterok:77" in words and "--kill-on-invalid-dep=yes" in words
    assert words[-4:] == ["train", *ARGUMENTS]
    assert not any("dependency" in word for word in command(rows["tokens"], after=None))


def test_arrays_ranks_and_site_options() -> None:
    rows = jobs(
        "launch.nodes=4", "launch.processes_per_node=8", "launch.array_tasks=16", "launch.gres=gpu:8",
        "launch.partition=big", "launch.account=me", "launch.time_limit=24:00:00",
    )  # fmt: skip
    train, targets, data = (command(rows[name], None) for name in ("train", "targets", "data"))
    assert {"--nodes=4", "--ntasks-per-node=8", "--gres=gpu:8", "--partition=big", "--account=me"} <= set(train)
    assert "--time=24:00:00" in train and not any(word.startswith("--array") for word in train)
    assert {"--array=0-15", "--ntasks-per-node=8", "--nodes=1", "--gres=gpu:8"} <= set(targets)
    assert {"--array=0-15", "--ntasks-per-node=1"} <= set(data) and "--gres=gpu:8" not in data
    assert rows["targets"].script.name == "shards.sbatch" and rows["train"].script.name == "stage.sbatch"
    assert dict(rows["targets"].settings)["DSPARK_SHARES"] == "16"


def test_a_stage_that_runs_no_model_asks_for_no_gpu_and_one_process() -> None:
    many = ("launch.processes_per_node=8", "launch.gres=gpu:8")
    elsewhere = ("profile.synthetic=sqrt", "calibrate.records=r.pt", "calibrate.temperatures=[1]")
    for name in ("calibrate", "profile"):
        assert "--gres=gpu:8" in jobs(*many)[name].flags and "--gres=gpu:8" not in jobs(*many, *elsewhere)[name].flags
    assert (jobs(*many)["calibrate"].ranks_per_node, jobs(*many, *elsewhere)["calibrate"].ranks_per_node) == (8, 1)


@pytest.mark.case("SLM-05")
def test_dry_run_lines_name_the_ranks_of_every_node() -> None:
    rows = jobs("launch.nodes=2", "launch.processes_per_node=2", "launch.array_tasks=3", "launch.port=4242")
    first, second = node_lines(rows["train"])
    assert first.startswith("node 0: ranks 0-1 of 4, port 4242: dspark train -c configs/debug.yaml")
    assert second.startswith("node 1: ranks 2-3 of 4, port 4242")
    assert [text.rpartition(" ")[2] for text in node_lines(rows["tokens"])] == ["0/3", "1/3", "2/3"]


@pytest.mark.case("SLM-07")
@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_one_setting_gives_the_signal_to_sbatch_and_script(name: str) -> None:
    row = jobs(f"launch.stop_signal=SIG{name}", "launch.grace_seconds=30")["train"]
    assert f"--signal=B:{name}@30" in row.flags
    assert dict(row.settings)["DSPARK_STOP_SIGNAL"] == name


def test_a_printed_line_is_what_a_shell_would_run() -> None:
    row = jobs("launch.site_file=my site.sh")["train"]
    text = line(row, after="$targets")
    probe = 'sbatch() { printf \'%s\\n\' "$DSPARK_SITE" "$@"; }; targets=5; ' + text
    said = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].endswith("/my site.sh")
    assert said[1:] == command(row, after="5")[1:]
    assert shlex.split(text)[-1] == "experiment=night run"


@pytest.mark.case("SLM-03")
@pytest.mark.parametrize("name", ["stage.sbatch", "shards.sbatch"])
def test_scripts_append_their_log_requeue_and_name_the_restart(name: str) -> None:
    text = (ROOT / "slurm" / name).read_text(encoding="utf-8")
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@120"):
        assert re.search(rf"^#SBATCH {option}$", text, re.MULTILINE)
    assert "SLURM_RESTART_COUNT" in text


def test_a_local_stage_starts_under_its_engine_with_the_processes_it_can_use() -> None:
    several = config("launch.processes_per_node=4", "train.engine=zero3")
    words = stage_command(several, "train", ["-c", "x"])
    assert words[words.index("--config_file") + 1].endswith("configs/accelerate/zero3.yaml")
    assert words[words.index("--num_processes") + 1] == "4"
    assert words[-5:] == ["-m", "pipeline", "train", "-c", "x"]
    assert stage_command(several, "targets", [])[5].endswith("configs/accelerate/ddp.yaml")
    assert [ranks_per_node(several, stage) for stage in ("data", "targets", "train", "profile", "export")] == [
        1, 4, 4, 1, 1,
    ]  # fmt: skip
