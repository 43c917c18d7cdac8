"""Steps per second of a running OpenAI-compatible server, by load (S28).

With c requests streaming and no drafter, every engine step gives each of them one token: the step rate is the token
rate of one stream, and the batch holds c tokens. Start the server without speculation, on an otherwise idle machine.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline import stopping
from pipeline.config import Config
from pipeline.decoding.sps import table
from pipeline.errors import ConfigError
from pipeline.progress import progress

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TOKENS = 64  # generated per request; the first quarter, while streams are still starting, is not timed


def measure_server(config: Config, sizes: Sequence[int]) -> dict[str, Any]:
    """The SPS table of `profile.endpoint`. Raises ConfigError when the server does not stream completions."""
    from openai import AsyncOpenAI, OpenAIError

    settings = config.profile
    assert settings.endpoint is not None
    model = config.answers.model or config.target.model or ""
    key = os.environ.get(config.answers.api_key_env, "none")

    async def all_sizes() -> list[float]:
        client = AsyncOpenAI(base_url=settings.endpoint, api_key=key, timeout=config.answers.timeout_seconds)
        speeds = []
        with progress(len(sizes) * settings.repeats, what="sps", unit="loads") as bar:
            for size in sizes:
                rates = []
                for repeat in range(settings.repeats):
                    stopping.check()
                    rates.append(await _rate(client, model, size, settings.context_length, repeat))
                    bar.advance()
                speeds.append(statistics.median(rates))
        return speeds

    try:
        speeds = asyncio.run(all_sizes())
    except OpenAIError as error:
        raise ConfigError(f"profile.endpoint {settings.endpoint}: {type(error).__name__}: {error}") from error
    found = table(sizes, speeds, source=f"measured: server {settings.endpoint}", context_length=settings.context_length)
    return {**found, "rows": list(sizes)}


async def _rate(client: AsyncOpenAI, model: str, load: int, context_length: int, repeat: int) -> float:
    """Steps per second with `load` streams: the median over them of tokens per second after the start."""
    streams = [_stream(client, model, f"{repeat} {row} " + "on " * context_length) for row in range(load)]
    return statistics.median(await asyncio.gather(*streams))


async def _stream(client: AsyncOpenAI, model: str, prompt: str) -> float:
    times = []
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
    )
    async for part in stream:
        if part.choices and part.choices[0].text:
            times.append(time.perf_counter())
    timed = times[len(times) // 4 :]
    if len(timed) < 2:
        raise ConfigError(
            f"profile.endpoint: the server streamed {len(times)} pieces, not one for each of {TOKENS} tokens"
        )
    return (len(timed) - 1) / (timed[-1] - timed[0])
