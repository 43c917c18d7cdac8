"""What every drafter offers: training outputs over packed anchors, and block proposals while decoding.

    output = drafter(context, anchors, embed_VD)                      # training: one forward for all anchors
    state = drafter.start(batch, max_length, device=..., dtype=...)   # decoding
    drafter.observe(state, taps_BTLD, last_hidden_BTD, ids_BT, positions_BT, lengths_B)
    proposal = drafter.propose(state, anchors_B, positions_B, sampler, frozen)

Shapes: B rows, T context positions, A anchors, K slots, D width, V vocabulary (|D| under a draft vocabulary), L tapped
layers, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from pipeline.draft.attention import choose_backend
from pipeline.draft.config import DraftConfig
from pipeline.draft.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead
from pipeline.draft.layers import wide

# (logits [B, V] fp32 over the proposal vocabulary, slot index from 0) → (draft ids [B], probabilities [B, V] or None)
Sampler = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


class FrozenParts(Protocol):
    """The target's frozen embedding and head, as `pipeline.frozen.Frozen` holds them."""

    head_VD: Tensor

    def embed(self, ids: Tensor) -> Tensor: ...

    def logits(self, last_hidden_ND: Tensor, rows: Tensor | None = None) -> Tensor: ...


@dataclass
class Context:
    """A packed stream of several documents, each contiguous.

    `document_T` tells them apart; `positions_T` are positions inside the document; `taps_TLD` are raw layer outputs in
    the order of `target_layer_ids`; `last_hidden_TD` is after the target's final norm (MTP and Medusa only).
    """

    ids_T: Tensor
    positions_T: Tensor
    document_T: Tensor
    taps_TLD: Tensor | None
    last_hidden_TD: Tensor | None = None


@dataclass
class Anchors:
    """`index_A`: places in the packed stream; `previous_AK`: x_{k−1} (the anchor, then data tokens); `valid_AK`: S9."""

    index_A: Tensor
    previous_AK: Tensor
    valid_AK: Tensor


@dataclass
class DraftOutput:
    """`hidden_AKD` is what the head reads; `markov_AKr` the vectors e with bias e W2ᵀ; `confidence_AK` fp32 logits."""

    hidden_AKD: Tensor
    markov_AKr: Tensor | None
    confidence_AK: Tensor | None


@dataclass
class Proposal:
    """`tokens_BK` target ids; `probs_BKV` the law each was drawn from (None when greedy); `confidence_BK` logits."""

    tokens_BK: Tensor
    probs_BKV: Tensor | None
    confidence_BK: Tensor | None


@dataclass
class Execution:
    """How a drafter computes, not what: none of these changes a result beyond rounding."""

    attention: str = "sdpa"
    compile: bool = False
    activation_checkpointing: bool = False


