"""In which fields two records of plain data differ: requests, manifests, settings. Imports no torch."""

from __future__ import annotations

import json
from typing import Any


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Dotted names of the fields in which two records differ, with both values. `config.` is left out of the names."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted({*old, *new}):
            inside = key if not where or where == "config" else f"{where}.{key}"
            found += differences(old.get(key), new.get(key), inside)
        return found
    return [] if old == new else [f"{where} ({_short(old)} there, {_short(new)} here)"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
