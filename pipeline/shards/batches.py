"""Which rows of a shard go through the target together: a fixed rule, so every run forms the same batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PADDING = 0.05


def bucket(lengths: Sequence[int], batch_tokens: int, *, salt: int = 0) -> list[list[int]]:
    """Batches of row numbers, each row once, padding at most 5 % of every batch.

    Rows are sorted by length (then number) and cut into runs whose padded size stays within `batch_tokens` (a longer
    row goes alone) and whose shortest row wastes little. The batches are then shuffled by `salt`, because a tar sorted
    by length would be a poor stream.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    batches: list[list[int]] = []
    real = 0
    for number in order:
        length = lengths[number]
        if batches:
            longest, rows = lengths[batches[-1][0]], len(batches[-1]) + 1
            if rows * longest <= batch_tokens and real + length >= (1 - MAX_PADDING) * rows * longest:
                batches[-1].append(number)
                real += length
                continue
        batches.append([number])
        real = length
    shuffled = np.random.default_rng([salt, len(batches)]).permutation(len(batches))
    return [batches[index] for index in shuffled]


def padding(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of padded positions over all batches."""
    padded = sum(len(batch) * max(lengths[number] for number in batch) for batch in batches)
    return 1.0 - sum(lengths) / padded if padded else 0.0
