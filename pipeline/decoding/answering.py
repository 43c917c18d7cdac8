"""Answers in process: the target plays every conversation of a shard, all rows of a turn in one continuous batch.

    LocalAnswers(config, target_path).run(names, source_folder, artifact, bar)

Sampling is seeded by (seed, row id, turn), and a shard's batches are formed from its rows alone, so a shard comes out
the same whoever makes it and whenever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from pipeline import stopping
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.corpus.dialogue import Dialogue, seed_of, shard_facts
from pipeline.corpus.normalise import Skip
from pipeline.corpus.rows import read_rows
from pipeline.corpus.template import ChatTemplate
from pipeline.decoding.engine import Generation, decode
from pipeline.progress import Bar
from pipeline.target import Target


class LocalAnswers:
    """The loaded target with its template and the sampling settings."""

    def __init__(self, config: Config, path: str) -> None:
        target = config.target
        self.config = config
        self.template = ChatTemplate(
            path, config.template, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
        self.target = Target.load(
            path, dtype=getattr(torch, config.answers.dtype), device=_device(), attention=target.attention,
            revision=target.revision, trust_remote_code=target.trust_remote_code, device_map=target.device_map,
            tensor_parallel=target.tensor_parallel,
        )  # fmt: skip
        self.longest = int(getattr(self.target.config, "max_position_embeddings", 0) or 1 << 30)
        self.tokens, self.started = 0, time.monotonic()

    def run(self, names: Sequence[str], source: Path, artifact: Artifact, bar: Bar) -> None:
        """Answer and publish the named shards of `source`. Raises Stopped when asked to stop: the shard is redone."""
        for name in names:
            stopping.check()
            with artifact.shard(name) as shard:
                dialogues = [Dialogue(row, self.config.answers.cut_answers) for row in read_rows(source / name)]
                while self._turn(dialogues, bar):
                    pass
                answered, facts = shard_facts(dialogues)
                with shard.path.open("wb") as file:
                    file.writelines(row.line() for row in answered)
                shard.row.update(facts, rows=len(dialogues))

    def _turn(self, dialogues: list[Dialogue], bar: Bar) -> int:
        """Give every waiting dialogue its next answer; returns how many were asked."""
        asked, prompts, limits = [], [], []
        settings = self.config.answers
        for dialogue in dialogues:
            messages = dialogue.question()
            if messages is None:
                continue
            try:
                prompt = self.template.render_prompt(messages, dialogue.original.tools)
                if len(prompt) >= self.longest:
                    raise Skip("prompt_too_long", f"{len(prompt)} tokens, the target takes {self.longest}")
            except Skip as skip:
                dialogue.fail(skip)
                continue
            asked.append(dialogue)
            prompts.append(prompt)
            limits.append(min(settings.max_new_tokens, self.longest - len(prompt)))

        def finished(index: int, generation: Generation) -> None:
            self.tokens += len(generation.ids)
            bar.advance(tokens_per_second=round(self.tokens / (time.monotonic() - self.started)))
            stopping.check()

        generations = decode(
            self.target, prompts, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
            max_new_tokens=limits, stop_ids=self.template.stop_ids, batch_size=settings.batch_size,
            seeds=[seed_of(self.config.seed, dialogue.original.id, dialogue.turn) for dialogue in asked],
            on_finish=finished,
        )  # fmt: skip
        for dialogue, generation in zip(asked, generations, strict=True):
            reason = str(generation.finish_reason)
            ids = generation.ids[:-1] if reason == "stop" else generation.ids
            dialogue.answer({"content": self.template.decode(ids)}, reason)
        return len(asked)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
