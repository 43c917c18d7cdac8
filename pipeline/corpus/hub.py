"""Hub data sets at one exact commit, memory-mapped: downloaded once, then read from the local cache.

    rows = hub_rows("owner/name", subset=None, split="train", revision=None)

`datasets` alone would, whenever the hub does not answer, take the newest cached copy of *any* revision. Here the commit
decides, online and offline alike.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, DataError
from pipeline.identity import hub_commit


@cache
def hub_rows(repository: str, *, subset: str | None = None, split: str, revision: str | None = None) -> Any:
    """A split of a hub data set, as `datasets` has it.

    Raises DataError when neither the hub nor the local cache holds that commit.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        commit = hub_commit(repository, revision)
        builder = datasets.load_dataset_builder(repository, subset, revision=commit)
        if builder.hash != commit:  # the hub did not answer, and the newest cached copy is another one
            builder = _cached(builder, repository, commit)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    except (OSError, ValueError, ConfigError) as error:
        raise DataError(
            f"{repository}: the hub data set cannot be loaded ({type(error).__name__}: {error}). On a machine without "
            "network run `dspark fetch -c FILE` where there is one, or name local files"
        ) from error


def _cached(newest: Any, repository: str, commit: str) -> Any:
    """Builder of the copy of `commit` beside the newest cached one. Raises FileNotFoundError when there is none."""
    from datasets.packaged_modules.cache.cache import Cache

    builder = Cache(
        repo_id=repository,
        dataset_name=repository.rpartition("/")[2],
        config_name=newest.config.name,
        version=str(newest.config.version),
        hash=commit,
    )
    if not Path(builder.cache_dir).is_dir():
        raise FileNotFoundError(f"the local cache holds commit {newest.hash}, not {commit}")
    return builder
