"""Prompts played with the frozen target, turn by turn, with or without a drafter.

    player = Player.load(config, target_path, dtype="float32", drafter=folder)
    played = player.play(prompts, temperature=0.0, max_new_tokens=256, batch_size=8)

A prompt that cannot be rendered or decoded stays in the result with its error: nothing lowers n silently (EVA-09).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline import stopping
from pipeline.config import Config
from pipeline.corpus.dialogue import seed_of
from pipeline.corpus.normalise import Skip
from pipeline.corpus.prompts import Prompt
from pipeline.corpus.rows import Message
from pipeline.corpus.template import ChatTemplate, mismatches
from pipeline.decoding.engine import Generation, decode
from pipeline.decoding.rounds import Clock, Policy
from pipeline.draft.io import load_drafter, read_description
from pipeline.errors import ConfigError
from pipeline.progress import say
from pipeline.target import Target, pick_device


@dataclass
class Played:
    """A prompt's answers: for each turn the ids it was asked with and what was generated. `error` ends it early.

    Later turns are asked with answers cut at `limit` tokens.
    """

    prompt: Prompt
    limit: int
    asked: list[list[int]] = field(default_factory=list)
    answers: list[Generation] = field(default_factory=list)
    error: str | None = None


@dataclass
class Player:
    """The loaded target, its template, and optionally a drafter with the facts of its checkpoint."""

    config: Config
    target: Target
    template: ChatTemplate
    drafter: Any = None
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, config: Config, path: str, *, dtype: str, drafter: Path | None = None) -> Player:
        """Load everything onto this process's device.

        Raises ConfigError when the drafter was trained in another chat mode (DAT-16, EVA-06); with
        `evaluate.allow_template_mismatch` that is a warning.
        """
        settings = config.target
        template = ChatTemplate(
            path, config.template, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        layers: Sequence[int] = ()
        meta: dict[str, Any] = {}
        if drafter is not None:
            described, meta = read_description(drafter)
            check_chat_mode(meta, template, allow=config.evaluate.allow_template_mismatch)
            layers = described.target_layer_ids if described.uses_taps else ()
        target = Target.load(
            path, layers=layers, dtype=getattr(torch, dtype), device=pick_device(), attention=settings.attention,
            revision=settings.revision, trust_remote_code=settings.trust_remote_code, device_map=settings.device_map,
            tensor_parallel=settings.tensor_parallel,
        )  # fmt: skip
        network = None
        if drafter is not None:
            network = load_drafter(drafter)[0].to(device=target.device, dtype=getattr(torch, dtype)).eval()
        return cls(config, target, template, network, meta)

    def play(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        max_new_tokens: int,
        batch_size: int,
        drafted: bool = True,
        overrun: int = 0,
        top_p: float = 1.0,
        top_k: int = 0,
        policy: Policy | None = None,
        clock: Clock | None = None,
        on_answer: Callable[[Generation], None] | None = None,
    ) -> list[Played]:
        """All turns of all prompts; one continuous batch per turn. `drafted` False decodes with the target alone.

        Answers may be `overrun` tokens longer than `max_new_tokens`; callers cut them. Sampling is seeded
        by (config seed, prompt id, turn), the same with and without a drafter.
        """
        played = [Played(prompt, max_new_tokens) for prompt in prompts]
        options = {
            "drafter": self.drafter if drafted else None, "temperature": temperature, "top_p": top_p, "top_k": top_k,
            "stop_ids": self.template.stop_ids, "batch_size": batch_size, "policy": policy, "clock": clock,
        }  # fmt: skip
        for turn in range(max((len(prompt.turns) for prompt in prompts), default=0)):
            waiting = [item for item in played if item.error is None and len(item.prompt.turns) > turn]
            asked = [item for item in waiting if self._ask(item, turn)]
            limits = [min(max_new_tokens + overrun, self._room - len(item.asked[-1])) for item in asked]
            for item, answer in zip(asked, self._decode(asked, limits, options, on_answer), strict=True):
                if isinstance(answer, Generation):
                    item.answers.append(answer)
                else:
                    item.error = answer
        return played

    @property
    def _room(self) -> int:
        return int(getattr(self.target.config, "max_position_embeddings", 0) or 1 << 30)

    def messages(self, item: Played, turn: int) -> list[Message]:
        """The conversation up to the question of a turn, with the answers given so far."""
        prompt = item.prompt
        messages: list[Message] = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        for place in range(turn + 1):
            messages.append({"role": "user", "content": prompt.turns[place]})
            if place < turn:
                answer = item.answers[place].cut(item.limit)
                ids = answer.ids[:-1] if answer.finish_reason == "stop" else answer.ids
                messages.append({"role": "assistant", "content": self.template.decode(ids)})
        return messages

    def first_prompt(self, prompt: Prompt) -> str:
        """A prompt's first question as the target reads it, or why it cannot be rendered."""
        try:
            return self.template.render(self.messages(Played(prompt, 0), 0), prompt=True)
        except Skip as skip:
            return str(skip)

    def _ask(self, item: Played, turn: int) -> bool:
        try:
            ids = self.template.render_prompt(self.messages(item, turn))
        except Skip as skip:
            item.error = f"{skip.reason}: {skip.facts.get('detail', '')}"
            return False
        if len(ids) >= self._room:
            item.error = f"prompt_too_long: {len(ids)} tokens, the target takes {self._room}"
            return False
        item.asked.append(ids)
        return True

    def _decode(
        self,
        items: Sequence[Played],
        limits: Sequence[int],
        options: dict[str, Any],
        on_answer: Callable[[Generation], None] | None,
    ) -> list[Generation | str]:
        """Generations, or the error text of a prompt that fails. A failing batch is tried again one by one."""
        if not items:
            return []

        def finished(index: int, generation: Generation) -> None:
            stopping.check()
            if on_answer is not None:
                on_answer(generation)

        seeds = [seed_of(self.config.seed, item.prompt.id, len(item.answers)) for item in items]
        try:
            return list(
                decode(
                    self.target,
                    [item.asked[-1] for item in items],
                    max_new_tokens=list(limits),
                    seeds=seeds,
                    on_finish=finished,
                    **options,
                )  # fmt: skip
            )
        except (RuntimeError, ValueError, IndexError) as error:
            if len(items) == 1:
                return [f"{type(error).__name__}: {error}"]
            say(f"decoding {len(items)} prompts failed ({error}); trying them one by one", warning=True)
        alone = [self._decode([item], [limit], options, on_answer) for item, limit in zip(items, limits, strict=True)]
        return [outcome[0] for outcome in alone]


def check_chat_mode(meta: dict[str, Any], template: ChatTemplate, *, allow: bool) -> None:
    """Raise ConfigError (or warn) when template, thinking mode, system prompt or tokenizer differ from training's."""
    differences = mismatches(meta.get("template", {}), template.info())
    if differences and allow:
        say(f"evaluating in another chat mode than the drafter was trained in: {'; '.join(differences)}", warning=True)
    elif differences:
        raise ConfigError(
            [
                *differences,
                "the drafter was trained in another chat mode: acceptance would be that of strange text. "
                "Set the template section back, or evaluate.allow_template_mismatch: true",
            ]  # fmt: skip
        )
