"""How much every stage computes: FLOPs, and bytes a device must move where that is what takes the time.

A multiply-add is two FLOPs. A weight matrix read for n positions costs 2 n per weight; its two gradients as much again
each, so a training step costs 6 n per weight. Frozen matrices have no weight gradient: 4 n.

    P prompt tokens, G generated tokens, N weights a token passes through, n context, b rows decoded together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.decoding.portions import CHUNK, PREFILL, ROW_TOKENS, WARM_UP, grid, rows_of
from pipeline.draft.config import DraftConfig
from pipeline.operations.costs.corpus import Corpus
from pipeline.operations.costs.sizes import (
    DraftSize,
    cache_row_bytes,
    decoder_parameters,
    slot_parameters,
    target_parameters,
)
from pipeline.shards.plan import Shape

WIDTH = {"float32": 4, "bfloat16": 2}
ASSUMED_TAU = 2.0  # accepted length, until a drafter is there to be measured
TAU_RANGE = (1.5, 4.0)  # what it may be: small drafters after minutes of training, and good ones
SLOWEST = 1.25  # rounds of a group's slowest row over the mean: 1.21 and 1.26 in groups of 8, 1.24 in 32 (SmolLM2)
ASSUMED_PROMPTS = 200  # of a named prompt set when evaluate.num_prompts takes all


@dataclass(frozen=True)
class Decoding:
    """Prompts answered by the continuous batch: what `pipeline.decoding.engine.decode` does for them.

    `prefill_tokens` are those of all prompts, padded as their forwards pad them; `rounds` are forwards of the batch,
    `row_rounds` rows in them together, `step_tokens` tokens a row brings to each (1 alone, 1 + K with a drafter),
    `rows` the batch while it is full, `context` mean positions a row looks back at, `longest` positions the cache must
    have room for, `units` parts that devices can share.
    """

    dtype: str
    temperature: float
    drafted: bool
    prompts: int
    prompt_tokens: float
    prefill_tokens: int
    rounds: float
    row_rounds: float
    step_tokens: int
    rows: int
    context: float
    longest: int
    units: int


@dataclass(frozen=True)
class Training:
    """Optimizer steps, and what an average one reads: rows, context positions, supervised slots, kept distributions."""

    steps: int
    rows: float
    context: float
    anchors: float
    slots: float
    positions: float
    validated_rows: int


def decodings(config: Config, corpus: Corpus, block_size: int, tau: float) -> dict[str, list[Decoding]]:
    """What answers, calibrate and evaluate decode."""
    calibrate, evaluate = config.calibrate, config.evaluate
    answer = min(corpus.answer_tokens, config.answers.max_new_tokens)
    found: dict[str, list[Decoding]] = {"answers": [], "calibrate": [], "evaluate": []}
    if config.answers.enabled and config.answers.backend == "local":
        made = config.answers
        found["answers"] = [
            _decoding(
                corpus, [corpus.turns], answer, dtype=made.dtype, temperature=made.temperature, rows=made.batch_size,
                limit=made.max_new_tokens,
            )
        ]  # fmt: skip
    if config.draft.confidence and calibrate.records is None:
        limit = calibrate.max_new_tokens
        units = corpus.asked.get("calibrate") or _chunks([calibrate.num_prompts])
        found["calibrate"] = [
            _decoding(
                corpus, units, min(corpus.answer_tokens, limit), dtype=calibrate.dtype, temperature=temperature,
                rows=calibrate.batch_size, limit=limit, block=block_size, tau=tau,
            )
            for temperature in calibrate.temperatures
        ]  # fmt: skip
    limit = evaluate.max_new_tokens + (block_size + 1 if evaluate.lookup else 0)
    units = corpus.asked.get("evaluate") or _chunks(
        [evaluate.num_prompts or ASSUMED_PROMPTS] * len(evaluate.prompt_sets)
    )
    for drafted in (True, False) if evaluate.vanilla else (True,):
        found["evaluate"] += [
            _decoding(
                corpus, units, min(corpus.answer_tokens, limit), dtype=evaluate.dtype, temperature=temperature,
                rows=evaluate.batch_size, limit=limit, block=block_size if drafted else 0, tau=tau if drafted else 1.0,
            )
            for temperature in evaluate.temperatures
        ]  # fmt: skip
    return found


def _chunks(sizes: list[int]) -> list[list[int]]:
    """Prompt sets are cut into units of `CHUNK` prompts that decode on their own; of one turn, if nothing is known."""
    return [[min(CHUNK, size - start)] for size in sizes for start in range(0, size, CHUNK)]


def _decoding(
    corpus: Corpus, units: Sequence[Sequence[int]], answer: float, *, dtype: str, temperature: float, rows: int,
    limit: int, block: int = 0, tau: float = 1.0,
) -> Decoding:  # fmt: skip
    """Groups of prompts (a unit's turns), each decoded to its end before the next starts.

    A group of g answers of a tokens at tau tokens a round takes g a / tau row-rounds. While prompts wait, a round
    serves b rows; then the batch empties, and the group ends with its slowest row. That row takes l tokens (the limit,
    or twice the mean) instead of a: nothing is lost where all answers are cut at the limit, half the limit where
    lengths are spread evenly. With a drafter the slowest row accepts less than the mean, too (`SLOWEST`). So a group
    larger than the batch takes g a / (b tau) + (l - a) / tau rounds, a smaller one l / tau.
    """
    groups = [group for unit in units for group in unit]
    slowest = min(limit, 2 * answer) * (SLOWEST if block else 1.0)
    row_rounds = [group * max(answer - 1, 0) / tau for group in groups]
    rounds = [
        max(total / rows + (slowest - answer) / tau, slowest / tau) if group > rows else slowest / tau
        for group, total in zip(groups, row_rounds, strict=True)
    ]
    return Decoding(
        dtype, temperature, drafted=bool(block), prompts=sum(groups), prompt_tokens=corpus.prompt_tokens,
        prefill_tokens=sum(_prefill_tokens(corpus.prompt_lengths, group, rows) for group in groups),
        rounds=sum(rounds), row_rounds=sum(row_rounds), step_tokens=1 + block, rows=min(rows, max(groups)),
        context=corpus.prompt_tokens + answer / 2, longest=corpus.longest_prompt + limit + block + 1,
        units=len(units),
    )  # fmt: skip


def _prefill_tokens(lengths: Sequence[int], prompts: int, rows: int) -> int:
    """Tokens of the forwards that read `prompts` prompts, their lengths spread as `lengths` (longest first) are.

    Slots are filled in groups padded to their longest prompt: all rows at first, an eighth of them whenever so many
    have ended.
    """
    waiting = [lengths[(2 * place + 1) * len(lengths) // (2 * prompts)] for place in range(prompts)]
    tokens, free = 0, rows
    while waiting:
        group = waiting[: max(1, min(free, PREFILL // waiting[0]))]
        tokens += len(group) * group[0]
        waiting, free = waiting[len(group) :], free - len(group) or max(1, rows // 8)
    return tokens


def training(config: Config, corpus: Corpus, draft: DraftConfig) -> Training:
    """The steps of the train stage.

    A row with s supervised tokens has min(num_anchors, s - 1) anchors (S7); anchor j of s - 1 leaves min(K, s - j)
    supervised slots, so slots near the end of an answer are fewer than anchors times K. Means are over `lengths`.
    """
    train, block = config.train, draft.block_size
    held = int(corpus.rows * train.validation_fraction)
    rows = max(corpus.rows - held, 1)
    batch = min(train.global_batch_size, rows)
    steps = train.steps or train.epochs * -(-rows // batch)
    usable = [(length, answer) for length, answer in corpus.lengths if answer >= 2] or [(2, 2)]
    anchors = slots = context = 0.0
    for length, answer in usable:
        taken = min(train.num_anchors, answer - 1)
        cut = sum(max(0, block - left) for left in range(1, min(block, answer)))
        anchors += taken
        slots += taken * (block - cut / (answer - 1))
        context += length
    scale = batch / len(usable)
    validations = steps // train.validate_every + (steps % train.validate_every > 0)
    return Training(
        steps, batch, context * scale, anchors * scale, slots * scale,
        positions=min(corpus.supervised / corpus.rows * batch, slots * scale),
        validated_rows=held * validations if held else 0,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ FLOPs and bytes


def training_flops(shape: Shape, draft: DraftConfig, work: Training, logits: str) -> float:
    """One optimizer step.

    6 per context weight and position, 6 per block weight and slot fed, 6 per W2 weight and slot; the frozen head
    4 D C per supervised slot (its product, and the gradient of the states), and 2 D V more per kept position where the
    target's logits are recomputed from hidden states. Attention: each fed slot meets half its row on average and its
    own block, 4 H d a pair forward, three times that in all.
    """
    size, width, out = DraftSize.of(draft), draft.hidden_size, draft.vocab_size
    fed = work.anchors * (draft.block_inputs if draft.kind in ("dspark", "dflash") else draft.block_size)
    dense = 6.0 * (size.context * work.context + slot_parameters(draft, size) * fed + size.markov_out * work.slots)
    head = 4.0 * width * out * work.slots
    if logits == "last_hidden":
        head += 2.0 * width * shape.vocab_size * work.positions
    pairs = fed * (work.context / work.rows / 2 + draft.block_size)
    return dense + head + 12.0 * draft.layers * draft.heads * draft.head_dim * pairs


def decoding_flops(shape: Shape, draft: DraftConfig, work: Decoding) -> float:
    """Prefill without the head, then every round's tokens through layers, cache and head; drafts likewise."""
    prefill = shape.forward_flops(
        tokens=round(work.prompts * work.prompt_tokens), samples=work.prompts, head_positions=work.prompts
    )
    tokens = work.row_rounds * work.step_tokens
    pairs = 4.0 * shape.layers * shape.heads * shape.head_dim * work.context
    verify = tokens * (2.0 * decoder_parameters(shape) + pairs + 2.0 * shape.hidden_size * shape.vocab_size)
    if not work.drafted:
        return prefill + verify
    size = DraftSize.of(draft)
    slot = slot_parameters(draft, size) + size.markov_out + draft.hidden_size * draft.vocab_size
    observed = size.context * (tokens + work.prompts * work.prompt_tokens)
    return prefill + verify + 2.0 * (work.row_rounds * draft.block_size * slot + observed)


def decoding_bytes(shape: Shape, draft: DraftConfig, work: Decoding) -> float:
    """Memory traffic of the rounds: all weights once per round, every running row's cache once per row-round.

    With few rows a round does so few FLOPs per byte that this is what takes the time.
    """
    width = WIDTH[work.dtype]
    weights = target_parameters(shape) + (DraftSize.of(draft).total if work.drafted else 0)
    return width * work.rounds * weights + work.row_rounds * work.context * cache_row_bytes(shape, width)


@dataclass(frozen=True)
class ProfileWork:
    """Forwards of the profile stage, and tokens in all of them."""

    forwards: int
    tokens: int
    filled_tokens: int

    @classmethod
    def of(cls, config: Config) -> ProfileWork:
        """Each size is run `repeats` times after one discarded turn and two warm-up forwards (S28)."""
        settings = config.profile
        if settings.synthetic is not None or settings.endpoint is not None:
            return cls(0, 0, 0)
        sizes = grid(settings.grid, settings.max_batch_tokens)
        turns = settings.repeats + 1 + WARM_UP
        return cls(len(sizes) * turns, sum(sizes) * turns, rows_of(sizes[-1]) * settings.context_length)


def profiled(config: Config) -> Decoding:
    """The largest forward of the profile stage, as the batch whose memory it takes; rounds are in `ProfileWork`."""
    settings = config.profile
    return Decoding(
        settings.dtype, temperature=0.0, drafted=False, prompts=0, prompt_tokens=0.0, prefill_tokens=0, rounds=0.0,
        row_rounds=0.0, step_tokens=ROW_TOKENS, rows=rows_of(settings.max_batch_tokens),
        context=settings.context_length, longest=settings.context_length + ROW_TOKENS, units=1,
    )  # fmt: skip


def profile_flops(config: Config, shape: Shape, work: ProfileWork) -> float:
    context = 4.0 * shape.layers * shape.heads * shape.head_dim * config.profile.context_length
    head = 2.0 * shape.hidden_size * shape.vocab_size
    return work.tokens * (2.0 * decoder_parameters(shape) + context + head) + 2.0 * work.filled_tokens * (
        decoder_parameters(shape)
    )


def profile_bytes(config: Config, shape: Shape, work: ProfileWork) -> float:
    width = WIDTH[config.profile.dtype]
    return float(width * work.forwards * target_parameters(shape))
