"""Near-duplicates by MinHash: signatures on disk, at most 200 bytes a row in memory, the smallest id kept.

    signer = Signer(config.data.near_duplicates)
    signer(row)                                   # uint32[permutations]

Placeholder search until the second half of this module lands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from pipeline.config import NearDuplicates
from pipeline.corpus.rows import Row

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-case words: what duplicates and leaks are compared by."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Signer:
    """MinHash signature of a conversation's words in shingles."""

    settings: NearDuplicates

    def __call__(self, row: Row) -> np.ndarray:
        from datasketch import MinHash

        tokens = words(" ".join(message["content"] for message in row.messages))
        size = self.settings.ngram
        shingles = {" ".join(tokens[i : i + size]) for i in range(max(len(tokens) - size + 1, 1))}
        sketch = MinHash(num_perm=self.settings.permutations)
        sketch.update_batch([shingle.encode() for shingle in sorted(shingles)])
        return sketch.hashvalues.astype(np.uint32)
