"""A finished artifact under a URL: its files, one after the other, and whether it is the one that is wanted.

    remote = Remote("https://store/targets/3f2a…")     # http(s), s3, gs, hf://datasets/owner/name/…, a folder,
                                                        # or "pipe:aws s3 cp s3://bucket/targets/3f2a…/{} -"
    manifest = remote.manifest()
    refuse_another(manifest, expected, remote.url)
    with remote.open("train-00003.tar") as stream: ...

http(s) goes through curl, which asks again after a refusal that may pass (408, 429, 5xx: after 1, 2 and 4 s) and gives
up a transfer that stands still for a minute. Folders and commands go through webdataset, every other scheme through
fsspec and the package it names for it (s3fs, gcsfs …), which find credentials as they always do.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from webdataset.gopen import gopen

from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.differences import differences
from pipeline.errors import ArtifactError, ConfigError
from pipeline.preflight.machine import transport_problem
from pipeline.progress import say

BLOCK = 1 << 20
_CURL = (
    "curl", "--fail", "--silent", "--show-error", "--location", "--retry", "3", "--connect-timeout", "30",
    "--speed-limit", "1", "--speed-time", "60", "--",
)  # fmt: skip
_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

T = TypeVar("T")


class NotArrived(ArtifactError):
    """A transfer failed before its end. Another attempt may succeed."""


class Remote:
    """The folder of an artifact, read from elsewhere. `{}` in a URL marks the place of the file's name.

    Raises ConfigError where what reads such a URL is not installed.
    """

    def __init__(self, url: str) -> None:
        if problem := transport_problem(url):
            raise ConfigError(f"{url}: {problem}")
        self.url = url.rstrip("/")

    def where(self, name: str) -> str:
        """URL of a file of the artifact."""
        return self.url.replace("{}", name) if "{}" in self.url else f"{self.url}/{name}"

    def open(self, name: str) -> Stream:
        """Raises NotArrived when the transfer cannot even begin."""
        return Stream(self.where(name))

    def fetch(self, name: str) -> bytes:
        """A small file as a whole. Raises NotArrived."""
        with self.open(name) as stream:
            return b"".join(iter(lambda: stream.read(BLOCK), b""))

    def manifest(self) -> dict[str, Any]:
        """Raises ArtifactError when there is none, or it is not one of an artifact."""
        try:
            manifest = json.loads(self.fetch("manifest.json"))
            found = {**manifest, "shards": list(manifest["shards"])}
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{self.where('manifest.json')}: not an artifact's manifest ({error!r})") from error
        return found


class Stream:
    """A file on its way. Counts and hashes what passes, and knows at its end whether the transfer succeeded."""

    def __init__(self, where: str) -> None:
        self.where, self.bytes = where, 0
        self._hash, self._ended = hashlib.sha256(), False
        try:
            self._raw = _opened(where)
        except Exception as error:  # noqa: BLE001 - each transport raises as it likes
            raise NotArrived(f"{where}: cannot be opened ({error})") from error

    def __str__(self) -> str:
        return self.where

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """Raises NotArrived where the transport failed: a command says so by its exit status, after its last byte."""
        data = b""
        try:
            if not self._ended:
                data = self._raw.read(size)
            if not data and size != 0:
                self._end()
        except Exception as error:  # noqa: BLE001 - as above
            status = getattr(self._raw, "status", None)
            why = f"its command ended with status {status}" if status else error
            raise NotArrived(f"{self.where}: the transfer failed after {self.bytes} bytes ({why})") from error
        self._hash.update(data)
        self.bytes += len(data)
        return data

    def close(self) -> None:
        """Also before the end; what a command thinks of that does not matter."""
        try:
            self._end()
        except OSError:
            pass

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._raw.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(where: str) -> IO[bytes]:
    scheme = urlsplit(where).scheme
    if scheme in ("http", "https"):
        where = f"pipe:{shlex.join([*_CURL, where])}"
    elif scheme not in ("", "file", "pipe"):
        opened: IO[bytes] = fsspec.open(where, "rb").open()
        return opened
    raw: IO[bytes] = gopen(where if scheme else f"file:{where}")
    return raw


def retried(attempt: Callable[[], T]) -> T:
    """What `attempt` returns. A transfer that failed is tried again after 1, 2, 4 … 32 s, then its error is raised."""
    for delay in _DELAYS:
        try:
            return attempt()
        except NotArrived as error:
            say(f"{error}; again in {delay:.0f} s", warning=True)
        stopping.check()
        time.sleep(delay)
    return attempt()


def refuse_another(manifest: Mapping[str, Any], expected: Artifact, url: str) -> None:
    """Raises ConfigError when `manifest` is not `expected`'s, naming the fields that differ with both values."""
    if manifest.get("fingerprint") == expected.fingerprint:
        return
    keys = ("stage", "format", "config", "inputs", "target")
    found = differences({key: manifest.get(key) for key in keys}, {key: expected.request.get(key) for key in keys})
    raise ConfigError(
        [
            f"targets.url: {url} holds {manifest.get('stage')} {manifest.get('fingerprint')}, this configuration needs "
            f"{expected.stage} {expected.fingerprint}",
            *(f"targets.url: differs in {item}" for item in found),
        ]
    )
