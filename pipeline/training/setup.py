"""From a configuration and a cache of targets to everything the loop needs.

Nothing here depends on ranks or devices but where tensors end up: the drafter's start, its vocabulary and the split of
the rows are the same on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.chain import StageContext
from pipeline.config import Config, Draft
from pipeline.draft.build import build_drafter
from pipeline.draft.derive import derive_config
from pipeline.draft.from_target import init_from_target_layers, last_layers, needed_tensors
from pipeline.draft.interface import Drafter
from pipeline.draft.vocabulary import Vocabulary, choose_vocabulary, count_tokens
from pipeline.errors import DataError
from pipeline.frozen import Frozen, read_named, tensor_files, text_config
from pipeline.speculative.teacher import DraftVocabulary, Head
from pipeline.speculative.weights import position_weights
from pipeline.training.loader import Rows
from pipeline.training.microbatch import Recipe
from pipeline.training.objective import FrozenTensors
from pipeline.training.rows import Split


def check_rows(split: Split, total: int) -> None:
    """Raise DataError where nothing is left to train on, saying why."""
    if split.count == 0:
        held = len(split.validation)
        raise DataError(
            f"train: 0 usable samples of {total}: {held} are held out by train.validation_fraction, "
            f"{total - held} have fewer than two supervised tokens (tokens.min_loss_tokens, tokens.max_length)"
        )


def count_supervised(rows: Rows, numbers: Iterable[int], vocab_size: int) -> Tensor:
    """How often each target id is supervised in some rows, int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for number in numbers:
        _, ids, mask = rows.tokens(int(number))
        counts += count_tokens(ids, mask, vocab_size)
    return counts


def draft_vocabulary(
    draft: Draft, rows: Rows, split: Split, tokens: Mapping[str, Any], vocab_size: int
) -> Vocabulary | None:
    """The most frequent supervised tokens of the training rows, stop tokens always in (S30); None for the whole one.

    `tokens` is the manifest of the tokens stage.
    """
    if draft.vocabulary is None:
        return None
    counts = count_supervised(rows, split.training.nonzero()[0], vocab_size)
    return choose_vocabulary(counts, size=draft.vocabulary, always=tokens["stop_ids"], usable=tokens["vocabulary"])


def make_drafter(context: StageContext, layers: tuple[int, ...], token_ids: Tensor | None) -> tuple[Drafter, list[str]]:
    """The drafter as it starts, on the CPU in fp32, and what is worth saying about that start."""
    config, where = context.config, str(context.target_path)
    target = text_config(
        where, revision=config.target.revision, trust_remote_code=config.target.trust_remote_code
    ).to_dict()
    drafter = build_drafter(
        derive_config(target, config.draft, target_layer_ids=layers), seed=config.seed, token_ids=token_ids
    )
    notes = []
    if config.draft.init == "target_layers":
        chosen = config.draft.init_layers or last_layers(target["num_hidden_layers"], config.draft.layers)
        files = tensor_files(where, revision=config.target.revision)
        names = needed_tensors(files, chosen)
        tensors = read_named(where, names, files=files, revision=config.target.revision)
        notes += init_from_target_layers(drafter, tensors, chosen, target=target)
        notes.append(f"draft layers start from the target's {', '.join(map(str, chosen))}")
    if config.train.init_from is not None:
        from pipeline.layouts.load import start_from

        notes += [
            f"{config.train.init_from}: {note}" for note in start_from(config.train.init_from, drafter, target=target)
        ]
    return drafter, notes


def frozen_tensors(frozen: Frozen, token_ids: Tensor | None) -> FrozenTensors:
    """What the forward needs of the target: the embedding scaled as the target scales it, and its head."""
    words = None
    if token_ids is not None:
        words = DraftVocabulary.of(token_ids.to(frozen.head_VD.device), frozen.vocab_size)
    head = Head(frozen.head_VD, frozen.logit_scale, frozen.logit_softcap)
    embed_VD = frozen.embed_VD if frozen.embed_scale == 1.0 else frozen.embed_VD * frozen.embed_scale
    return FrozenTensors(embed_VD, head, head.rows(words), words)


def recipe_of(config: Config, vocab_size: int, token_ids: Tensor | None, *, last_hidden: bool) -> Recipe:
    """How rows become slots."""
    train, block_size = config.train, config.draft.block_size
    return Recipe(
        block_size=block_size,
        num_anchors=train.num_anchors,
        rule=train.anchor_rule,
        seed=config.seed,
        weights_K=position_weights(block_size, train.position_decay),
        vocab_size=vocab_size,
        words=None if token_ids is None else DraftVocabulary.of(token_ids, vocab_size),
        ce_label=train.ce_label,
        last_hidden=last_hidden,
    )


def frozen_digest(frozen: Frozen) -> str:
    """A short hash of the frozen parts, from every 64th row: kept in checkpoints and compared at resume (DST-07)."""
    found = hashlib.sha256()
    for tensor in (frozen.embed_VD, frozen.head_VD, frozen.norm_D):
        found.update(f"{list(tensor.shape)}".encode())
        found.update(tensor[::64].float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
