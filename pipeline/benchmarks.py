"""Published prompt sets by name: where they lie on the hub, and how their rows become prompts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

HELDOUT = "heldout"  # the chain's own evaluation split
_REASON = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_COMPLETE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True)
class Benchmark:
    """Where a named set lives on the hub. `files` names files to read where the repository has no loadable split."""

    repository: str
    domain: str
    column: str
    subset: str | None = None
    split: str = "test"
    form: str = "{}"
    addition: str | None = None
    files: tuple[str, ...] = ()


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark("openai/gsm8k", "math", "question", subset="main", form=_REASON),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "math", "problem", form=_REASON),
    "aime25": Benchmark("math-ai/aime25", "math", "problem", form=_REASON),
    "humaneval": Benchmark("openai/openai_humaneval", "code", "prompt", form=_COMPLETE),
    "mbpp": Benchmark("google-research-datasets/mbpp", "code", "prompt", subset="sanitized"),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite", "code", "question_content",
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
    ),
    "mt-bench": Benchmark("HuggingFaceH4/mt_bench_prompts", "chat", "prompt", split="train"),
    "alpaca": Benchmark("tatsu-lab/alpaca", "chat", "instruction", split="train", addition="input"),
    "arena-hard": Benchmark(
        "lmarena-ai/arena-hard-auto", "chat", "turns", files=("data/arena-hard-v0.1/question.jsonl",)
    ),
}  # fmt: skip
