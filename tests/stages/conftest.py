"""One finished debug chain, shared by every test that only reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages import whole_chain


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of an uninterrupted debug run, tracked in its own MLflow store."""
    work_dir = tmp_path_factory.mktemp("finished") / "work"
    (work_dir.parent / "output.txt").write_text(whole_chain.run(work_dir), encoding="utf-8")
    return work_dir
