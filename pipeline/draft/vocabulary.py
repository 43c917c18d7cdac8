"""The draft vocabulary: the tokens a drafter may propose (S30).

    words = choose_vocabulary(counts_V, size=4096, always=stop_ids, usable=len(tokenizer))
    drafter = build_drafter(config, seed=0, token_ids=words.token_ids)

Fewer rows make the head's product, the largest of a draft step, that much cheaper. Nothing is lost but acceptance:
verification stays against the full target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError


@dataclass(frozen=True)
class Vocabulary:
    """`token_ids` [|D|], rising; `coverage`: the share of counted tokens inside; `padded`: rows that never occurred."""

    token_ids: Tensor
    coverage: float
    padded: int


def choose_vocabulary(counts_V: Tensor, *, size: int, always: Iterable[int], usable: int | None = None) -> Vocabulary:
    """The `size` most frequent tokens, `always` (stop tokens) among them; ties go to the lower id.

    Args:
        counts_V: how often each target id is supervised in the training rows, whole numbers [V].
        usable: the tokenizer's length where the head has more rows (TOK-07): ids beyond it are never chosen.

    With fewer distinct tokens than `size`, unused ids fill up to exactly `size` (TOK-04). Raises ConfigError when the
    size cannot be had or an `always` id does not exist, DataError when nothing was counted.
    """
    usable = len(counts_V) if usable is None else min(usable, len(counts_V))
    forced = sorted(set(always))
    problems = []
    if not len(forced) <= size <= usable:
        problems.append(
            f"draft.vocabulary: {size} tokens asked for, {usable} usable ones exist and {len(forced)} must be in"
        )
    if outside := [token for token in forced if not 0 <= token < usable]:
        problems.append(f"draft.vocabulary: stop tokens {outside} are outside the tokenizer's {usable} ids")
    if problems:
        raise ConfigError(problems)
    counts = counts_V[:usable].to(torch.int64)
    total = int(counts.sum())
    if total == 0:
        raise DataError("draft vocabulary: the training rows hold no supervised token to count")
    rank = counts.clone()
    rank[forced] = torch.iinfo(torch.int64).max
    chosen = torch.argsort(rank, descending=True, stable=True)[:size].sort().values
    inside = counts[chosen]
    return Vocabulary(chosen, int(inside.sum()) / total, int((inside == 0).sum()))


def count_tokens(ids: Tensor, mask: Tensor, vocab_size: int) -> Tensor:
    """Supervised tokens of one row or batch, by target id: int64 [V]. Rows are summed by the caller.

    Raises DataError for an id outside the vocabulary.
    """
    picked = ids[mask.bool()].to(torch.int64)
    if picked.numel() and not 0 <= int(picked.min()) <= int(picked.max()) < vocab_size:
        raise DataError(f"a training row holds token ids up to {int(picked.max())}; the target has {vocab_size}")
    return torch.bincount(picked, minlength=vocab_size)
