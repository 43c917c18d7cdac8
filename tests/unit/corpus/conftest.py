"""Folders of real tokenizers that no registry client of the tests brings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as `python -m tools.fetch_smollm2` makes it, or where DSPARK_TEST_SMOLLM2 says."""
    found = os.environ.get("DSPARK_TEST_SMOLLM2")
    for folder in [Path(found)] if found else [ROOT / "work" / "models" / "smollm2-135m-instruct"]:
        if (folder / "tokenizer.json").is_file():
            return folder
    pytest.skip("SmolLM2 is not there: `python -m tools.fetch_smollm2` makes it, or set DSPARK_TEST_SMOLLM2")
