"""Reads a target artifact: random access by memory map, an order that is a pure function, checks before the first use.

    reader = ShardReader.open(artifact)                    # counts, sizes and every member's headers are checked here
    order = reader.order(seed=0, epoch=3)                  # int64 permutation of all samples
    sample = reader[order[cursor]]                         # the cursor is one integer, whatever the number of ranks
    samples = reader.batch(order[cursor : cursor + 16], device="cuda", dtype=torch.bfloat16)

`open` reads the index rows (JSON) and compares every member's tar and safetensors header with the CRC in the index, so
a cut, missing, extra, swapped, shifted or shortened member is refused before step 1 with the shard's name. Flipped
bytes inside the data need the hashes: `dspark verify`.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.artifact import Artifact, row_changed
from pipeline.errors import ArtifactError
from pipeline.shards.calibration import RMS_FILE
from pipeline.shards.check import check_shard
from pipeline.shards.index import Index
from pipeline.shards.layout import CONVENTION, Spec
from pipeline.shards.record import Encoded, Sample, decode_all, unpack
from pipeline.shards.writer import COLUMNS, key_of
from pipeline.shards.writer import SUFFIX as _SUFFIX

_OPEN_MAPS = 128


class ShardReader:
    """Random access to the samples of a finished `targets` artifact. Safe after fork and in several processes."""

    def __init__(
        self, folder: Path, index: Index, spec: Spec, *, summary: dict[str, Any], channel_rms_LD: Tensor | None = None
    ) -> None:
        self.folder, self.index, self.spec, self.summary = folder, index, spec, summary
        self.channel_rms_LD = channel_rms_LD
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, artifact: Artifact, *, threads: int = 8) -> ShardReader:
        """Open and check. Raises ArtifactError listing every shard that is not what the manifest and its index say."""
        manifest = artifact.manifest()
        artifact.check_sizes()
        summary = manifest.get("targets") or {}
        problems = summary_problems(summary)
        rows: list[tuple[str, dict[str, Any]]] = []
        for fact in manifest["shards"]:
            row = artifact.row(fact["file"])
            problem = row_problem(row, fact)
            if problem:
                problems.append(f"{artifact.path / fact['file']}: {problem}")
            else:
                assert row is not None
                rows.append((fact["file"], row["index"]))
        if not problems:
            with ThreadPoolExecutor(threads) as pool:
                found = pool.map(lambda row: check_shard(artifact.path / row[0], row[1]), rows)
                problems += [problem for shard in found for problem in shard]
        if problems:
            shown = [*problems[:20], *([f"… and {len(problems) - 20} more"] if len(problems) > 20 else [])]
            raise ArtifactError(
                "\n".join([*shown, f"run `dspark repair`, or remove {artifact.path} and build it again"])
            )
        spec = Spec.of(summary)
        return cls(artifact.path, Index.of(rows), spec, summary=summary, channel_rms_LD=load_rms(artifact.path, spec))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Sample:
        """Decode one sample on the CPU in fp32."""
        return self.encoded(number).decode(self.spec, self.channel_rms_LD)

    def batch(
        self, numbers: Iterable[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> list[Sample]:
        """Decode several samples together on `device`."""
        rows = [self.encoded(int(number)) for number in numbers]
        return decode_all(rows, self.spec, self.channel_rms_LD, dtype=dtype, device=device)

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """See `Index.order`."""
        return self.index.order(seed, epoch)

    def encoded(self, number: int) -> Encoded:
        """A sample as stored: tensors that view the mapped file. Raises ArtifactError on a wrong length or shape."""
        index = self.index
        if not 0 <= number < len(index):
            raise IndexError(f"sample {number} of {len(index)}")
        shard = index.shard_of(number)
        offset, size = int(index.offset[number]), int(index.bytes[number])
        view = memoryview(self._map(shard))[offset : offset + size]
        return unpack(view, self.spec, where=partial(self.where, number))

    def where(self, number: int) -> str:
        """Shard file and member of a sample, for messages."""
        shard = self.index.shard_of(number)
        return (
            f"{self.folder / self.index.files[shard]}: sample {self.index.ids[number]} (row {self.index.row[number]})"
        )

    def _map(self, shard: int) -> mmap.mmap:
        """The shard's bytes, privately mapped: tensors may be written to without touching the file."""
        with self._lock:  # reader threads share us
            found = self._maps.get(shard)
            if found is None:
                with (self.folder / self.index.files[shard]).open("rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._maps[shard] = found
                if len(self._maps) > _OPEN_MAPS:  # unmapped once no tensor views it any more
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(shard)
            return found


def summary_problems(summary: dict[str, Any]) -> list[str]:
    """Why a manifest's `targets` summary cannot be trained on: another layer convention, or a pre-norm last state."""
    problems = []
    if summary.get("layer_convention") != CONVENTION:
        problems.append(
            f"manifest: layer convention {summary.get('layer_convention')!r}, this reader knows {CONVENTION!r}"
        )
    if summary.get("post_norm") is not True:
        problems.append("manifest: the last hidden state must be the one after the final norm (post_norm: true)")
    return problems


def row_problem(row: dict[str, Any] | None, fact: dict[str, Any]) -> str | None:
    """Why a shard's published row does not fit the manifest's fact about it."""
    if row is None:
        return "its index row is missing or unreadable"
    if row.get("sha256") != fact["sha256"]:
        return "its index row belongs to another build (hash differs from the manifest)"
    if row_changed(row, fact):
        return "its index row was altered after the manifest was written"
    lengths = {name: len(row.get("index", {}).get(name, ())) for name in COLUMNS}
    if set(lengths.values()) != {fact["samples"]}:
        return f"the manifest counts {fact['samples']} samples, its index {lengths}"
    return None


def load_rms(folder: Path, spec: Spec) -> Tensor | None:
    """Per-channel RMS values [L, D] of an artifact whose codec uses them."""
    if not spec.channel_rms:
        return None
    from safetensors.torch import load_file

    return load_file(folder / RMS_FILE)["channel_rms"]


def member_name(shard: int, row: int) -> str:
    """File name inside the tar of a token row."""
    return key_of(shard, row) + _SUFFIX
