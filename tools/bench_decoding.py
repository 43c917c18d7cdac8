"""Speculative against plain decoding with a trained drafter: paired runs, tokens per second, where the time goes.

    python -m tools.bench_decoding -c configs/smollm2.yaml --batches 1,8 --prompts 16 --repeats 3

The drafter is the one the configuration trains. For every batch size the two decoders alternate on the same held-out
prompts; medians are printed. The engine's own overhead is everything in a round but drafting (backbone and sequential
head) and the target's forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from pipeline import chain as chain_table
from pipeline.config import load
from pipeline.corpus.prompts import choose, load_prompts
from pipeline.decoding.playing import Player
from pipeline.decoding.rounds import Clock
from pipeline.decoding.units import timing
from pipeline.identity import target_folder
from pipeline.progress import say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.overrides)
    artifacts = chain_table.resolve(config)
    player = Player.load(
        config, target_folder(config), dtype=config.evaluate.dtype, drafter=artifacts["train"].path / "draft"
    )
    prompts = choose(load_prompts("heldout", data=artifacts["data"]), arguments.prompts)
    for batch_size in (int(text) for text in arguments.batches.split(",")):
        runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for drafted in [True, False] * arguments.repeats:
            clock, started = Clock(player.target.device), time.perf_counter()
            played = player.play(
                prompts, temperature=arguments.temperature, max_new_tokens=arguments.tokens, batch_size=batch_size,
                drafted=drafted, clock=clock,
            )  # fmt: skip
            runs[drafted].append(timing(clock, played, time.perf_counter() - started))
        for drafted, timings in runs.items():
            say(f"batch {batch_size}, {'speculative' if drafted else 'plain'}: {described(timings)}")
        speeds = [
            statistics.median(t["tokens"] / t["wall_seconds"] for t in runs[drafted]) for drafted in (True, False)
        ]
        say(f"batch {batch_size}: speculative / plain = {speeds[0] / speeds[1]:.2f}")


def described(timings: list[dict[str, Any]]) -> str:
    """Median speed, and the parts of a round in milliseconds and share of the round."""
    speed = statistics.median(timing["tokens"] / timing["wall_seconds"] for timing in timings)
    middle = sorted(timings, key=lambda timing: timing["wall_seconds"])[len(timings) // 2]
    parts = {name: seconds for name, seconds in middle["seconds"].items() if name != "prefill"}
    whole, rounds = sum(parts.values()), middle["batch_rounds"]
    tau = middle["round_tokens"] / max(middle["row_rounds"], 1)
    split = ", ".join(f"{name} {seconds / rounds * 1e3:.1f} ms" for name, seconds in parts.items())
    overhead = 1 - (parts.get("draft", 0.0) + parts["verify"]) / whole
    return f"{speed:.1f} tokens/s, tau {tau:.2f}; a round: {split}; overhead {overhead:.1%}"


if __name__ == "__main__":
    main()