class Drafter(nn.Module):
    """Common to the family: heads, draft vocabulary, the sampling loop. Subclasses add the backbone."""

    # Layer classes that are called as a whole, so that FSDP may gather them one by one.
    shard_units: ClassVar[tuple[str, ...]] = ()

    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: DraftConfig, token_ids: Tensor | None) -> None:
        """`token_ids` [|D|]: the draft vocabulary, rising; required exactly when the config has a draft vocabulary."""
        super().__init__()
        self.config = config
        self.execution = Execution()
        self.markov_head = MARKOV_HEADS[config.markov](config) if config.markov != "none" else None
        self.confidence_head = ConfidenceHead(config.hidden_size + config.markov_rank) if config.confidence else None
        self._set_vocabulary(token_ids)

    def _set_vocabulary(self, token_ids: Tensor | None) -> None:
        size, vocab = self.config.draft_vocab_size, self.config.target_vocab_size
        if (size is None) != (token_ids is None):
            given = "not given" if token_ids is None else "given"
            raise ValueError(f"draft_vocab_size is {size}, but the draft vocabulary is {given}")
        if token_ids is None or size is None:
            self.register_buffer("d2t", None)
            self.register_buffer("t2d", None)
            return
        rising = len(token_ids) == size and not bool((token_ids.diff() <= 0).any())
        if not rising or token_ids[0] < 0 or token_ids[-1] >= vocab:
            raise ValueError(f"a draft vocabulary of {size} rising ids below {vocab} is expected")
        self.register_buffer("d2t", token_ids.to(torch.int64) - torch.arange(size))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool).index_fill_(0, token_ids, True))

    # ------------------------------------------------------------------------------------------ training

    def configure(
        self, *, attention: str, device: torch.device, compile: bool = False, activation_checkpointing: bool = False
    ) -> str:
        """Choose how to compute on `device`; returns the attention's reason, to be printed (DEP-04)."""
        backend, reason = choose_backend(attention, device)
        self.execution = Execution(backend, compile, activation_checkpointing)
        for module, method in self.dense_parts():
            vars(module).pop(method, None)
            if compile:
                setattr(module, method, torch.compile(getattr(module, method), dynamic=True))
        return reason

    def dense_parts(self) -> list[tuple[nn.Module, str]]:
        """Methods worth compiling: everything around attention, which has its own kernels and data-dependent shapes."""
        return []

    def forward(
        self, context: Context, anchors: Anchors, embed_VD: Tensor, *, detach_confidence: bool = False
    ) -> DraftOutput:
        """Training outputs of all anchors; `embed_VD` is the frozen embedding, scaled as the target scales it.

        `detach_confidence` cuts the confidence head's features off the graph (S12).
        """
        hidden = self.backbone(context, anchors, embed_VD)
        return self.read_heads(hidden, anchors, detach_confidence=detach_confidence)

    def read_heads(self, hidden_AKD: Tensor, anchors: Anchors, *, detach_confidence: bool = False) -> DraftOutput:
        """Training outputs on given states of the backbone."""
        head, previous, markov = self.markov_head, None, None
        if head is not None:
            previous = head.embed(anchors.previous_AK, hidden_AKD)
            markov = head(previous, hidden_AKD)
        return DraftOutput(hidden_AKD, markov, self._confidence(hidden_AKD, previous, detach=detach_confidence))

    def backbone(self, context: Context, anchors: Anchors, embed_VD: Tensor) -> Tensor:
        """States [A, K, D] after the draft's final norm."""
        raise NotImplementedError

    def _confidence(self, hidden: Tensor, previous: Tensor | None, *, detach: bool = False) -> Tensor | None:
        if self.confidence_head is None:
            return None
        if detach:
            hidden, previous = hidden.detach(), None if previous is None else previous.detach()
        return self.confidence_head(hidden, previous)

    @property
    def markov_w2(self) -> Tensor | None:
        """W2 [V or |D|, r], or None without a sequential head."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    @property
    def rows(self) -> Tensor | None:
        """Target ids [|D|] of the draft vocabulary, or None where the vocabulary is the target's (S30)."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ------------------------------------------------------------------------------------------ decoding

    def start(self, batch: int, max_length: int, *, device: torch.device | str, dtype: torch.dtype) -> Any:
        """An empty state for `batch` rows of up to `max_length` context positions."""
        raise NotImplementedError

    def observe(
        self,
        state: Any,
        taps_BTLD: Tensor | None,
        last_hidden_BTD: Tensor | None,
        ids_BT: Tensor,
        positions_BT: Tensor,
        lengths_B: Tensor,
        *,
        rows_B: Tensor | None = None,
        frozen: FrozenParts | None = None,
    ) -> None:
        """Take in what the target computed for the next tokens of each row: the first lengths_B[b] of T are real.

        They follow the row's `state.lengths_B`; lowering those beforehand forgets rejected tokens. `rows_B` names the
        state's rows (default: the first B).
        """
        raise NotImplementedError

    def propose(
        self,
        state: Any,
        anchors_B: Tensor,
        positions_B: Tensor,
        sampler: Sampler,
        frozen: FrozenParts,
        *,
        rows_B: Tensor | None = None,
    ) -> Proposal:
        """Draft K tokens after each row's anchor (its last token, not yet observed) at `positions_B`."""
        raise NotImplementedError

    def sample_block(
        self, state: Any, hidden_BKD: Tensor, anchors_B: Tensor, sampler: Sampler, frozen: FrozenParts
    ) -> Proposal:
        """Draw slots left to right from the block's states, each biased by the token before it (S10, S16–S18)."""
        base_BKV = self.base_logits(state, hidden_BKD, frozen)
        head, carry = self.markov_head, None if self.markov_head is None else self.markov_head.start(hidden_BKD)
        previous, embedded, tokens, laws = anchors_B, [], [], []
        for k in range(hidden_BKD.shape[1]):
            logits = base_BKV[:, k]
            if head is not None:
                embedded.append(head.embed(previous, hidden_BKD))
                markov, carry = head.step(embedded[-1], hidden_BKD[:, k], carry)
                logits = logits + wide(head.markov_w2(markov))
            drawn, law = sampler(logits, k)
            previous = self.target_ids(drawn)
            tokens.append(previous)
            laws.append(law)
        confidence = self._confidence(hidden_BKD, torch.stack(embedded, 1) if embedded else None)
        return Proposal(torch.stack(tokens, 1), stack_laws(laws), confidence)

    def base_logits(self, state: Any, hidden: Tensor, frozen: FrozenParts) -> Tensor:
        """fp32 logits [..., V or |D|] of the target's head on draft states, before any sequential bias.

        The head's rows are gathered once per decoding state, not once per block.
        """
        rows = self.rows
        if rows is not None:
            if state.head is None or state.head[0] is not frozen:
                state.head = (frozen, replace(frozen, head_VD=frozen.head_VD[rows]))  # type: ignore[type-var]
            frozen = state.head[1]
        return frozen.logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])

    def target_ids(self, drawn: Tensor) -> Tensor:
        """Proposal ids to target ids (S30: target = draft + d2t)."""
        return drawn if self.d2t is None else drawn + self.d2t[drawn]


def stack_laws(laws: list[Tensor | None]) -> Tensor | None:
    """The slots' distributions [B, K, V], or None when the sampler returned none."""
    known = [law for law in laws if law is not None]
    return torch.stack(known, 1) if known else None
