"""A stage on this machine with as many processes as the configuration asks for: `dspark run` on one node.

run(config, artifact, ["-c", "FILE", "train.steps=20"])
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import psutil

from launch.jobs import ranks_per_node
from launch.shipped import shipped
from pipeline import stopping
from pipeline.artifact import Artifact, read_json
from pipeline.config import Config
from pipeline.errors import ConfigError, DsparkError, Stopped
from pipeline.trace import FAILED, STOPPED

_POLL_SECONDS = 0.2


def stage_command(config: Config, stage: str, arguments: Sequence[str]) -> list[str]:
    """`python -m pipeline train ...` under accelerate, with `launch.processes_per_node` processes.

    `arguments` follow the stage's name. The engine is `train.engine`; without one, and in other stages, it is DDP.
    """
    engine = (config.train.engine or "ddp") if stage == "train" else "ddp"
    file = shipped(f"configs/accelerate/{engine}.yaml")
    port = str(config.launch.port or 0)  # 0 takes a free one
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(file)]
    processes = ["--num_processes", str(ranks_per_node(config, stage)), "--main_process_port", port]
    return [*accelerate, *processes, "-m", "pipeline", stage, *arguments]


def run(config: Config, artifact: Artifact, arguments: Sequence[str]) -> None:
    """Start the processes, pass a request to stop on to them, and end as they do.

    Raises Stopped when they stopped cleanly, ConfigError when `launch.port` is taken, DsparkError with the exit code
    of the error that ended them otherwise.
    """
    stopping.check()
    _refuse_taken_port(config)
    for name in (STOPPED, FAILED):
        (artifact.path / name).unlink(missing_ok=True)
    # A session of their own: Ctrl-C in the terminal must reach us alone, or the launcher would cut their last save.
    process = subprocess.Popen(stage_command(config, artifact.stage, arguments), start_new_session=True)
    try:
        code = _wait(process)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if not artifact.complete:
        _raise_ending(artifact, code)


def _wait(process: subprocess.Popen[bytes]) -> int:
    asked = False
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if stopping.requested() and not asked:
                asked = True
                # The ranks themselves: launchers answer a signal by killing them after half a minute.
                with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself just now
                    for rank in psutil.Process(process.pid).children():
                        rank.send_signal(signal.SIGTERM)


def _raise_ending(artifact: Artifact, code: int) -> None:
    """Launchers pass neither a stop nor an exit code on; the files the ranks left do."""
    if (artifact.path / FAILED).exists():
        failed = read_json(artifact.path / FAILED)
        error = DsparkError(f"{artifact.stage}: {failed['error']}")
        error.exit_code = int(failed.get("exit_code", 1))
        raise error
    stopping.check()
    if (artifact.path / STOPPED).exists():
        raise Stopped(read_json(artifact.path / STOPPED)["reason"])
    raise DsparkError(f"{artifact.stage}: its processes ended with exit code {code} without finishing {artifact.path}")


def _refuse_taken_port(config: Config) -> None:
    port = config.launch.port
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that is only winding down is free
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(
                f"launch.port: {port} is already in use on this machine; set another, or none to take a free one"
            ) from error
