"""What a report is made of, and the one HTML file it becomes: inline styles, pictures as data URIs, no scripts.

Every text is escaped by the template. Pictures are drawn on white and turned dark by the style sheet where the reader's
screen is dark.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import ClassVar

_NUMBER = re.compile(r"[–−+-]?[\d.,]*( \[.*\])?")  # "1,234.5", "1.70 [1.67, 1.75]", a dash


@dataclass(frozen=True)
class Link:
    """A cell that leads somewhere: a path relative to the report, or the id of a section (`#lineage`)."""

    text: str
    href: str

    def __str__(self) -> str:
        return self.text


Cell = str | Link


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Columns of figures, which are set to the right."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.header)
        return [all(_NUMBER.fullmatch(str(cell)) for cell in column) for column in columns]


@dataclass(frozen=True)
class Figure:
    kind: ClassVar[str] = "figure"
    png: bytes
    caption: str

    @classmethod
    def of(cls, path: Path, caption: str) -> Figure:
        return cls(path.read_bytes(), caption)

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Note:
    """A sentence; `tone` is "note", "missing" (nothing to show yet) or "warning"."""

    kind: ClassVar[str] = "note"
    text: str
    tone: str = "note"


@dataclass(frozen=True)
class Fold:
    """Preformatted text that opens on a click."""

    kind: ClassVar[str] = "fold"
    title: str
    text: str


Part = Table | Figure | Note | Fold


@dataclass
class Section:
    title: str
    parts: list[Part] = field(default_factory=list)

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def render(title: str, lead: Sequence[str], sections: Sequence[Section], chain: str = "") -> str:
    """The whole page. `chain`: which one it shows (see `shown`)."""
    import jinja2

    source = resources.files("pipeline.operations.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(title=title, lead=lead, sections=sections, chain=chain)
