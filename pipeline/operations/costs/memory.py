"""Bytes on one device: what an engine keeps of the drafter's state, and what one micro-batch or batch of rows adds.

Training keeps weights, gradients and AdamW's two moments in fp32, 4 bytes each per trained weight p; engines differ in
what of that a rank keeps whole (N ranks, b the gathered part):

| engine | weights | gradients | moments | beside |
|---|---|---|---|---|
| single, ddp | 4p | 4p (ddp: its buckets are views of them) | 8p | |
| zero1 | 4p + 4p/N (a flat copy of the rank's part) | 4p + 4p/N | 8p/N | a reduction bucket, 4 bytes x 5e8 |
| zero2 | 4p + 4p/N | 4p/N | 8p/N | the same bucket |
| zero3 | 4p/N + 4p/N | 4p/N | 8p/N | the bucket, and up to 1e9 gathered weights |
| fsdp2 | 4p/N | 4p/N | 8p/N | gathered: all but the layers, and two layers with one's gradients |

In bf16, autocast keeps a 2-byte copy of every matrix from forward to backward.
"""

from __future__ import annotations

from pipeline.config import Config
from pipeline.decoding.portions import GROWTH, PREFILL
from pipeline.draft.config import DraftConfig
from pipeline.operations.costs.sizes import DraftSize, cache_row_bytes, target_parameters
from pipeline.operations.costs.work import WIDTH, Decoding, Training
from pipeline.shards.layout import Spec
from pipeline.shards.plan import Shape
from pipeline.speculative.losses import chunk_slots

Parts = dict[str, float]  # what -> bytes
_BUCKET = 4 * 5e8  # DeepSpeed's reduce_bucket_size, in fp32
_LIVE = 1e9  # DeepSpeed's stage3_max_live_parameters


def state_bytes(engine: str, size: DraftSize, layers: int, ranks: int) -> Parts:
    """Weights, gradients and moments of one rank, by the table above."""
    whole, part = 4.0 * size.total, 4.0 * size.total / ranks
    if engine == "zero1":
        return {"weights": whole + part, "gradients": whole + part, "moments": 2 * part, "buckets": _BUCKET}
    if engine == "zero2":
        return {"weights": whole + part, "gradients": part, "moments": 2 * part, "buckets": _BUCKET}
    if engine == "zero3":
        gathered = 4 * min(size.total, _LIVE)
        return {"weights": 2 * part, "gradients": part, "moments": 2 * part, "gathered": gathered, "buckets": _BUCKET}
    if engine == "fsdp2":
        in_layers = size.block + size.small
        gathered = 4.0 * (size.total - in_layers + 3 * in_layers / max(layers, 1))
        return {"weights": part, "gradients": part, "moments": 2 * part, "gathered": gathered}
    return {"weights": whole, "gradients": whole, "moments": 2 * whole}


def frozen_bytes(shape: Shape, draft: DraftConfig, precision: str) -> float:
    """The target's embedding and head, and the head's rows of a draft vocabulary."""
    rows = (1 if shape.tied else 2) * shape.vocab_size + (draft.draft_vocab_size or 0)
    return float(WIDTH[precision] * rows * shape.hidden_size)


def layer_activation_bytes(draft: DraftConfig, precision: str) -> float:
    """What one layer keeps of one slot for the backward pass.

    With e bytes per number of the compute dtype: each of two norms keeps the widened input and its scaled self in fp32
    and hands on a result, 2 (8 + e) D; queries and own keys pass a per-head norm that does the same, 8 (H + G) d, are
    rotated (two products, e each, for each half kept) and laid out for attention with the values, e (4 H + 6 G) d; its
    output, e H d; the MLP keeps gate, up, activation and their product, 4 e F.
    """
    e = WIDTH[precision]
    queries, keys = draft.heads * draft.head_dim, draft.kv_heads * draft.head_dim
    norms = 2 * (8 + e) * draft.hidden_size
    attention = 8 * (queries + keys) + e * (5 * queries + 6 * keys)
    return float(norms + attention + 4 * e * draft.intermediate_size)


def activation_bytes(draft: DraftConfig, precision: str, work: Training, share: float, *, recompute: bool) -> float:
    """One micro-batch that holds `share` of a step's rows.

    Every slot fed: each layer's part (with recomputation the layer's input alone, and one layer's part at a time).
    Every context position: features with their norm, 8 D + 2 e D, and per layer keys (with a per-head norm) and values.
    Every slot: the final norm and Markov vector, and the loss's copies of both with their gradients.
    """
    e, width = WIDTH[precision], draft.hidden_size
    layer = layer_activation_bytes(draft, precision)
    layers = draft.block_size if draft.kind in ("eagle3", "mtp") else draft.layers
    per_fed = layer + layers * e * width if recompute else layers * layer
    steps = draft.block_size if draft.kind in ("eagle3", "mtp") else 1
    fed = work.anchors * (draft.block_inputs if draft.kind in ("dspark", "dflash") else draft.block_size) / steps
    keys = draft.kv_heads * draft.head_dim
    per_context = (8 + 2 * e) * width + draft.layers * (8 + 5 * e) * keys
    per_slot = (8 + 4 * e) * width + 4 * e * draft.markov_rank
    return share * (fed * per_fed + work.context * per_context + work.slots * per_slot)


