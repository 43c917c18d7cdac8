"""Every error a user can meet, with the shell exit code it ends in.

    2  ConfigError     the request is wrong: nothing was started
    3  DataError       the input is wrong beyond what may be skipped
    4  ArtifactError   something on disk is damaged or not what it claims to be
    5  StorageError    the disk is full or refuses to write, or the hub takes no upload
    0  Stopped         a signal or a time limit asked us to stop; `stopped.json` says why

Messages name what was found, what was expected, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class DsparkError(Exception):
    """Base of all errors raised on purpose. Printed without a traceback."""

    exit_code = 1


class ConfigError(DsparkError):
    """The configuration is refused. Carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{len(self.problems)} problem(s) in the configuration:\n{lines}")


class DataError(DsparkError):
    """The input data cannot be used: too many rows skipped, or nothing left."""

    exit_code = 3


class ArtifactError(DsparkError):
    """A file or folder is damaged, incomplete, or belongs to something else."""

    exit_code = 4


class StorageError(DsparkError):
    """There is no room, or the file system refuses. What was finished is intact."""

    exit_code = 5


class Stopped(DsparkError):
    """The run was asked to stop and did so cleanly. The same command goes on."""

    exit_code = 0
