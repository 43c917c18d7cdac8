"""One round for a batch of rows: draft, schedule, verify, correct. The law tests run this very function.

A row is at its *anchor*: the last token it has, at position a, not yet in the target's cache. A round proposes the K
tokens after it, lets the target look at the anchor and the scheduled proposals in one forward, keeps the accepted
prefix and adds one token of the target's own. Decoding without a drafter is the same round with K = 0.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.decoding.randoms import uniforms
from pipeline.speculative.verify import Drafted, Law, draw, verify


class Policy(Protocol):
    """How many drafted tokens of each row are verified: logits_BK of the confidence head (or None) -> lengths_B."""

    def lengths(self, confidence_BK: Tensor | None, rows: int, block_size: int, device: torch.device) -> Tensor:
        """Verify lengths [rows], each in [0, block_size]; called once per round, in order."""


class FullBlock:
    """Verify everything that was drafted."""

    def lengths(self, confidence_BK: Tensor | None, rows: int, block_size: int, device: torch.device) -> Tensor:
        """The block size for every row."""
        return torch.full((rows,), block_size, dtype=torch.long, device=device)


@dataclass
class Clock:
    """Seconds by part of the work. Waits for the device around each part, so switch it on only to measure."""

    device: torch.device | None = None
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rounds: int = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to `name`."""
        started = self._now()
        yield
        self.seconds[name] += self._now() - started

    def _now(self) -> float:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass
class Rows:
    """Where the running rows are; row b sits in slot b. positions_B is the anchor's position."""

    anchors_B: Tensor
    positions_B: Tensor
    seeds_B: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a round gave: the proposals, how many were scheduled and accepted, and the target's own next token."""

    tokens_BK: Tensor
    lengths_B: Tensor
    accepted_B: Tensor
    token_B: Tensor
    confidence_BK: Tensor | None


class Sampler:
    """Draws drafted tokens from the drafter's logits; remembers nothing. Called once per slot, in slot order."""

    def __init__(self, law: Law, uniforms_BK: Tensor) -> None:
        self.law = law
        self._uniforms_BK = uniforms_BK

    def __call__(self, logits_BV: Tensor, slot: int) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] in the vocabulary of the logits, and the fp32 law [B, V] they came from (None when greedy)."""
        if self.law.greedy:
            return logits_BV.argmax(-1), None
        probs_BV = self.law.probs(logits_BV)
        return draw(probs_BV, self._uniforms_BK[:, slot]), probs_BV


@dataclass
class Engine:
    """Everything a round works with. `drafter` None (block_size 0) is plain decoding."""

    target: Any
    cache: Any
    law: Law
    drafter: Any = None
    state: Any = None
    policy: Policy = field(default_factory=FullBlock)
    clock: Clock = field(default_factory=Clock)

    @property
    def block_size(self) -> int:
        """K; 0 without a drafter."""
        return 0 if self.drafter is None else int(self.drafter.config.block_size)

    def start(self, slots: int, longest: int) -> None:
        """Before the first round: what the drafter keeps of `slots` rows of up to `longest` positions is allocated."""
        if self.drafter is not None:
            head_VD = self.target.frozen.head_VD
            self.state = self.drafter.start(slots, longest, device=head_VD.device, dtype=head_VD.dtype)

    def midway(self, anchors_B: Tensor, positions_B: Tensor) -> Rows:
        """Rows in the middle of their answers with blanks before their anchors: what a round costs can be measured."""
        if self.drafter is not None:
            self.state.lengths_B[:] = positions_B
        return Rows(anchors_B, positions_B, torch.arange(len(anchors_B), device=anchors_B.device))

    def play(self, rows: Rows) -> Outcome:
        """Draft, schedule, verify, correct (S20, S21), and show the drafter what was kept."""
        clock, block_size, device = self.clock, self.block_size, rows.anchors_B.device
        clock.rounds += 1
        with clock.part("sample"):
            final_B, draft_BK, accept_BK = _split(uniforms(rows.seeds_B, rows.positions_B, 1 + 2 * block_size))
        with clock.part("draft"):
            drafted, confidence_BK = self._propose(rows, draft_BK)
        with clock.part("schedule"):
            lengths_B = self.policy.lengths(confidence_BK, len(rows.anchors_B), block_size, device)
            longest = int(lengths_B.max())
            ids_BT = torch.cat([rows.anchors_B[:, None], drafted.tokens_BK[:, :longest]], dim=1)
            steps_T = torch.arange(1 + longest, device=device)
            positions_BT = rows.positions_B[:, None] + steps_T
        with clock.part("verify"):
            mask = self.cache.place(positions_BT)
            seen = self.target.forward(ids_BT, positions_BT=positions_BT, mask=mask, cache=self.cache)
            logits_NV = self.target.frozen.logits(seen.last_hidden_BTD[steps_T <= lengths_B[:, None]])
        with clock.part("sample"):
            verdict = verify(
                drafted, logits_NV, lengths_B=lengths_B, law=self.law, accept_BK=accept_BK, final_B=final_B
            )
        if self.drafter is not None:
            with clock.part("draft"):
                kept_B = 1 + verdict.accepted_B
                self.drafter.observe(
                    self.state, seen.taps_BTLD, seen.last_hidden_BTD, ids_BT, positions_BT, kept_B,
                    frozen=self.target.frozen,
                )  # fmt: skip
        return Outcome(drafted.tokens_BK, lengths_B, verdict.accepted_B, verdict.token_B, confidence_BK)

    def _propose(self, rows: Rows, uniforms_BK: Tensor) -> tuple[Drafted, Tensor | None]:
        if self.drafter is None:
            return Drafted(rows.anchors_B.new_empty(len(rows.anchors_B), 0)), None
        sampler = Sampler(self.law, uniforms_BK)
        proposal = self.drafter.propose(self.state, rows.anchors_B, rows.positions_B, sampler, self.target.frozen)
        drafted = Drafted(proposal.tokens_BK, proposal.probs_BKV, self.drafter.rows)
        return drafted, proposal.confidence_BK


def _split(numbers_BU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    block_size = (numbers_BU.shape[1] - 1) // 2
    return numbers_BU[:, 0], numbers_BU[:, 1 : 1 + block_size], numbers_BU[:, 1 + block_size :]
