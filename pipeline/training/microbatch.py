"""From rows to one packed micro-batch: context, anchors, and the supervised slots sorted by teacher row.

    plan = plan_row(tokens, recipe, epoch)            # from ids and mask alone: anchors, labels, weights
    batch = pack(plans, samples, recipe)              # adds taps and the target's distributions

What is supervised is known before anything heavy is read, so the sums of the weights are reduced over all ranks before
the first forward (S14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from pipeline.draft.interface import Anchors, Context
from pipeline.errors import ArtifactError
from pipeline.speculative.anchors import Rule, sample_anchors, supervised_slots
from pipeline.speculative.teacher import DraftVocabulary, HiddenTeacher, Teacher, TopTeacher
from pipeline.training.teacher import Kept, join, rows_of

T = TypeVar("T")


class Sample(Protocol):
    """A decoded row (see `pipeline.shards.record.Sample`)."""

    @property
    def ids_T(self) -> Tensor: ...

    @property
    def mask_T(self) -> Tensor: ...

    @property
    def taps_TLD(self) -> Tensor: ...

    @property
    def teacher(self) -> Kept: ...


@dataclass(frozen=True)
class Recipe:
    """How rows become slots. `weights_K` are the position weights (S13), `words` the draft vocabulary (S30)."""

    block_size: int
    num_anchors: int
    rule: Rule
    seed: int
    weights_K: Tensor
    vocab_size: int
    words: DraftVocabulary | None = None
    ce_label: Literal["data", "argmax"] = "data"
    last_hidden: bool = False


@dataclass(frozen=True)
class RowPlan:
    """What one row contributes: anchors, x_{k-1} of every slot, draft labels (-1 outside D), which slots count (S9)."""

    key: str
    anchors_A: Tensor
    previous_AK: Tensor
    labels_AK: Tensor
    valid_AK: Tensor

    def weight_sums(self, weights_K: Tensor) -> Tensor:
        """(sum of w, sum of w over labels inside the draft vocabulary) of the supervised slots, float64 [2] (S14)."""
        weights_AK = weights_K * self.valid_AK
        return torch.stack([weights_AK.sum(), (weights_AK * (self.labels_AK >= 0)).sum()])


def plan_row(
    key: str, ids_T: Tensor, mask_T: Tensor, recipe: Recipe, epoch: int, best_T: Tensor | None = None
) -> RowPlan:
    """Anchors and labels of a row in an epoch (S7 to S10).

    `best_T` replaces the data tokens as labels: the target's most likely next token at every position
    (`ce_label: argmax`).
    """
    mask_T = mask_T.bool()
    anchors_A = sample_anchors(
        mask_T, num_anchors=recipe.num_anchors, seed=recipe.seed, epoch=epoch, sample_id=key, rule=recipe.rule
    )
    valid_AK = supervised_slots(mask_T, anchors_A, recipe.block_size)
    ids_T = ids_T.long()
    at_AK = anchors_A[:, None] + torch.arange(recipe.block_size)
    last = max(ids_T.numel() - 1, 0)
    previous_AK = ids_T[at_AK.clamp(max=last)]
    labels_AK = ids_T[(at_AK + 1).clamp(max=last)] if best_T is None else best_T[at_AK.clamp(max=last)]
    if recipe.words is not None:
        labels_AK = recipe.words.labels(labels_AK.clamp(min=0))
    return RowPlan(key, anchors_A, previous_AK, labels_AK, valid_AK)


@dataclass(frozen=True)
class MicroBatch:
    """One forward. S supervised slots: `slots_S` indexes the flattened [A, K], `rows_S` the teacher, ascending."""

    context: Context
    anchors: Anchors
    teacher: Teacher
    slots_S: Tensor
    rows_S: Tensor
    labels_S: Tensor
    weights_S: Tensor
    keys: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return int(self.context.ids_T.numel())

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """On `device`, hidden states in the compute dtype; weights and cached log-probabilities stay as they are."""
        moved = _map(self, lambda tensor: tensor.to(device, non_blocking=True))
        taps, last = moved.context.taps_TLD, moved.context.last_hidden_TD
        context = replace(moved.context, taps_TLD=_cast(taps, dtype), last_hidden_TD=_cast(last, dtype))
        return replace(moved, context=context)


def pack(plans: Sequence[RowPlan], samples: Sequence[Sample], recipe: Recipe) -> MicroBatch:
    """Lay rows end to end. Each stays its own document: nothing in the drafter or the loss looks across (S2).

    Raises ArtifactError where a supervised slot has no distribution in the cache (S11).
    """
    lengths = [int(sample.ids_T.numel()) for sample in samples]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    context = Context(
        ids_T=torch.cat([sample.ids_T.long() for sample in samples]),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        document_T=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        taps_TLD=torch.cat([sample.taps_TLD for sample in samples]),
        last_hidden_TD=_last_hidden(plans, samples) if recipe.last_hidden else None,
    )
    anchors = Anchors(
        index_A=torch.cat([plan.anchors_A + offset for plan, offset in zip(plans, offsets, strict=False)]),
        previous_AK=torch.cat([plan.previous_AK for plan in plans]),
        valid_AK=torch.cat([plan.valid_AK for plan in plans]),
    )
    rows_AK = _teacher_rows(plans, samples, recipe.block_size)
    flat = anchors.valid_AK.flatten().nonzero().flatten()
    order = rows_AK.flatten()[flat].argsort(stable=True)
    slots_S = flat[order]
    labels_AK = torch.cat([plan.labels_AK for plan in plans])
    return MicroBatch(
        context=context,
        anchors=anchors,
        teacher=join([sample.teacher for sample in samples], recipe.vocab_size),
        slots_S=slots_S,
        rows_S=rows_AK.flatten()[slots_S],
        labels_S=labels_AK.flatten()[slots_S],
        weights_S=recipe.weights_K[slots_S % recipe.block_size],
        keys=tuple(plan.key for plan in plans),
    )


def _teacher_rows(plans: Sequence[RowPlan], samples: Sequence[Sample], block_size: int) -> Tensor:
    """Teacher row of every slot, [A, K]: slot k is taught at position a + k - 1 (S11). Invalid slots get any value."""
    found, base = [], 0
    for plan, sample in zip(plans, samples, strict=True):
        length = int(sample.ids_T.numel())
        at_AK = (plan.anchors_A[:, None] + torch.arange(block_size)).clamp(max=length - 1)
        rows_AK = rows_of(sample.teacher.positions_P, length)[at_AK]
        if bool((plan.valid_AK & (rows_AK < 0)).any()):
            missing = at_AK[plan.valid_AK & (rows_AK < 0)][0]
            raise ArtifactError(f"sample {plan.key}: the cache holds no target distribution at position {int(missing)}")
        found.append(rows_AK + base)
        base += int(sample.teacher.positions_P.numel())
    return torch.cat(found)


def _last_hidden(plans: Sequence[RowPlan], samples: Sequence[Sample]) -> Tensor:
    for plan, sample in zip(plans, samples, strict=True):
        if sample.teacher.kind != "last_hidden" or sample.teacher.positions_P.numel() != sample.ids_T.numel():
            raise ArtifactError(
                f"sample {plan.key}: this drafter reads the last hidden state at every position: "
                "build the targets with logits: last_hidden and positions: all"
            )
    return torch.cat([sample.teacher.hidden_PD for sample in samples])  # type: ignore[attr-defined]


def filler(recipe: Recipe, *, num_taps: int, hidden_size: int, kept: int | None) -> MicroBatch:
    """A micro-batch of weight zero that goes through the whole graph: it keeps ranks in step (S14).

    Two tokens, one anchor, no supervised slot; `kept` is n of a top-n cache, None where hidden states are cached.
    """
    zero = torch.zeros(2, dtype=torch.long)
    hidden_TD = torch.zeros(2, hidden_size)
    block = (1, recipe.block_size)
    none = torch.zeros(0, dtype=torch.long)
    teacher: Teacher = HiddenTeacher(hidden_TD[:0])
    if kept is not None:
        teacher = TopTeacher(
            torch.zeros(0, kept, dtype=torch.long), torch.zeros(0, kept), torch.zeros(0), recipe.vocab_size
        )
    return MicroBatch(
        context=Context(zero, torch.arange(2), zero, torch.zeros(2, num_taps, hidden_size), hidden_TD),
        anchors=Anchors(
            torch.ones(1, dtype=torch.long), torch.zeros(block, dtype=torch.long), torch.zeros(block).bool()
        ),
        teacher=teacher,
        slots_S=none,
        rows_S=none,
        labels_S=none,
        weights_S=torch.zeros(0, dtype=torch.float64),
    )


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _map(value: T, change: Any) -> T:
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[no-any-return]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _map(getattr(value, f.name), change) for f in fields(value)})
    return value
