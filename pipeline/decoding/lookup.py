"""Prompt lookup: the baseline that needs no drafter. The last tokens are searched for in what came before.

A proposal is fixed, so at any temperature it is accepted exactly when the target's own next tokens equal it: rounds can
be counted on recorded outputs, whatever the temperature, without running the target again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

LONGEST_SUFFIX = 3


def propose(ids: Sequence[int], index: dict[tuple[int, ...], int], block_size: int) -> list[int]:
    """Up to `block_size` tokens that followed the most recent earlier match of the longest suffix (3 tokens or fewer).

    `index` maps every n-gram that ends before the last token to the position after it.
    """
    for length in range(min(LONGEST_SUFFIX, len(ids) - 1), 0, -1):
        after = index.get(tuple(ids[-length:]))
        if after is not None:
            return list(ids[after : after + block_size])
    return []


def rounds(
    prompt: Sequence[int], output: Sequence[int], *, limit: int, block_size: int, stop_ids: Collection[int]
) -> list[tuple[int, int, int]]:
    """(scheduled, accepted, bonus) per verify step of an output, by the law of S23.

    The output's first token comes from the prefill. Rounds start while fewer than `limit` tokens are out; `output` may
    run past the limit, so that the last round is counted before the cut. A round the output is too short to judge is
    left out.
    """
    ids, index, steps = list(prompt), dict[tuple[int, ...], int](), list[tuple[int, int, int]]()
    indexed = 1

    def advance(tokens: Sequence[int]) -> None:
        nonlocal indexed
        ids.extend(tokens)
        while indexed < len(ids):  # n-grams ending at indexed - 1: the last token itself stays out
            for length in range(1, LONGEST_SUFFIX + 1):
                if indexed >= length:
                    index[tuple(ids[indexed - length : indexed])] = indexed
            indexed += 1

    done = 1
    advance(output[:1])
    while done < min(limit, len(output)) and output[done - 1] not in stop_ids:
        proposal, coming = propose(ids, index, block_size), output[done : done + block_size + 1]
        accepted = 0
        stop = False
        for guess, token in zip(proposal, coming, strict=False):
            if guess != token:
                break
            accepted += 1
            stop = token in stop_ids
            if stop:
                break
        if not stop and accepted == len(coming):
            break
        steps.append((len(proposal), accepted, int(not stop)))
        kept = accepted + int(not stop)
        advance(coming[:kept])
        done += kept
    return steps
