"""DSpark and DFlash: one forward drafts a whole block (S1–S5); DSpark adds a sequential head on top (S16–S18).

Parameters are named as DeepSpec names them: `fc`, `hidden_norm`, `layers.i.*`, `norm`, `markov_head.*`,
`confidence_head.proj`. Embedding and head are the target's and live elsewhere.

Without taps (`taps: false`, the control that tells how much a drafter owes to the target's hidden states) there are no
context features at all: a block sees its anchor's embedding, its own mask slots, and nothing else.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeline.draft.attention import AnchorPlan, trim, visible_ranges
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Anchors, Context, Drafter, FrozenParts, Proposal, Sampler
from pipeline.draft.layers import DraftLayer, RMSNorm, Tables
from pipeline.draft.rope import Rope
from pipeline.draft.state import DraftState, attend_rows


class BlockDrafter(Drafter):
    """K slots from one forward over [anchor, mask, …, mask] (next-token) or [anchor, K masks] (fill-in)."""

    shard_units = ("DraftLayer",)

    def __init__(self, config: DraftConfig, token_ids: Tensor | None = None) -> None:
        super().__init__(config, token_ids)
        width = config.hidden_size
        if config.taps:
            self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
            self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.rope = Rope(config.rope, config.head_dim)

    def dense_parts(self) -> list[tuple[nn.Module, str]]:
        return [(self, "features"), *((layer, part) for layer in self.layers for part in ("before", "after"))]

    def features(self, taps: Tensor) -> Tensor:
        """H_ctx = RMSNorm(W_c [taps]) (S3): [..., L, D] → [..., D]."""
        return self.hidden_norm(self.fc(taps.flatten(-2)))

    def block_ids(self, anchors: Tensor) -> Tensor:
        """Token ids fed for anchors [N] → [N, S]: the anchor, then mask tokens (S1)."""
        return F.pad(anchors[:, None], (0, self.config.block_inputs - 1), value=self.config.mask_token_id)

    def _block_positions(self, anchors: Tensor) -> Tensor:
        return anchors[:, None] + torch.arange(self.config.block_inputs, device=anchors.device)

    def _stack(self) -> list[DraftLayer]:
        return [cast(DraftLayer, layer) for layer in self.layers]

    def _finish(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden[:, self.config.first_output :])

    # ------------------------------------------------------------------------------------------ training

    def backbone(self, context: Context, anchors: Anchors, embed_VD: Tensor) -> Tensor:
        features, tables, plan = self._context(context, anchors, embed_VD)
        hidden = F.embedding(self.block_ids(anchors.previous_AK[:, 0]), embed_VD)
        block_tables = self.rope.tables(self._block_positions(context.positions_T[anchors.index_A]))
        for layer in self.layers:
            inputs = (hidden, features, block_tables, tables, plan.attend)
            if self.execution.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                hidden = layer(*inputs)
        return self._finish(hidden)

    def _context(self, context: Context, anchors: Anchors, embed_VD: Tensor) -> tuple[Tensor, Tables, AnchorPlan]:
        """Features of the positions some anchor sees, their rotary tables, and who sees what."""
        start_A, stop_A = visible_ranges(context.document_T, anchors.index_A)
        taps, positions = context.taps_TLD, context.positions_T
        if not self.config.taps:
            stop_A = start_A = torch.zeros_like(start_A)
            features, positions = embed_VD.new_zeros(0, self.config.hidden_size), positions[:0]
        else:
            if taps is None:
                raise ValueError("this drafter reads tapped hidden states, but the context carries none")
            if self.execution.attention == "sdpa":
                kept, start_A, stop_A = trim(start_A, stop_A, len(positions))
                if len(kept) < len(positions):
                    taps, positions = taps[kept], positions[kept]
            features = self.features(taps)
        plan = AnchorPlan.build(start_A, stop_A, backend=self.execution.attention)
        return features, self.rope.tables(positions), plan

    # ------------------------------------------------------------------------------------------ decoding

    def start(self, batch: int, max_length: int, *, device: torch.device | str, dtype: torch.dtype) -> DraftState:
        return DraftState.empty(
            self.config, batch, max_length, layers=self.config.layers, features=False, device=device, dtype=dtype
        )

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
        rows = torch.arange(len(ids_BT), device=ids_BT.device) if rows_B is None else rows_B
        before = state.lengths_B[rows]
        if taps_BTLD is not None and self.config.taps:
            offset_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
            cells = state.cells(before[:, None] + offset_T, offset_T < lengths_B[:, None], rows)
            features = self.features(cells.take(taps_BTLD).to(self.fc.weight.dtype))
            tables = self.rope.tables(cells.take(positions_BT))
            for i, layer in enumerate(self._stack()):
                k, v = layer.self_attn.keys_values(features, tables)
                cells.put(state.keys[i], k)
                cells.put(state.values[i], v)
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
        rows = slice(0, len(anchors_B)) if rows_B is None else rows_B
        lengths_B = state.lengths_B[rows]
        upto = int(lengths_B.max()) if self.config.taps else 0
        hidden = frozen.embed(self.block_ids(anchors_B)).to(self.norm.weight.dtype)
        tables = self.rope.tables(self._block_positions(positions_B))

        def attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
            return attend_rows(q, k, v, own_k, own_v, lengths_B)

        for i, layer in enumerate(self._stack()):
            hidden = layer.over(hidden, state.context(i, rows, upto), tables, attend)
        return self.sample_block(state, self._finish(hidden), anchors_B, sampler, frozen)
