"""What a person sees while a stage runs: lines, and bars with an ETA that become lines where there is no terminal.

    with progress(total=1000, what="answers", unit="rows") as bar:
        bar.advance(8, tokens_per_second=612)

Rank 0 writes to the console; every rank writes to its own log file while `logged` keeps one open.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

_LINE_EVERY_SECONDS = 15.0
_BAR_EVERY_SECONDS = 0.2


@dataclass
class _Console:
    quiet: bool = False
    stream: TextIO | None = None
    log: TextIO | None = None
    bar: Bar | None = None


_console = _Console()


def configure(*, quiet: bool = False, stream: TextIO | None = None) -> None:
    """Set where lines go. `quiet` keeps the console to warnings, errors and results."""
    _console.quiet, _console.stream = quiet, stream


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Append every line of this process to `path` as well, quiet or not, and the error that ends the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as file:
        outer, _console.log = _console.log, file
        try:
            yield
        except BaseException:
            _log(traceback.format_exc())
            raise
        finally:
            _console.log = outer


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def say(
    text: str = "", *, warning: bool = False, error: bool = False, result: bool = False, any_rank: bool = False
) -> None:
    """One line (or block) for the user. Warnings, errors and results reach the console even when quiet.

    Other ranks than 0 reach it only with `any_rank`.
    """
    _log(text)
    if (any_rank or rank() == 0) and (warning or error or result or not _console.quiet):
        stream = _console.stream or (sys.stderr if warning or error else sys.stdout)
        _clear(stream)
        stream.write(f"{'error: ' if error else 'warning: ' if warning else ''}{text}\n")
        stream.flush()


def _log(text: str) -> None:
    if _console.log is not None:
        with suppress(OSError):  # a full disk: the console still has it
            _console.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _clear(stream: TextIO) -> None:
    if stream.isatty():
        stream.write("\r\033[K")


def duration(seconds: float) -> str:
    """1.5 -> '2s', 75 -> '1m15s', 4000 -> '1h06m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def current() -> dict[str, object] | None:
    """How far this process is in the work it shows a bar for: what, done, total, unit, seconds_left (None: unknown)."""
    bar = _console.bar
    if bar is None:
        return None
    facts = {name: getattr(bar, name) for name in ("what", "done", "total", "unit")}
    return {**facts, "seconds_left": bar.seconds_left()}


@dataclass
class Bar:
    """Progress of one piece of work. `done` may start above 0 after a resume; the rate counts only this process."""

    total: int
    what: str
    unit: str
    done: int = 0
    shown: dict[str, object] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _first: int = 0
    _drawn: float = 0.0
    _told: float = 0.0

    def __post_init__(self) -> None:
        self._first = self.done

    def advance(self, count: int = 1, **shown: object) -> None:
        self.done += count
        self.shown.update(shown)
        now = time.monotonic()
        if self._live() and now - (self._drawn or self._started) >= _BAR_EVERY_SECONDS:
            self._drawn = now
            self._draw()
        if now - (self._told or self._started) >= _LINE_EVERY_SECONDS:
            self._told = now
            self.tell()

    def tell(self) -> None:
        """A line: for the log where a bar is on the console, else for both."""
        (_log if self._live() else say)(self.line())

    def finish(self) -> None:
        """The last word: the bar stays where it is, with all that was done."""
        if self._live():
            self._draw()
            self._stream().write("\n")
        self.tell()

    def _live(self) -> bool:
        return rank() == 0 and self._stream().isatty() and not _console.quiet

    def _draw(self) -> None:
        stream, width = self._stream(), 24
        filled = width * self.done // max(self.total, 1)
        stream.write(f"\r\033[K{'█' * filled}{'·' * (width - filled)} {self.line()}")
        stream.flush()

    def line(self) -> str:
        elapsed, seconds = time.monotonic() - self._started, self.seconds_left()
        left = f", {duration(seconds)} left" if seconds else ""
        facts = "".join(f", {key.replace('_', ' ')} {_short(value)}" for key, value in self.shown.items())
        return f"{self.what}: {self.done}/{self.total} {self.unit} in {duration(elapsed)}{left}{facts}"

    def seconds_left(self) -> float | None:
        """At the mean rate of this process so far; None before its first unit of work."""
        made = self.done - self._first
        return (self.total - self.done) * (time.monotonic() - self._started) / made if made > 0 else None

    def _stream(self) -> TextIO:
        return _console.stream or sys.stdout


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def progress(total: int, *, what: str, unit: str, done: int = 0) -> Iterator[Bar]:
    """Show the progress of `total` units of work; `done` of them were finished by an earlier run."""
    bar = Bar(total=total, what=what, unit=unit, done=done)
    outer, _console.bar = _console.bar, bar
    try:
        yield bar
    finally:
        _console.bar = outer
    bar.finish()
