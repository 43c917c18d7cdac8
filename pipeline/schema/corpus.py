"""From the frozen target and a corpus to token ids: `target`, `template`, `data`, `answers`, `tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pipeline.schema.base import (
    Address,
    Count,
    Dtype,
    Fraction,
    Natural,
    Positive,
    Section,
    Share,
    Temperature,
    execution,
    result,
)

# A tokenizer begins with the 256 bytes and 3 special tokens; 8 rows of the embedding stay spare.
_LEAST_VOCABULARY = 267


class TinyTarget(Section):
    """A small Qwen3-architecture target made on the spot, for tests and first experiments."""

    layers: Count = result(4, "decoder layers")
    hidden_size: Count = result(64, "model width: 4 heads of an even one", multiple_of=8)
    vocabulary: Count = result(512, "BPE vocabulary, special tokens included", ge=_LEAST_VOCABULARY)
    train_steps: Natural = result(60, "language-model steps on the demo corpus; 0 keeps random weights")


class Target(Section):
    model: str | None = result(None, "hub id or local folder of the frozen target")
    revision: str | None = result(None, "hub revision (branch, tag or commit)")
    tiny: TinyTarget | None = result(None, "make a tiny target instead of loading one")
    trust_remote_code: bool = execution(False, "run code shipped with the model")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = execution("auto", "attention implementation")
    device_map: str | None = execution(None, "accelerate placement for targets larger than one device, e.g. auto")
    tensor_parallel: bool = execution(False, "use the model's own tensor-parallel plan over the ranks")

    def problems(self) -> Iterator[str]:
        if (self.model is None) == (self.tiny is None):
            yield "set exactly one of target.model and target.tiny"
        if self.device_map is not None and self.tensor_parallel:
            yield "device_map and tensor_parallel exclude each other: both say where the layers lie"


class Template(Section):
    """How chats are rendered. Carried from tokens to targets, checkpoint and evaluation; a mismatch stops there."""

    thinking: bool | None = result(None, "enable_thinking of the chat template; null leaves the template's default")
    system_prompt: str | None = result(None, "put before conversations that have no system turn")
    chat_template: str | None = result(None, "path of a Jinja file that replaces the tokenizer's template")


class Source(Section):
    """One corpus: a hub id, local files (glob), or a generated demo set."""

    path: str | None = execution(None, "hub id, or local file/glob: parquet, arrow, json, jsonl, jsonl.gz")
    demo: Literal["gsm_symbolic", "codeio", "chatterbot"] | None = result(None, "generated or packaged demo rows")
    name: str | None = result(None, "source name in reports; default: the row's own source, the demo or the file name")
    revision: str | None = result(None, "hub revision")
    subset: str | None = result(None, "hub configuration name")
    split: str = result("train", "hub split")
    weight: Positive = result(1.0, "share of rows kept (<= 1), by hash of the row id")
    limit: Count | None = result(None, "stop after this many rows")

    def problems(self) -> Iterator[str]:
        if (self.path is None) == (self.demo is None):
            yield "set exactly one of path and demo"
        if self.weight > 1.0:
            yield f"weight is a share in (0, 1], found {self.weight}"
        if self.demo == "gsm_symbolic" and self.limit is None:
            yield f"demo {self.demo} is generated without end: set its limit"


class NearDuplicates(Section):
    threshold: Share = result(0.8, "estimated Jaccard similarity above which the larger id is removed")
    permutations: Count = result(128, "MinHash permutations")
    ngram: Count = result(5, "words per shingle")


class Decontaminate(Section):
    prompt_sets: tuple[str, ...] = result((), "prompt sets (names or JSONL files) that must not be in the corpus")
    ngram: Count = result(13, "words per n-gram")
    exempt: tuple[str, ...] = result((), "source names left alone (held-out prompts made by the same generator)")


class Data(Section):
    sources: tuple[Source, ...] = result((), "corpora, in order", min_length=1)
    shard_rows: Count = result(1000, "conversations per shard")
    exact_duplicates: bool = result(True, "remove rows with the same content")
    near_duplicates: NearDuplicates | None = result(None, "MinHash near-duplicate removal; null is off")
    decontaminate: Decontaminate | None = result(None, "remove rows that overlap evaluation sets; null is off")
    calibration_fraction: Fraction = result(0.02, "share of rows held out for calibration, by hash of the id")
    evaluation_fraction: Fraction = result(0.02, "share of rows held out for evaluation, by hash of the id")
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = result({}, "extra role names to accept")
    max_skip_fraction: Fraction = execution(0.05, "the stage does not finish with a larger share of rows skipped")
    workers: Natural = execution(0, "processes; 0 works in this one")

    def problems(self) -> Iterator[str]:
        if self.calibration_fraction + self.evaluation_fraction >= 1.0:
            yield "calibration_fraction + evaluation_fraction leave nothing to train on"


class Answers(Section):
    enabled: bool = result(True, "answer the prompts with the target; off trains on the corpus's own answers")
    backend: Literal["local", "openai"] = result("local", "in-process generation or an OpenAI-compatible server")
    model: str | None = result(None, "model name sent to the server; default target.model")
    dtype: Dtype = result("bfloat16", "compute dtype of in-process generation")
    temperature: Temperature = result(0.7, "sampling temperature; 0 is greedy")
    top_p: Share = result(1.0, "nucleus mass")
    top_k: Natural = result(0, "0 keeps all tokens")
    max_new_tokens: Count = result(2048, "answer length cap")
    cut_answers: Literal["keep", "drop"] = result("keep", "cut answers stay without a supervised end-of-turn, or go")
    max_skip_fraction: Fraction = execution(0.05, "the stage does not finish with a larger share of rows skipped")
    batch_size: Count = result(64, "rows decoded together (in process); part of the numerics in bfloat16")
    endpoints: tuple[Address, ...] = execution((), "base URLs of OpenAI-compatible servers")
    api_key_env: str = execution("OPENAI_API_KEY", "environment variable that holds the key")
    concurrency: Count = execution(64, "requests in flight per endpoint")
    timeout_seconds: Positive = execution(600.0, "per request")
    retries: Natural = execution(5, "per request, with exponential back-off")

    def problems(self) -> Iterator[str]:
        if self.enabled and self.backend == "openai" and not self.endpoints:
            yield "answers.backend openai needs answers.endpoints"


class Tokens(Section):
    max_length: Count = result(4096, "rows are cut to this many tokens")
    multi_turn: Literal["expand", "last"] = result("expand", "one row per assistant turn, or the final turn only")
    supervise_end_of_turn: bool = result(True, "train on the token that ends an answer (never for cut answers)")
    min_loss_tokens: Count = result(2, "rows with fewer supervised tokens are skipped")
    max_skip_fraction: Fraction = execution(0.05, "the stage does not finish with a larger share of rows skipped")
    workers: Natural = execution(0, "processes; 0 works in this one")

    def problems(self) -> Iterator[str]:
        if self.min_loss_tokens >= self.max_length:
            yield f"min_loss_tokens: no row of {self.max_length} tokens (max_length) supervises {self.min_loss_tokens}"
