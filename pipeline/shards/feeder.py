"""Orders the shards a rolling cache needs next, and deletes what nobody needs soon, within a budget of bytes.

feeder = Feeder(rows, artifact, supply, spec, max_bytes=…, seed=0, validation=held_out)
while training:
    if not feeder.step():                              # made or deleted one thing, or found nothing to do
        time.sleep(0.2)
feeder.clear()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from pipeline.artifact import Artifact
from pipeline.errors import ConfigError
from pipeline.shards.builder import TokenRow
from pipeline.shards.layout import Spec, framed, kept_positions, member_bytes, tar_bytes
from pipeline.shards.plan import show_bytes
from pipeline.shards.rolling import VALIDATION, Mark, rolling_name, validation_rows
from pipeline.shards.supply import Supply
from pipeline.shards.tokenrows import TokenRows

_EPOCHS_AHEAD = 2


class Feeder:
    """One per artifact. It follows the marks of the training ranks."""

    def __init__(
        self,
        rows: TokenRows,
        artifact: Artifact,
        supply: Supply,
        spec: Spec,
        *,
        max_bytes: int,
        seed: int,
        validation: Callable[[Sequence[str]], Sequence[bool]],
    ) -> None:
        """Raises ConfigError when the budget holds not even the validation rows and one window of shards."""
        self._rows, self._artifact, self._supply, self._spec = rows, artifact, supply, spec
        self._max_bytes, self._seed = max_bytes, seed
        self._held = validation_rows(rows.index.ids, validation)
        self._pinned_bytes = self._size([rows.row(number) for number in self._held])
        self._sizes: dict[int, int] = {}
        self._remove_leftovers()
        self._remove_other_validation()
        self._there = [shard for shard, file in enumerate(rows.files) if artifact.row(rolling_name(file)) is not None]
        largest = sorted((self.size(shard) for shard in range(len(rows.files))), reverse=True)
        needed = self._pinned_bytes + sum(largest[: rows.index.window])
        if needed > max_bytes:
            raise ConfigError(
                f"targets.max_bytes: {show_bytes(max_bytes)} cannot hold the validation rows "
                f"({show_bytes(self._pinned_bytes)}) and {rows.index.window} shards; at least {show_bytes(needed)} are "
                "needed, or a smaller data.shard_rows"
            )
        while self._used() > max_bytes:  # what a run with a larger budget left
            self._delete(self._there[-1])

    def size(self, shard: int) -> int:
        """Bytes a shard will take at most, its index row included. Rows left out make it smaller."""
        if shard not in self._sizes:
            self._sizes[shard] = self._size(self._rows.shard(shard))
        return self._sizes[shard]

    def step(self) -> bool:
        """Do the most urgent thing. False when all that fits is there."""
        if self._held and self._artifact.row(VALIDATION) is None:
            self._supply.held(self._held)
            return True
        keep = self._keep()
        missing = next((shard for shard in keep if shard not in self._there), None)
        if missing is None:
            return False
        spare = [shard for shard in self._there if shard not in keep]
        if self._used() + self.size(missing) > self._max_bytes:
            if not spare:
                return False
            self._delete(spare[0])
            return True
        self._supply.shard(missing)
        self._there.append(missing)
        return True

    def clear(self) -> None:
        """Delete everything that rolled: training is over."""
        for shard in list(self._there):
            self._delete(shard)
        self._remove(VALIDATION)

    # -------------------------------------------------------------------------------------------- inside

    def _keep(self) -> list[int]:
        """Shards worth their space, most urgent first: those ranks wait for, then the order from the hindmost on."""
        marks = Mark.read(self._artifact.path / "marks")
        waits = [shard for mark in marks for shard in mark.waits]
        hindmost = min((mark.epoch, mark.window) for mark in marks)
        keep: list[int] = []
        room = self._max_bytes - self._pinned_bytes
        for shard in chain(waits, self._upcoming(*hindmost)):
            if shard in keep:
                continue
            room -= self.size(shard)
            if room < 0:
                break
            keep.append(shard)
        return keep

    def _upcoming(self, epoch: int, window: int) -> Iterator[int]:
        for ahead in range(_EPOCHS_AHEAD):
            windows = self._rows.index.windows(self._seed, epoch + ahead)
            for shards in islice(windows, window if ahead == 0 else 0, None):
                yield from shards

    def _used(self) -> int:
        return self._pinned_bytes + sum(self.size(shard) for shard in self._there)

    def _delete(self, shard: int) -> None:
        self._remove(rolling_name(self._rows.files[shard]))
        self._there.remove(shard)

    def _remove(self, name: str) -> None:
        self._artifact.forget(name)  # first the row: nobody takes a vanishing file for a finished one
        (self._artifact.path / name).unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Temporary files of a feeder that was killed count against the budget."""
        for path in (self._artifact.path / "rolling" / ".tmp").glob("*"):
            path.unlink()

    def _remove_other_validation(self) -> None:
        """A run that holds out other rows of this cache may have been stopped or killed."""
        row = self._artifact.row(VALIDATION) or {}
        ids = dict(zip(*(row.get("index", {}).get(name, ()) for name in ("row", "id")), strict=True))
        if ids != {place: self._rows.index.ids[number] for place, number in enumerate(self._held)}:
            self._remove(VALIDATION)

    def _size(self, rows: Sequence[TokenRow]) -> int:
        members = index = 0
        for row in rows:
            metadata = {"id": row.id, "source": row.source, "turn": str(row.turn)}
            kept = len(kept_positions(row.mask, self._spec.positions))
            members += framed(member_bytes(self._spec, tokens=len(row.ids), positions=kept, metadata=metadata))
            index += 160 + 2 * len(row.id.encode())
        return tar_bytes(members) + index + 1024
