"""Medusa: one small head per slot, all reading the target's last hidden state before the anchor, none reading another.

Head k maps the state at a − 1 to what the target's head reads for token a + k: h + silu(W h + b), `layers` times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.draft.attention import visible_ranges
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Anchors, Context, Drafter, FrozenParts, Proposal, Sampler
from pipeline.draft.state import DraftState


class Medusa(Drafter):
    """K independent residual heads on the last hidden state (after the target's final norm)."""

    def __init__(self, config: DraftConfig, token_ids: Tensor | None = None) -> None:
        super().__init__(config, token_ids)
        width = config.hidden_size
        self.medusa_head = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.layers))) for _ in range(config.block_size)
        )

    def dense_parts(self) -> list[tuple[nn.Module, str]]:
        return [(self, "heads")]

    def heads(self, last_hidden: Tensor) -> Tensor:
        """The state before the anchor [N, D] → one state per slot [N, K, D]."""
        return torch.stack([head(last_hidden) for head in self.medusa_head], dim=1)

    def backbone(self, context: Context, anchors: Anchors, embed_VD: Tensor) -> Tensor:
        if context.last_hidden_TD is None:
            raise ValueError("Medusa reads the target's last hidden states, but the context carries none")
        start_A, index_A = visible_ranges(context.document_T, anchors.index_A)
        before = context.last_hidden_TD[(index_A - 1).clamp(min=0)]
        return self.heads(before * (index_A > start_A)[:, None])

    def start(self, batch: int, max_length: int, *, device: torch.device | str, dtype: torch.dtype) -> DraftState:
        return DraftState.empty(self.config, batch, max_length, layers=0, features=True, device=device, dtype=dtype)

    def observe(
        self,
        state: DraftState,
        taps_BTLD: Tensor | None,
        last_hidden_BTD: Tensor | None,
        ids_BT: Tensor,
        positions_BT: Tensor,
        lengths_B: Tensor,
        *,
        rows_B: Tensor | None = None,
        frozen: FrozenParts | None = None,
    ) -> None:
        if last_hidden_BTD is None or state.features_BND is None:
            raise ValueError("Medusa reads the target's last hidden states, but none were given")
        rows = torch.arange(len(ids_BT), device=ids_BT.device) if rows_B is None else rows_B
        before = state.lengths_B[rows]
        offset_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        cells = state.cells(before[:, None] + offset_T, offset_T < lengths_B[:, None], rows)
        cells.put(state.features_BND, cells.take(last_hidden_BTD))
        state.lengths_B[rows] = before + lengths_B

    def propose(
        self,
        state: DraftState,
        anchors_B: Tensor,
        positions_B: Tensor,
        sampler: Sampler,
        frozen: FrozenParts,
        *,
        rows_B: Tensor | None = None,
    ) -> Proposal:
        assert state.features_BND is not None
        rows = torch.arange(len(anchors_B), device=anchors_B.device) if rows_B is None else rows_B
        lengths_B = state.lengths_B[rows]
        last = state.features_BND[rows, (lengths_B - 1).clamp(min=0)] * (lengths_B > 0)[:, None]
        first: ResidualBlock = self.medusa_head[0][0]  # type: ignore[index, assignment]
        return self.sample_block(state, self.heads(last.to(first.linear.weight.dtype)), anchors_B, sampler, frozen)


class ResidualBlock(nn.Module):
    """h + silu(W h + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))
