"""What Eagle3 and MTP share: one layer that drafts token by token, feeding its own state back.

Position p's entry joins what the target knew at p with the token at p + 1, so that slot 1 of anchor a is entry a − 1:
the target's state before the anchor, and the anchor. Slot k reads slot k − 1's state and token x_{k−1}. Entries keep
position p, so slot k sits at a + k − 2; it sees the entries 0 … a − 2 of its document and its block's earlier slots.

In training all anchors take step k together: the same K steps the decoder takes, on the drafter's own states and the
data's tokens (S10), so that it is taught on the inputs it will meet.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeline.draft.attention import AnchorPlan, trim, visible_ranges
from pipeline.draft.config import DraftConfig
from pipeline.draft.interface import Anchors, Context, Drafter, FrozenParts, Proposal, Sampler, stack_laws
from pipeline.draft.layers import MLP, Attend, Attention, RMSNorm, Tables
from pipeline.draft.rope import Rope
from pipeline.draft.state import DraftState, attend_rows


class AutoregressiveDrafter(Drafter):
    """The unrolled loop; subclasses say what an entry is made of and what the next slot reads."""

    layers: nn.ModuleList
    norm: RMSNorm

    def __init__(self, config: DraftConfig, token_ids: Tensor | None = None) -> None:
        super().__init__(config, token_ids)
        self.rope = Rope(config.rope, config.head_dim)

    def dense_parts(self) -> list[tuple[nn.Module, str]]:
        return [(self, "read"), (self, "close")]

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """What the target knew: taps [..., L, D] or last hidden states [..., D] → [..., D]."""
        raise NotImplementedError

    def read(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """An entry from features and token embeddings [..., D]: (residual stream [..., D], attention's input)."""
        raise NotImplementedError

    def close(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's remainder: (state h_k after the final norm, features the next slot reads)."""
        raise NotImplementedError

    def _attention(self) -> Attention:
        attention = self.layers[0].self_attn
        assert isinstance(attention, Attention)
        return attention

    # ------------------------------------------------------------------------------------------ training

    def backbone(self, context: Context, anchors: Anchors, embed_VD: Tensor) -> Tensor:
        start_A, index_A = visible_ranges(context.document_T, anchors.index_A)
        kept = torch.arange(len(context.ids_T), device=index_A.device)
        if self.execution.attention == "sdpa":
            kept, start_A, index_A = trim(start_A, index_A, len(kept))
        features = self.features(*(None if x is None else x[kept] for x in (context.taps_TLD, context.last_hidden_TD)))
        following = context.ids_T[(kept + 1).clamp(max=len(context.ids_T) - 1)]
        _, entries = self.read(features, F.embedding(following, embed_VD))
        shared = self._attention().keys_values(entries, self.rope.tables(context.positions_T[kept]))
        # Entry a − 1 is slot 1 itself; a document's first token has none before it and starts from zero.
        plan = AnchorPlan.build(start_A, (index_A - 1).maximum(start_A), backend=self.execution.attention)
        state = F.pad(features, (0, 0, 1, 0))[torch.where(index_A > start_A, index_A, 0)]
        embedded = F.embedding(anchors.previous_AK, embed_VD)
        positions = context.positions_T[anchors.index_A] - 1
        return self._unroll(state, embedded, positions, shared, plan.attend)

    def _unroll(
        self, state: Tensor, embedded_AKD: Tensor, positions: Tensor, shared: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        recompute = self.execution.activation_checkpointing and torch.is_grad_enabled()
        own: tuple[Tensor, ...] = ()
        outputs = []
        for k in range(self.config.block_size):
            inputs = (state, embedded_AKD[:, k], self.rope.tables(positions + k), shared, attend, own)
            if recompute:
                hidden, state, own = checkpoint(self._step, *inputs, use_reentrant=False)
            else:
                hidden, state, own = self._step(*inputs)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)

    def _step(
        self,
        state: Tensor,
        embedded: Tensor,
        tables: Tables,
        shared: tuple[Tensor, Tensor],
        attend: Attend,
        own: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """One slot of all blocks: state and embedding [A, D], own keys and values of the earlier slots."""
        residual, x = self.read(state, embedded)
        attention = self._attention()
        k, v = attention.keys_values(x, tables)
        own_k, own_v = (torch.cat([*old, new[:, None]], 1) for old, new in zip(_pairs(own), (k, v), strict=True))
        attended = attend(attention.queries(x, tables)[:, None], *shared, own_k, own_v)[:, 0]
        hidden, state = self.close(residual, attention.output(attended))
        return hidden, state, (own_k, own_v)

    # ------------------------------------------------------------------------------------------ decoding

    def start(self, batch: int, max_length: int, *, device: torch.device | str, dtype: torch.dtype) -> DraftState:
        return DraftState.empty(self.config, batch, max_length, layers=1, features=True, device=device, dtype=dtype)

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
        if frozen is None:
            raise ValueError("an autoregressive drafter reads token embeddings: pass frozen to observe")
        assert state.features_BND is not None
        rows = torch.arange(len(ids_BT), device=ids_BT.device) if rows_B is None else rows_B
        before = state.lengths_B[rows]
        offset_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        at_BT = before[:, None] + offset_T
        real_BT = offset_T < lengths_B[:, None]
        cells = state.cells(at_BT, real_BT, rows)
        dtype = self.norm.weight.dtype
        given = (None if x is None else cells.take(x).to(dtype) for x in (taps_BTLD, last_hidden_BTD))
        cells.put(state.features_BND, self.features(*given))
        # A token completes the entry of the position before it.
        done = state.cells(at_BT - 1, real_BT & (at_BT > 0), rows)
        features = state.features_BND[done.row, done.at].to(dtype)
        _, entries = self.read(features, frozen.embed(done.take(ids_BT)).to(dtype))
        k, v = self._attention().keys_values(entries, self.rope.tables(done.take(positions_BT) - 1))
        done.put(state.keys[0], k)
        done.put(state.values[0], v)
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
        entries_B = (lengths_B - 1).clamp(min=0)
        here = slice(0, len(anchors_B)) if rows_B is None else rows_B  # a slice reads the cache without copying it
        shared = state.context(0, here, int(entries_B.max()))

        def attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
            return attend_rows(q, k, v, own_k, own_v, entries_B)

        dtype = self.norm.weight.dtype
        carry = (state.features_BND[rows, entries_B] * (lengths_B > 0)[:, None]).to(dtype)
        own: tuple[Tensor, ...] = ()
        token, hiddens, tokens, laws = anchors_B, [], [], []
        for k in range(self.config.block_size):
            embedded = frozen.embed(token).to(dtype)
            hidden, carry, own = self._step(carry, embedded, self.rope.tables(positions_B - 1 + k), shared, attend, own)
            drawn, law = sampler(self.base_logits(state, hidden, frozen), k)
            token = self.target_ids(drawn)
            hiddens.append(hidden)
            tokens.append(token)
            laws.append(law)
        confidence = self._confidence(torch.stack(hiddens, 1), None)
        return Proposal(torch.stack(tokens, 1), stack_laws(laws), confidence)


def _pairs(own: tuple[Tensor, ...]) -> list[list[Tensor]]:
    return [[x] for x in own] or [[], []]


class StepLayer(nn.Module):
    """A layer that is called in parts, never as a whole: nothing may shard it apart from its drafter."""

    def __init__(self, config: DraftConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
