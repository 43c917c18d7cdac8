"""What a trained drafter is put through: `calibrate`, `profile`, `evaluate`, `export`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pipeline.schema.base import (
    Address,
    Count,
    Dtype,
    Fraction,
    Names,
    Natural,
    Section,
    Share,
    Temperature,
    Temperatures,
    execution,
    result,
)


class Calibrate(Section):
    temperatures: Temperatures = result((0.0, 1.0), "served temperatures, one file each")
    prompt_sets: Names | None = execution(
        None, "names or JSONL files of turns, such as the traffic you serve; null: the calibration split"
    )
    num_prompts: Count = result(64, "prompts, half of which fit and half report")
    records: str | None = result(None, ".pt shards recorded by SGLang (file name may be a glob), not decoded here")
    max_new_tokens: Count = result(256, "per prompt")
    bins: Count = result(15, "ECE bins", le=1000)
    dtype: Dtype = result("float32", "compute dtype")
    batch_size: Count = execution(16, "rows decoded together")

    def problems(self) -> Iterator[str]:
        if self.num_prompts < 2:
            yield "num_prompts: one half of the prompts is fitted on, the other reported on: at least 2"
        if self.max_new_tokens < 2:
            yield "max_new_tokens: the first token comes before any round: at least 2"
        if self.records is not None and self.prompt_sets is not None:
            yield "records and prompt_sets exclude each other: recorded rounds bring their own prompts"
        if self.records is not None and len(self.temperatures) != 1:
            yield "records were served at one temperature: name it alone in calibrate.temperatures"


class Profile(Section):
    grid: Literal["full", "powers_of_two"] = result("full", "every B up to 64, then at most 10 % apart; or 1, 2, 4 …")
    max_batch_tokens: Count = result(512, "largest forward measured, in tokens")
    context_length: Count = result(256, "tokens in the cache of each row")
    repeats: Count = result(5, "timed repetitions; the median is kept")
    dtype: Dtype = result("float32", "compute dtype")
    synthetic: Literal["constant", "sqrt", "staircase"] | None = result(None, "a named curve instead of a measurement")
    endpoint: Address | None = execution(None, "profile a running OpenAI-compatible server by load")

    def problems(self) -> Iterator[str]:
        if self.synthetic is not None and self.endpoint is not None:
            yield "synthetic and endpoint exclude each other: the table is made up, or a server's"


class Evaluate(Section):
    prompt_sets: Names = result(("heldout",), "`heldout`, names such as gsm8k, or JSONL files of turns")
    num_prompts: Count | None = result(None, "per prompt set; null takes all")
    temperatures: Temperatures = result((0.0, 1.0), "one record each")
    top_p: Share = result(1.0, "target nucleus mass; the law is the truncated one")
    top_k: Natural = result(0, "0 keeps all tokens")
    max_new_tokens: Count = result(256, "per turn")
    policy: Literal["full", "early_stop", "lagged_global", "static_length", "static_threshold"] = result(
        "full", "how many drafted tokens are verified"
    )
    policy_length: Count | None = result(None, "static_length")
    policy_threshold: Fraction | None = result(None, "static_threshold")
    batch_size: Count = result(8, "rows decoded together")
    dtype: Dtype = result("float32", "compute dtype")
    bootstrap: Count = result(1000, "resamples over requests")
    vanilla: bool = result(True, "also decode without a drafter, for speed and losslessness")
    lookup: bool = result(True, "also score prompt lookup on the same outputs")
    allow_template_mismatch: bool = result(False, "evaluate in another chat mode than the drafter was trained in")

    def problems(self) -> Iterator[str]:
        if self.max_new_tokens < 2:
            yield "max_new_tokens: the first token comes before any round: at least 2"
        if self.policy == "static_length" and self.policy_length is None:
            yield "policy static_length needs policy_length"
        if self.policy == "static_threshold" and self.policy_threshold is None:
            yield "policy static_threshold needs policy_threshold"


class Export(Section):
    layouts: tuple[Literal["deepspec", "speculators", "specforge", "dflash", "eagle3", "mtp"], ...] = result(
        ("deepspec",), "published layouts to write; none switches the stage off"
    )
    engines: tuple[Literal["vllm", "sglang", "llama.cpp", "deepspec", "speculators", "specforge"], ...] = result(
        (), "engines one of the layouts must be servable by; refused before anything is written otherwise"
    )
    dtype: Dtype = result("bfloat16", "stored dtype")
    include_target_tensors: bool = result(False, "add the target's embedding and head")
    temperature: Temperature = result(1.0, "whose STS file ships")
    max_shard_bytes: Count = result(5_000_000_000, "larger exports are split")
    license: str | None = result(None, "licence named in the model card; null: that of the target and the data")
