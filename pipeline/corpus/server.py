"""Answers from OpenAI-compatible servers: many requests in flight, several endpoints, nothing lost by a kill.

    ServerAnswers(config).run(names, source_folder, artifact, bar)

Every answer goes into its shard's journal the moment it arrives; a shard is published when its last row is answered.
The same command after a kill asks only for what is in no journal. Needs the `openai` client, neither torch nor
transformers.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.corpus.dialogue import SERVER_ERROR, Dialogue, seed_of, shard_facts
from pipeline.corpus.journal import Journal
from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import Message, read_rows
from pipeline.corpus.wire import incoming, outgoing
from pipeline.errors import ConfigError, DataError
from pipeline.progress import Bar, say

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 60.0
_AGAIN = (408, 409, 425, 429)  # besides 5xx: the request may succeed later
_WRONG_ADDRESS = (401, 403, 404)  # no row is to blame
_LOST_ROWS = 8  # rows in a row that no endpoint would answer: the servers are gone


@dataclass
class _Endpoint:
    """One server. `busy` requests are in flight; `failures` counts errors since its last answer; `strange`: it answers
    under another model name than the one asked for; `rests_until` is when a busy server wants to be asked again."""

    url: str
    client: AsyncOpenAI
    busy: int = 0
    failures: int = 0
    strange: bool = False
    rests_until: float = 0.0


@dataclass
class _OpenShard:
    """A shard some of whose rows are being answered."""

    name: str
    dialogues: list[Dialogue]
    journal: Journal
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.dialogues)


class ServerAnswers:
    """Asks the configured endpoints. Raises ConfigError for a wrong address or key, DataError when all are silent."""

    def __init__(self, config: Config) -> None:
        self.config, self.settings = config, config.answers
        self.model = config.answers.model or config.target.model
        self.tokens, self.lost, self.started = 0, 0, time.monotonic()
        if self.model is None:
            raise ConfigError("answers.model: name the model as the server knows it")
        if config.template.chat_template is not None:
            say(
                "template.chat_template is not sent with requests: the server must have been started with the same "
                "file (`dspark doctor` compares them)",
                warning=True,
            )

    def run(self, names: Sequence[str], source: Path, artifact: Artifact, bar: Bar) -> None:
        """Answer and publish the named shards of `source`. Raises Stopped when asked to stop."""
        asyncio.run(self._run(names, source, artifact, bar))

    async def _run(self, names: Sequence[str], source: Path, artifact: Artifact, bar: Bar) -> None:
        from openai import AsyncOpenAI

        key = os.environ.get(self.settings.api_key_env) or "none"
        options: dict[str, Any] = {"api_key": key, "max_retries": 0, "timeout": self.settings.timeout_seconds}
        self.endpoints = [_Endpoint(url, AsyncOpenAI(base_url=url, **options)) for url in self.settings.endpoints]
        work = self._work(names, source, artifact)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.settings.concurrency * len(self.endpoints)):
                    group.create_task(self._worker(work, artifact, bar))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for endpoint in self.endpoints:
                await endpoint.client.close()

    def _work(self, names: Sequence[str], source: Path, artifact: Artifact) -> Iterator[tuple[_OpenShard, Dialogue]]:
        """Rows in order, shard after shard: a shard is read when a worker gets to it, so few are in memory."""
        for name in names:
            dialogues = [Dialogue(row, self.settings.cut_answers) for row in read_rows(source / name)]
            shard = _OpenShard(name, dialogues, Journal(artifact.path / "journal" / name).__enter__())
            for dialogue in dialogues:
                yield shard, dialogue
            if not dialogues:
                self._publish(shard, artifact)

    async def _worker(self, work: Iterator[tuple[_OpenShard, Dialogue]], artifact: Artifact, bar: Bar) -> None:
        for shard, dialogue in work:
            while (messages := dialogue.question()) is not None:
                stopping.check()
                await self._answer(shard, dialogue, messages, bar)
            shard.left -= 1
            if shard.left == 0:
                self._publish(shard, artifact)

    @staticmethod
    def _publish(shard: _OpenShard, artifact: Artifact) -> None:
        answered, facts = shard_facts(shard.dialogues)
        with artifact.shard(shard.name) as published:
            with published.path.open("wb") as file:
                file.writelines(row.line() for row in answered)
            published.row.update(facts, rows=len(shard.dialogues))
        if SERVER_ERROR in facts["skipped"]:
            shard.journal.close()  # the rows may be asked again; those that were answered are not
        else:
            shard.journal.remove()

    # ------------------------------------------------------------------------------------------ one answer

    async def _answer(self, shard: _OpenShard, dialogue: Dialogue, messages: list[Message], bar: Bar) -> None:
        row_id, turn = dialogue.original.id, dialogue.turn
        known = shard.journal.get(row_id, turn)
        if known is not None:
            dialogue.answer(*known)
            bar.advance()
            return
        try:
            message, reason, tokens = await self._ask(dialogue, messages)
        except Skip as skip:
            dialogue.fail(skip)
            bar.advance()
            return
        shard.journal.add(row_id, turn, message, reason)
        dialogue.answer(message, reason)
        self.tokens += tokens
        bar.advance(tokens_per_second=round(self.tokens / (time.monotonic() - self.started)))

    async def _ask(self, dialogue: Dialogue, messages: list[Message]) -> tuple[Message, str, int]:
        """One answer: message, finish reason, tokens. Tries other endpoints and waits longer after each failure.

        Raises Skip when the server refuses the row or no endpoint answers it, DataError when rows get no answer at all.
        """
        from openai import APIConnectionError, APIError, APIStatusError

        request = self._request(dialogue, messages)
        problem = ""
        for attempt in range(self.settings.retries + 1):
            endpoint = await self._next_endpoint(attempt)
            endpoint.busy += 1
            try:
                async with asyncio.timeout(self.settings.timeout_seconds):  # the client's starts anew with every byte
                    response = await endpoint.client.chat.completions.create(**request)
                answer = incoming(response)
                self._check_model(endpoint, response.model)
                endpoint.failures = self.lost = 0
                return answer
            except Skip:
                endpoint.failures = self.lost = 0
                raise
            except APIStatusError as error:
                problem = f"{endpoint.url}: HTTP {error.status_code}: {error.message[:200]}"
                if error.status_code in _WRONG_ADDRESS:
                    raise ConfigError(f"answers.endpoints: {problem}") from error
                if error.status_code < 500 and error.status_code not in _AGAIN:
                    raise Skip(f"refused_{error.status_code}", problem) from error
                endpoint.failures += 1
                endpoint.rests_until = time.monotonic() + _retry_after(error.response.headers.get("retry-after"))
            except (APIConnectionError, TimeoutError) as error:
                problem = f"{endpoint.url}: {str(error) or 'no answer in time'}"
                endpoint.failures += 1
            except (APIError, ValueError) as error:  # an empty body, a proxy's page: no reply of this protocol
                problem = f"{endpoint.url}: not a chat completion: {error}"
                endpoint.failures += 1
            finally:
                endpoint.busy -= 1
        self.lost += 1
        if self.lost >= _LOST_ROWS:
            raise DataError(
                f"answers: {self.lost} rows one after the other got no answer from {len(self.endpoints)} endpoint(s), "
                f"last: {problem}. What was answered is kept: the same command goes on when the servers are back"
            )
        raise Skip(SERVER_ERROR, problem)

    def _check_model(self, endpoint: _Endpoint, served: object) -> None:
        """Say once when a server answers under another name than the one asked for: whose answers are these?"""
        if served != self.model and not endpoint.strange:
            endpoint.strange = True
            say(f"{endpoint.url} answers as model {served!r}, asked was {self.model!r}", warning=True)

    async def _next_endpoint(self, attempt: int) -> _Endpoint:
        """The endpoint to ask, after a wait: longer with each attempt, and until it has rested as long as it asked."""
        wait = self._least_busy().rests_until - time.monotonic()
        if attempt:
            longest = min(_FIRST_DELAY_SECONDS * 2 ** (attempt - 1), _LONGEST_DELAY_SECONDS)
            wait = max(wait, longest * random.uniform(0.5, 1.0))
        if wait > 0:
            await asyncio.sleep(wait)
            stopping.check()
        return self._least_busy()

    def _least_busy(self) -> _Endpoint:
        limit, now = self.settings.concurrency, time.monotonic()
        return min(self.endpoints, key=lambda one: (one.busy >= limit, one.rests_until > now, one.failures, one.busy))

    def _request(self, dialogue: Dialogue, messages: list[Message]) -> dict[str, Any]:
        """Keyword arguments of the request; `extra_body` keys land at the top level of the JSON body."""
        settings, template = self.settings, self.config.template
        if template.system_prompt is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": template.system_prompt}, *messages]
        extra: dict[str, Any] = {}
        if template.thinking is not None:
            extra["chat_template_kwargs"] = {"enable_thinking": template.thinking}
        if settings.top_k:
            extra["top_k"] = settings.top_k
        request = {
            "model": self.model,
            "messages": outgoing(messages),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": seed_of(self.config.seed, dialogue.original.id, dialogue.turn) >> 32,
            "extra_body": extra,
        }
        return {**request, "tools": dialogue.original.tools} if dialogue.original.tools else request


def _retry_after(header: str | None) -> float:
    """Seconds that a busy server asks to be left alone, within bounds; 0 where it names none."""
    return min(float(header), _LONGEST_DELAY_SECONDS) if header is not None and header.strip().isdecimal() else 0.0
