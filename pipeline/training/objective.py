"""The module that is wrapped, sharded and differentiated: drafter and loss in one forward.

The loss runs inside because W2 is whole only there (ZeRO-3, FSDP2 gather weights around a forward), and the frozen
embedding and head come in as arguments because nothing may shard, train or save them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.draft.interface import Drafter, DraftOutput
from pipeline.speculative.losses import SlotWeights, slot_loss
from pipeline.speculative.teacher import DraftVocabulary, Head
from pipeline.training.metrics import SLOT_COLUMNS, TOTALS, Sums, measure
from pipeline.training.microbatch import MicroBatch
from pipeline.training.terms import Terms


@dataclass(frozen=True)
class FrozenTensors:
    """The target's frozen tensors in the compute dtype, on the device: arguments of every forward."""

    embed_VD: Tensor
    head: Head
    draft_head: Head
    words: DraftVocabulary | None


class Objective(nn.Module):
    """`forward` returns the scalar to differentiate and the detached sums of one micro-batch."""

    def __init__(self, drafter: Drafter, terms: Terms, dtype: torch.dtype) -> None:
        super().__init__()
        self.drafter = drafter
        self.terms = terms
        self.dtype = dtype

    def forward(self, batch: MicroBatch, frozen: FrozenTensors, scale: float, ce_scale: float) -> tuple[Tensor, Sums]:
        """Loss of a micro-batch: its weighted sums times `scale` (world / sum of w), or `ce_scale` for the CE term.

        Added over micro-batches and averaged over ranks, that is sum w l / sum w over the global batch (S14).
        """
        narrow = self.dtype == torch.bfloat16
        with torch.autocast(batch.slots_S.device.type, dtype=torch.bfloat16, enabled=narrow):
            output = self.drafter(
                batch.context, batch.anchors, frozen.embed_VD, detach_confidence=self.terms.detach_confidence
            )
        return self.loss(output, batch, frozen, scale, ce_scale)

    def loss(
        self, output: DraftOutput, batch: MicroBatch, frozen: FrozenTensors, scale: float, ce_scale: float
    ) -> tuple[Tensor, Sums]:
        terms = self.terms
        hidden_SD = output.hidden_AKD.flatten(0, 1)[batch.slots_S].to(frozen.draft_head.weight_VD.dtype)
        wide = torch.float64 if hidden_SD.dtype == torch.float64 else torch.float32
        weights_S = batch.weights_S.to(wide)
        markov_Sr = w2_Cr = None
        if output.markov_AKr is not None and self.drafter.markov_w2 is not None:
            markov_Sr = output.markov_AKr.flatten(0, 1)[batch.slots_S].to(hidden_SD.dtype)
            w2_Cr = self.drafter.markov_w2.to(hidden_SD.dtype)
        loss, slots = slot_loss(
            hidden_SD,
            markov_Sr=markov_Sr,
            w2_Cr=w2_Cr,
            draft_head=frozen.draft_head,
            target_head=frozen.head,
            teacher=batch.teacher,
            words=frozen.words,
            rows_S=batch.rows_S,
            labels_S=batch.labels_S,
            weights=SlotWeights(
                weights_S * (batch.labels_S >= 0) * (terms.ce * ce_scale), weights_S * (terms.divergence * scale)
            ),
            divergence=terms.kind,
            chunk=terms.chunk,
        )
        confidence_S = None
        if output.confidence_AK is not None:
            logits_S = output.confidence_AK.flatten()[batch.slots_S].to(wide)
            confidence_S = F.binary_cross_entropy_with_logits(logits_S, slots.acceptance_S, reduction="none")
            loss = loss + (terms.confidence * scale) * (weights_S * confidence_S).sum()
            sure_S = torch.sigmoid(logits_S.detach())
        with torch.no_grad():
            sums = measure(batch, slots, weights_S)
            if confidence_S is not None:
                for name, value_S in (
                    ("confidence", confidence_S.detach()),
                    ("confidence_gap", sure_S - slots.acceptance_S),
                    ("confidence_spread", sure_S * (1 - sure_S)),
                ):
                    sums.totals_N[TOTALS.index(name)] = (weights_S * value_S).sum()
                error_S = (sure_S - slots.acceptance_S).abs()
                column = sums.slots_KM[:, SLOT_COLUMNS.index("confidence_error")]
                column.index_add_(0, batch.slots_S % len(column), error_S.double())
        return loss, sums