def loss_bytes(shape: Shape, draft: DraftConfig, precision: str, chunk: int, logits: str) -> float:
    """Work buffers of the chunked loss: logits, probabilities (and a narrow copy) of one chunk; W2's fp32 gradient.

    Independent of the number of anchors. Where the target's logits are recomputed, a chunk of those as well.
    """
    slots = chunk_slots(chunk, draft.vocab_size)
    narrow = WIDTH[precision] if precision == "bfloat16" else 0
    bytes_ = slots * draft.vocab_size * (8.0 + narrow) + 4.0 * draft.vocab_size * draft.markov_rank
    return bytes_ + (slots * (shape.vocab_size + draft.vocab_size) * 4.0 if logits == "last_hidden" else 0.0)


def batch_bytes(spec: Spec, precision: str, work: Training, share: float) -> float:
    """Taps and the kept distributions of one micro-batch, decoded: ids int64 and log-probabilities fp32."""
    per_position = 12.0 * min(spec.topk, spec.vocab_size)
    if spec.logits == "last_hidden":
        per_position = WIDTH[spec.dtype] * spec.hidden_size
    taps = work.context * spec.num_taps * spec.hidden_size * WIDTH[precision]
    return share * (taps + work.positions * per_position)


def micro_batch_share(config: Config, work: Training, ranks: int) -> float:
    """The part of a step's rows that one forward of one rank holds."""
    forwards = max(1.0, work.context / (config.train.micro_batch_tokens * ranks))
    return 1.0 / (ranks * -(-forwards // 1)) if ranks > 1 else 1.0 / -(-forwards // 1)


def training_memory(
    config: Config, shape: Shape, draft: DraftConfig, spec: Spec, work: Training, *, engine: str, ranks: int
) -> Parts:
    """The train stage on one rank; with `targets: live` (or rolling, on rank 0) the target runs beside it."""
    train, size = config.train, DraftSize.of(draft)
    share = micro_batch_share(config, work, ranks)
    parts = state_bytes(engine, size, draft.layers, ranks)
    if train.precision == "bfloat16":
        parts["autocast copies"] = 2.0 * (size.total - size.small)
    parts["frozen embedding and head"] = frozen_bytes(shape, draft, train.precision)
    parts["activations"] = activation_bytes(
        draft, train.precision, work, share, recompute=train.activation_checkpointing
    )
    parts["loss"] = loss_bytes(shape, draft, train.precision, train.loss_chunk, spec.logits)
    parts["micro-batches"] = 2 * batch_bytes(spec, train.precision, work, share)
    if config.targets.mode in ("live", "rolling"):
        parts["target"] = float(WIDTH[config.targets.dtype] * target_parameters(shape))
        parts["target activations"] = forward_bytes(shape, config.targets.dtype, config.targets.batch_tokens)
    return parts


def forward_bytes(shape: Shape, dtype: str, tokens: int) -> float:
    """One inference forward: residual stream, its norm and attention's tensors, or the MLP's three; one layer at a
    time."""
    e = WIDTH[dtype]
    heads = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    active = shape.experts_per_token * shape.expert_size if shape.experts else shape.intermediate_size
    return float(tokens * e * (4 * shape.hidden_size + max(heads, 3 * active)))


def targets_memory(config: Config, shape: Shape, spec: Spec, *, ranks: int = 1) -> Parts:
    """The targets stage: weights (split under tensor parallelism), one forward, kept taps, a chunk of logits."""
    settings, tokens = config.targets, config.targets.batch_tokens
    split = ranks if config.target.tensor_parallel else 1
    return {
        "target": WIDTH[settings.dtype] * target_parameters(shape) / split,
        "activations": forward_bytes(shape, settings.dtype, tokens),
        "taps": float(tokens * spec.hidden_size * spec.num_taps * (2 * WIDTH[settings.dtype] + 8)),
        "logits": 0.0 if spec.logits == "last_hidden" else 3 * 4.0 * logit_rows(spec, on_cpu=False) * spec.vocab_size,
    }


def logit_rows(spec: Spec, *, on_cpu: bool) -> int:
    """Positions whose logits exist at a time while they are encoded (`pipeline.shards.teacher.encode_logits`)."""
    return max(1, (1 << 24 if on_cpu else 1 << 28) // spec.vocab_size)


def decoding_memory(config: Config, shape: Shape, draft: DraftConfig, work: Decoding, *, ranks: int = 1) -> Parts:
    """A decoding stage: weights, the cache at its longest, one prefill or round, logits of every position of a round.

    The cache holds `rows` slots of the longest prompt and answer, in steps of 128 positions. Logits are fp32; drawing
    from them takes three more arrays of their size (probabilities, their sums, the residual law), each round's
    draft laws included.
    """
    e = WIDTH[work.dtype]
    split = ranks if config.target.tensor_parallel else 1
    room = -(-work.longest // GROWTH) * GROWTH
    parts = {
        "target": e * target_parameters(shape) / split,
        "cache": work.rows * room * cache_row_bytes(shape, e) / split,
        "activations": forward_bytes(shape, work.dtype, max(PREFILL, work.rows * work.step_tokens)),
        "logits": 4 * 4.0 * work.rows * work.step_tokens * shape.vocab_size,
    }
    if work.drafted:
        size = DraftSize.of(draft)
        own = draft.layers * 2 * draft.kv_heads * draft.head_dim * work.rows * work.longest
        parts["drafter"] = float(e * (size.total + own + (draft.draft_vocab_size or 0) * draft.hidden_size))
    return parts
