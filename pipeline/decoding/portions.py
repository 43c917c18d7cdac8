"""How decoding and timing are cut into parts. Imports nothing heavy: `dspark plan` reads it too."""

from __future__ import annotations

CHUNK = 32  # prompts of a unit that ranks share and a killed run keeps
PREFILL = 4096  # tokens of one prefill forward
GROWTH = 128  # positions the key/value cache grows by
ROW_TOKENS = 8  # tokens a row brings to a timed forward: an anchor and seven drafts
WARM_UP = 2  # forwards of each size before its first timed one


def grid(kind: str, largest: int) -> list[int]:
    """Batch sizes to measure: every one up to 64, then at most 10 % apart; or the powers of two. Ends at `largest`."""
    if kind == "powers_of_two":
        sizes = [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]
    else:
        sizes = list(range(1, min(largest, 64) + 1))
        while sizes[-1] < largest:
            sizes.append(max(sizes[-1] + 1, int(sizes[-1] * 1.1)))
    return sorted({*(size for size in sizes if size < largest), largest})


def rows_of(tokens: int) -> int:
    """Rows a measured forward of so many tokens is spread over."""
    return -(-tokens // ROW_TOKENS)
