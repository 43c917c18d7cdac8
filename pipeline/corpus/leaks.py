"""Evaluation leaks by n-gram overlap with prompt sets."""

from __future__ import annotations

from pipeline.corpus.rows import Row


class Leaks:
    def check(self, row: Row) -> None:
        raise NotImplementedError
