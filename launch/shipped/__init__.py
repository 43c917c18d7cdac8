"""`shipped("slurm/stage.sbatch")`: where sample configs and batch scripts lie.

Beside the code in a checkout, inside this package once installed.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ConfigError

_INSTALLED = Path(__file__).resolve().parent
_CHECKOUT = _INSTALLED.parents[1]


def shipped(name: str) -> Path:
    """Absolute path of a file below `configs/` or `slurm/`. Raises ConfigError when this installation lacks it."""
    for root in (_CHECKOUT, _INSTALLED):
        if (root / name).is_file():
            return root / name
    raise ConfigError(f"{name}: not part of this installation (looked in {_CHECKOUT} and {_INSTALLED}); reinstall it")
