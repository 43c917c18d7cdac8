"""The chain as Slurm jobs: which script, which flags, in which order. Pure functions; nothing is started here.

for job in plan(config, words):
    command(job, after="1234")      # ["sbatch", "--parsable", ..., "slurm/stage.sbatch", "train", "-c", ...]
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.queue import folder_of
from launch.shipped import shipped
from pipeline.chain import STAGES, active
from pipeline.config import Config, Launch


@dataclass(frozen=True)
class Job:
    """One `sbatch` call. `words` is the stage and its arguments, `settings` the variables the script reads."""

    stage: str
    script: Path
    flags: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    nodes: int = 1
    ranks_per_node: int = 1
    tasks: int = 0  # array tasks; 0 is no array


def plan(config: Config, arguments: Sequence[str], finished: Iterable[str] = ()) -> list[Job]:
    """One job per unfinished stage, in order. `arguments` follow the stage's name: `-c FILE key=value ...`."""
    done = set(finished)
    return [_job(config, stage, arguments) for stage in active(config) if stage not in done]


def _job(config: Config, stage: str, arguments: Sequence[str]) -> Job:
    launch = config.launch
    work = STAGES[stage].ranks
    nodes, ranks = (launch.nodes if work == "all" else 1), ranks_per_node(config, stage)
    tasks = launch.array_tasks if work == "shards" else 0
    log = folder_of(config) / log_name(config, stage, "%A" if tasks else "%j", array=bool(tasks))
    flags = [f"--job-name={config.experiment}-{stage}", f"--output={log}", f"--nodes={nodes}"]
    flags += [f"--ntasks-per-node={ranks}", f"--signal=B:{_short(launch)}@{launch.grace_seconds}"]
    flags += [f"--array=0-{tasks - 1}"] if tasks else []
    flags += _site_flags(launch, gres=STAGES[stage].computes(config))
    settings = {"DSPARK": str(Path(sys.executable).with_name("dspark")), "DSPARK_STOP_SIGNAL": _short(launch)}
    if launch.site_file is not None:
        settings["DSPARK_SITE"] = str(Path(launch.site_file).resolve())
    if launch.port is not None:
        settings["DSPARK_PORT"] = str(launch.port)
    if tasks:
        settings["DSPARK_SHARES"] = str(tasks)
    script = shipped("slurm/shards.sbatch" if tasks else "slurm/stage.sbatch")
    return Job(stage, script, tuple(flags), tuple(settings.items()), (stage, *arguments), nodes, ranks, tasks)


def log_name(config: Config, stage: str, job: str, *, array: bool) -> str:
    """Name of a job's log; every task of an array has its own, with its number for %a."""
    return f"{config.experiment}-{stage}-{job}{'_%a' if array else ''}.out"


def ranks_per_node(config: Config, stage: str) -> int:
    """Processes of a stage on each node: several where all work together or share out shards on GPUs."""
    work = STAGES[stage].ranks
    several = work == "all" or (work == "shards" and STAGES[stage].computes(config))
    return config.launch.processes_per_node if several else 1


def _short(launch: Launch) -> str:
    """SIGUSR1 -> USR1, the way sbatch and kill write it."""
    return (launch.stop_signal or "SIGUSR1").removeprefix("SIG")


def _site_flags(launch: Launch, *, gres: bool) -> list[str]:
    given = {"partition": launch.partition, "account": launch.account, "time": launch.time_limit}
    if gres:
        given["gres"] = launch.gres
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def command(job: Job, after: str | None) -> list[str]:
    """The `sbatch` call. With `after`, the job waits for that one to succeed and is cancelled when it cannot."""
    waits = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", "--export=ALL", *job.flags, *waits, str(job.script), *job.words]


def line(job: Job, after: str | None) -> str:
    """The same as one line for a shell, variables in front."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in job.settings]
    return " ".join(
        [*settings, *(part if part.endswith(f":{after}") else shlex.quote(part) for part in command(job, after))]
    )


def node_lines(job: Job) -> list[str]:
    """What runs on each node or array task, for `--dry-run`. Rank numbers are read by each task where it runs."""
    words = shlex.join(job.words)
    if job.tasks:
        inside = f", {job.ranks_per_node} processes" if job.ranks_per_node > 1 else ""
        return [f"task {index}{inside}: dspark {words} --array {index}/{job.tasks}" for index in range(job.tasks)]
    per_node, world = job.ranks_per_node, job.nodes * job.ranks_per_node
    port = dict(job.settings).get("DSPARK_PORT", "20000 + job id % 10000")
    return [
        f"node {node}: {f'ranks {node * per_node}-{(node + 1) * per_node - 1}' if per_node > 1 else f'rank {node}'} "
        f"of {world}, port {port}: dspark {words}"
        for node in range(job.nodes)
    ]
