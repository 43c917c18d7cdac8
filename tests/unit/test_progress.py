"""Who sees what: the console of rank 0, every rank's log file, and bars where there is no terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import progress
from pipeline.progress import logged, say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "_LINE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_BAR_EVERY_SECONDS", 0.0)
    yield
    progress.configure()


def work() -> None:
    with progress.progress(total=3, what="answers", unit="rows") as bar:
        for _ in range(3):
            bar.advance(loss=1.25)


def test_a_bar_becomes_lines_where_there_is_no_terminal_and_in_the_log(tmp_path: Path) -> None:
    plain, terminal, log = io.StringIO(), Terminal(), tmp_path / "logs" / "rank-000.log"
    progress.configure(stream=plain)
    work()
    told = plain.getvalue().splitlines()
    assert [line.partition(" in ")[0] for line in told] == [f"answers: {n}/3 rows" for n in (1, 2, 3, 3)]
    assert "loss 1.25" in told[0] and " left" in told[0] and "\r" not in plain.getvalue()
    progress.configure(stream=terminal)
    with logged(log):
        work()
    assert "\r" in terminal.getvalue() and "█" in terminal.getvalue() and terminal.getvalue().endswith("\n")
    assert [line[20:].partition(" in ")[0] for line in log.read_text().splitlines()] == [
        line.partition(" in ")[0] for line in told
    ]


def test_quiet_leaves_warnings_errors_and_results_and_the_log_has_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.configure(quiet=True)
    with logged(tmp_path / "log"):
        say("chatter")
        say("a table", result=True)
        say("slow", warning=True)
        work()
    out, err = capsys.readouterr()
    assert (out, err) == ("a table\n", "warning: slow\n")
    assert {"chatter", "a table", "slow"} <= {line[20:] for line in (tmp_path / "log").read_text().splitlines()}


def test_only_rank_0_has_the_console_and_each_rank_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError), logged(tmp_path / "rank-001.log"):
        say("from rank 1")
        say("its own failure", error=True, any_rank=True)
        raise ValueError("boom")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: its own failure\n")
    text = (tmp_path / "rank-001.log").read_text()
    assert "from rank 1" in text and "ValueError: boom" in text and "Traceback" in text
    say("afterwards")
    assert "afterwards" not in (tmp_path / "rank-001.log").read_text()
