"""What is learned from: `targets`; what learns: `draft`; and how: `train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pipeline.schema.base import (
    BelowOne,
    Count,
    Dtype,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Section,
    Whole,
    execution,
    result,
)


class Targets(Section):
    mode: Literal["cached", "live", "rolling", "streamed"] = result(
        "cached", "build a cache, run the target beside the drafter, both by turns, or read a finished cache from a URL"
    )
    layers: tuple[Whole, ...] | None = result(None, "tapped decoder layers; null spreads five over the depth")
    taps: Literal["bf16", "fp8", "int8", "int4", "int3", "int2"] = result("int8", "hidden-state codec")
    channel_rms: bool = result(False, "static per-channel RMS before int4/int3/int2")
    logits: Literal["last_hidden", "topk", "full"] = result("topk", "target-distribution codec")
    topk: Count = result(64, "log-probabilities kept per position by the topk codec")
    positions: Literal["supervised", "all"] = result("supervised", "positions whose distribution is kept")
    dtype: Dtype = result("bfloat16", "compute dtype of the target forward")
    max_skip_fraction: Fraction = execution(0.01, "the stage does not finish with a larger share of rows not finite")
    batch_tokens: Count = execution(8192, "tokens per forward, padding included")
    max_bytes: Count | None = execution(None, "rolling and streamed: the disk never holds more")
    url: str | None = execution(None, "streamed: the finished cache; http(s), hf, s3, gs, a folder, or pipe:COMMAND {}")

    def problems(self) -> Iterator[str]:
        if self.mode in ("rolling", "streamed") and self.max_bytes is None:
            yield f"targets.mode {self.mode} needs targets.max_bytes"
        if self.mode == "streamed" and self.url is None:
            yield "targets.mode streamed needs targets.url"
        if self.url is not None and self.url.startswith("pipe:") and "{}" not in self.url:
            yield "targets.url: a pipe: command needs {} in the place of the file's name"
        if self.channel_rms and self.taps not in ("int4", "int3", "int2"):
            yield f"targets.channel_rms has no effect on taps {self.taps}: it goes with int4, int3 and int2"


class Draft(Section):
    kind: Literal["dspark", "dflash", "eagle3", "mtp", "medusa"] = result("dspark", "drafter family")
    block_size: Count = result(7, "draft slots per round (K)")
    layout: Literal["next_token", "fill_in"] = result("next_token", "what a slot's input predicts")
    layers: Count = result(5, "draft decoder layers")
    markov: Literal["none", "vanilla", "gated", "rnn"] = result("vanilla", "sequential head")
    markov_rank: Natural = result(256, "rank r of the sequential head")
    confidence: bool = result(True, "confidence head")
    taps: bool = result(True, "feed the target's hidden states; off is the no-taps control")
    mask_token_id: Whole | None = result(None, "token of the empty slots; an unused row of the target's embedding")
    allow_used_mask_token: bool = result(False, "accept a mask token that looks used (pad, eos, end-of-turn)")
    vocabulary: Count | None = result(None, "draft vocabulary size; null is the target's")
    init: Literal["random", "target_layers"] = result("random", "where draft layers start")
    init_layers: tuple[Whole, ...] | None = result(
        None, "target layers copied by init target_layers; null: the last ones"
    )
    intermediate_size: Count | None = result(None, "MLP width; null is the target's")
    heads: Count | None = result(None, "attention heads; null is the target's")
    kv_heads: Count | None = result(None, "key/value heads; null is the target's")
    activation: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] | None = result(None, "null is the target's")

    def problems(self) -> Iterator[str]:
        if self.kind == "dspark" and (self.markov == "none" or self.markov_rank == 0):
            yield "kind dspark needs a Markov head (markov, markov_rank > 0); without one it is kind dflash"
        if self.kind != "dspark" and self.markov != "none":
            yield f"kind {self.kind} has no Markov head: set markov: none"
        if self.mask_token_id is not None and self.kind in ("eagle3", "mtp", "medusa"):
            yield f"kind {self.kind} has no empty slots: set mask_token_id: null"
        if self.layout == "fill_in" and self.kind != "dflash":
            yield "layout fill_in belongs to kind dflash"
        if self.kind in ("eagle3", "mtp") and self.layers != 1:
            yield f"kind {self.kind} has one layer, found {self.layers}: set layers: 1"
        if not self.taps and self.kind == "eagle3":
            yield "kind eagle3 starts from taps: set taps: true"
        if not self.taps and self.kind in ("mtp", "medusa"):
            yield f"kind {self.kind} reads the last hidden state, never taps: taps: false would change nothing"


class Train(Section):
    steps: Count | None = result(None, "optimizer steps; overrides epochs")
    epochs: Count = result(10, "passes over the training rows, when steps is not set")
    global_batch_size: Count = result(512, "conversations per optimizer step")
    learning_rate: Positive = result(6e-4, "peak")
    min_learning_rate: NonNegative = result(0.0, "at the last step")
    warmup_fraction: Fraction = result(0.04, "share of the steps")
    weight_decay: NonNegative = result(0.0, "AdamW")
    betas: tuple[BelowOne, BelowOne] = result((0.9, 0.95), "AdamW")
    max_grad_norm: Positive = result(1.0, "global norm")
    num_anchors: Count = result(512, "anchors per conversation and epoch")
    anchor_rule: Literal["generated", "label"] = result("generated", "anchor and label supervised, or label only")
    ce_weight: NonNegative = result(0.1, "cross-entropy")
    tv_weight: NonNegative = result(0.9, "total-variation term")
    confidence_weight: NonNegative = result(1.0, "confidence term")
    divergence: Literal["tv", "kl"] = result("tv", "what tv_weight multiplies")
    ce_label: Literal["data", "argmax"] = result("data", "data token or the target's argmax")
    position_decay: Positive | Literal["block_size"] | None = result(4.0, "w_k = exp(-(k-1)/decay); null is uniform")
    detach_confidence: bool = result(False, "keep the confidence loss out of backbone and Markov head")
    recentre_confidence: bool = result(True, "fit the confidence head's bias on the held-out rows after the last step")
    precision: Dtype = result("float32", "compute dtype; weights and moments stay float32")
    validation_fraction: BelowOne = result(0.02, "share of training rows held out for the training curves")
    init_from: str | None = result(None, "weights of a published or own checkpoint to start from")
    continue_from: str | None = result(None, "fingerprint or path of a finished run to extend")
    published: str | None = result(None, "take this published or own checkpoint as it is; nothing is trained")
    validate_every: Count = execution(500, "steps")
    save_every: Count = execution(500, "steps")
    keep_checkpoints: Count = execution(2, "older ones are removed")
    micro_batch_tokens: Count = execution(8192, "context tokens per forward and rank")
    loss_chunk: Count = execution(512, "slots whose logits exist at a time")
    attention: Literal["auto", "flex", "sdpa", "eager"] = execution("auto", "attention over anchors")
    compile: bool = execution(False, "torch.compile the draft backbone")
    activation_checkpointing: bool = execution(False, "recompute draft layers in the backward pass")
    engine: Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"] | None = execution(
        None, "null takes what the launcher was configured with"
    )
    sharded_checkpoints: bool = execution(False, "save with torch.distributed.checkpoint instead of gathering")
    workers: Natural = execution(1, "reader threads per rank; 0 reads between the steps")

    def problems(self) -> Iterator[str]:
        if self.ce_weight == 0 and self.tv_weight == 0:
            yield "ce_weight and tv_weight are both 0: nothing would be learned"
        if self.min_learning_rate > self.learning_rate:
            yield f"min_learning_rate: {self.min_learning_rate:g} is above learning_rate, the peak"
        if self.published is not None and (self.init_from is not None or self.continue_from is not None):
            yield "published trains nothing: init_from and continue_from have no effect beside it"
        if self.sharded_checkpoints and self.engine in ("zero1", "zero2", "zero3"):
            yield f"sharded_checkpoints: {self.engine} checkpoints are gathered; use ddp or fsdp2, or leave it false"
