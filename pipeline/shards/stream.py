"""Reads a target artifact in one pass from URLs, through webdataset, where files cannot be opened at random.

    stream = ShardStream.open("https://store/targets/3f2a…")       # see `pipeline.shards.remote` for other URLs
    for number, encoded in stream.samples(seed=0, epoch=3, start=cursor):
        sample = encoded.decode(stream.spec, stream.channel_rms_LD)

Only `manifest.json` is needed besides the tars. The order is documented and pure: shards are shuffled by (seed, epoch),
inside a shard samples come as they lie in the tar (batches of similar length, shuffled when the shard was built). The
cursor is one integer here too; whole shards before it are not fetched. Accounts are kept as by `ShardReader`: a shard
that yields another number of samples, other bytes (SHA-256 of the stream) or a malformed member ends the pass with an
error that names it. webdataset alone reads a cut tar as a shorter one, without a word.

Training does not read the stream itself: `pipeline.shards.supply` copies its shards into a cache that rolls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load as load_safetensors
from torch import Tensor
from webdataset.tariterators import tar_file_iterator

from pipeline.errors import ArtifactError
from pipeline.shards.calibration import RMS_FILE
from pipeline.shards.layout import Spec
from pipeline.shards.reader import summary_problems
from pipeline.shards.record import Encoded, unpack
from pipeline.shards.remote import BLOCK, Remote
from pipeline.shards.writer import row_of


class ShardStream:
    """Sequential access to the shards of a finished `targets` artifact under a URL or folder.

    `shards` are the facts of its manifest: file, samples, bytes, sha256.
    """

    def __init__(
        self, remote: Remote, spec: Spec, shards: Sequence[dict[str, Any]], channel_rms_LD: Tensor | None = None
    ) -> None:
        self.remote, self.spec, self.shards, self.channel_rms_LD = remote, spec, shards, channel_rms_LD

    @classmethod
    def open(cls, url: str) -> ShardStream:
        """Raises ArtifactError when the manifest cannot be fetched or describes something this reader does not know."""
        remote = Remote(url)
        manifest = remote.manifest()
        summary = manifest.get("targets")
        if not isinstance(summary, dict):
            raise ArtifactError(f"{remote.where('manifest.json')}: not the manifest of target shards")
        if problems := summary_problems(summary):
            raise ArtifactError("\n".join(f"{remote.url}: {problem}" for problem in problems))
        spec = Spec.of(summary)
        rms_LD = load_safetensors(remote.fetch(RMS_FILE))["channel_rms"] if spec.channel_rms else None
        return cls(remote, spec, manifest["shards"], rms_LD)

    def __len__(self) -> int:
        return sum(int(fact["samples"]) for fact in self.shards)

    def shard_order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The order shards are read in: a pure function of (seed, epoch)."""
        return np.random.default_rng([seed, epoch, 0x57]).permutation(len(self.shards))

    def samples(self, *, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[int, Encoded]]:
        """(position in the epoch, row as stored) from position `start` to the end of the epoch."""
        position = 0
        for shard in self.shard_order(seed, epoch):
            if position + self.shards[shard]["samples"] <= start:
                position += int(self.shards[shard]["samples"])
                continue
            for _, encoded in self.rows(int(shard)):
                if position >= start:
                    yield position, encoded
                position += 1

    def rows(self, shard: int) -> Iterator[tuple[int, Encoded]]:
        """(row of the token shard, row as stored) of one shard, as they lie in the tar.

        What was yielded counts once the iterator has ended: its account is settled last. Raises NotArrived when the
        transfer failed, ArtifactError when what arrived is not the shard of the manifest.
        """
        fact = self.shards[shard]
        where, count = self.remote.where(fact["file"]), 0
        with self.remote.open(fact["file"]) as stream:
            try:
                for item in tar_file_iterator(stream):
                    member = f"{where}, member {count}"
                    row = row_of(item["fname"], where=member)
                    yield row, unpack(bytearray(item["data"]), self.spec, where=member)
                    count += 1
                while stream.read(BLOCK):  # what follows the last member
                    pass
            except ArtifactError:
                raise
            except Exception as error:  # noqa: BLE001 - tarfile raises what it likes about bytes that are no tar
                raise ArtifactError(f"{where}: broken after {count} of {fact['samples']} samples ({error})") from error
        if count != fact["samples"]:
            raise ArtifactError(
                f"{where}: {count} samples arrived, the manifest counts {fact['samples']}: cut or changed"
            )
        if stream.bytes != fact["bytes"] or stream.sha256 != fact["sha256"]:
            raise ArtifactError(f"{where}: {stream.bytes} bytes arrived that do not hash to the manifest's SHA-256")
