"""Hashes and atomic writes: temporary name, fsync, rename. Nothing half-written ever stands under its final name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError, StorageError

_DAY_SECONDS = 86_400


def canonical(value: Any) -> bytes:
    """JSON bytes that are equal exactly when the values are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any, length: int = 12) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:length]


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_dir(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_path(target: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Yield a temporary path in a hidden folder beside `target`; publish it (fsync, rename) if the block succeeds.

    The temporary path may be written as a file or as a folder. With `keep_existing`, a folder that another process
    published meanwhile stays: both hold the same, and a third may be reading it. A full disk becomes `StorageError`,
    and whatever stood at `target` before is still there.
    """
    temporary = target.parent / ".tmp" / f"{socket.gethostname()}.{os.getpid()}.{target.name}"
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        yield temporary
        for path in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            elif path.is_dir():
                fsync_dir(path)
        if target.is_dir() and not keep_existing:
            shutil.rmtree(target)
        try:
            temporary.replace(target)
        except OSError as error:
            if not (keep_existing and error.errno in (errno.ENOTEMPTY, errno.EEXIST)):
                raise
            _remove(temporary)
        fsync_dir(target.parent)
    except BaseException as error:
        _remove(temporary)
        if (full := storage_error(target, error)) is not None:
            raise full from error
        raise


def storage_error(where: Path, error: BaseException) -> StorageError | None:
    """What to tell a user whose disk is full, over its quota or read-only; None when `error` is something else."""
    number = _errno(error)
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    return StorageError(
        f"{where}: cannot be written ({os.strerror(number)}). Finished files are intact: free space and run the same "
        "command again."
    )


def _errno(error: BaseException) -> int | None:
    """The system's error number; libraries written in Rust (safetensors, tokenizers) only print it."""
    if isinstance(error, OSError):
        return error.errno
    printed = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    return int(printed[1]) if printed else None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def clear_temporaries(folder: Path) -> None:
    """Remove what killed processes left in a `.tmp` folder, and the folder once it is empty.

    What a living process of this host is writing stays, and so does what another host wrote within the last day: two
    ranks may finish one artifact at the same moment.
    """
    mine = f"{socket.gethostname()}."
    for entry in folder.glob("*"):
        with contextlib.suppress(OSError):
            pid = entry.name.removeprefix(mine).partition(".")[0]
            if entry.name.startswith(mine) and pid.isdigit():
                kept = int(pid) != os.getpid() and _alive(int(pid))
            else:
                kept = time.time() - entry.stat().st_mtime < _DAY_SECONDS
            if not kept:
                _remove(entry)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, *, ours: bool = True) -> Any:
    """Contents of a JSON file. Raises ArtifactError; what is not `ours` (a checkpoint named in the configuration, the
    target) can be made again by whoever made it, not by us."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        mend = "`dspark repair` makes it again" if ours else "take it anew from where it came from"
        raise ArtifactError(f"{path}: not valid JSON ({error}); the file was cut or edited. {mend}") from error
