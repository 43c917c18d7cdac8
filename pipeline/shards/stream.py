"""Reads a target artifact in one pass from URLs, through webdataset, where files cannot be opened at random.

    stream = ShardStream("https://store/targets/3f2a…")     # what webdataset opens: http(s), gs, hf, a folder,
                                                            # or "pipe:aws s3 cp s3://bucket/targets/3f2a…/{} -"
    for number, encoded in stream.samples(seed=0, epoch=3, start=cursor):
        sample = encoded.decode(stream.spec, stream.channel_rms_LD)

Only `manifest.json` is needed besides the tars. The order is documented and pure: shards are shuffled by (seed, epoch),
inside a shard samples come as they lie in the tar (batches of similar length, shuffled when the shard was built). The
cursor is one integer here too; whole shards before it are not fetched. Accounts are kept as by `ShardReader`: a shard
that yields another number of samples, other bytes (SHA-256 of the stream) or a malformed member ends the pass with an
error that names it. webdataset alone reads a cut tar as a shorter one, without a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load as load_safetensors
from torch import Tensor
from webdataset.gopen import gopen
from webdataset.tariterators import tar_file_iterator

from pipeline.errors import ArtifactError
from pipeline.shards.calibration import RMS_FILE
from pipeline.shards.layout import Spec
from pipeline.shards.reader import summary_problems
from pipeline.shards.record import Encoded, unpack

_BLOCK = 1 << 20


class ShardStream:
    """Sequential access to a finished `targets` artifact under a URL or folder.

    Raises ArtifactError when the manifest cannot be fetched or describes something this reader does not know.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            manifest = json.loads(self._fetch("manifest.json"))
            summary = manifest["targets"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{self._where('manifest.json')}: not the manifest of target shards ({error!r})"
            ) from error
        if problems := summary_problems(summary):
            raise ArtifactError("\n".join(f"{self.url}: {problem}" for problem in problems))
        self.summary: dict[str, Any] = summary
        self.spec = Spec.of(summary)
        self.shards: list[dict[str, Any]] = manifest["shards"]
        self.channel_rms_LD: Tensor | None = None
        if self.spec.channel_rms:
            self.channel_rms_LD = load_safetensors(self._fetch(RMS_FILE))["channel_rms"]

    def __len__(self) -> int:
        return sum(int(fact["samples"]) for fact in self.shards)

    def shard_order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The order shards are read in: a pure function of (seed, epoch)."""
        return np.random.default_rng([seed, epoch, 0x57]).permutation(len(self.shards))

    def samples(self, *, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[int, Encoded]]:
        """(position in the epoch, row as stored) from position `start` to the end of the epoch."""
        position = 0
        for shard in self.shard_order(seed, epoch):
            fact = self.shards[shard]
            if position + fact["samples"] <= start:
                position += int(fact["samples"])
                continue
            for data in self._members(fact):
                if position >= start:
                    yield position, unpack(data, self.spec, where=f"{self._where(fact['file'])}, sample {position}")
                position += 1

    def _members(self, fact: dict[str, Any]) -> Iterator[bytearray]:
        """Members of one shard as bytes; afterwards the account of the shard is settled."""
        where = self._where(fact["file"])
        stream = _Hashing(_open(self._where(fact["file"])))
        count = 0
        try:
            for item in tar_file_iterator(stream):
                count += 1
                yield bytearray(item["data"])
            while stream.read(_BLOCK):  # what follows the last member
                pass
        except GeneratorExit:
            raise
        except ArtifactError:
            raise
        except Exception as error:  # noqa: BLE001 - tar, pipe and network failures all mean: this shard did not arrive
            raise ArtifactError(f"{where}: broken after {count} of {fact['samples']} samples ({error})") from error
        finally:
            stream.close()
        if count != fact["samples"]:
            raise ArtifactError(
                f"{where}: {count} samples arrived, the manifest counts {fact['samples']}: cut or changed"
            )
        if stream.bytes != fact["bytes"] or stream.hash.hexdigest() != fact["sha256"]:
            raise ArtifactError(f"{where}: {stream.bytes} bytes arrived that do not hash to the manifest's SHA-256")

    def _fetch(self, name: str) -> bytes:
        stream = _open(self._where(name))
        try:
            return bytes(stream.read())
        except Exception as error:  # noqa: BLE001
            raise ArtifactError(f"{self._where(name)}: cannot be fetched ({error})") from error
        finally:
            _close(stream)

    def _where(self, name: str) -> str:
        """URL of a file of the artifact; `{}` in ours marks the place of its name."""
        return self.url.replace("{}", name) if "{}" in self.url else f"{self.url}/{name}"


def _open(url: str) -> Any:
    try:
        return gopen(url if urlsplit(url).scheme else f"file:{url}")
    except Exception as error:  # noqa: BLE001 - gopen raises as each transport likes
        raise ArtifactError(f"{url}: cannot be opened ({error})") from error


def _close(stream: Any) -> None:
    try:
        stream.close()
    except OSError:
        pass


class _Hashing:
    """A stream that counts and hashes what passes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self.hash.update(data)
        self.bytes += len(data)
        return data

    def close(self) -> None:
        _close(self._stream)
