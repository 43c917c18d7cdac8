"""Evaluation leaks: rows of the corpus that hold a question of a prompt set, found by n-gram overlap.

    leaks = load_leaks(config.data.decontaminate)
    leaks.check(row)                                       # raises Skip(contaminated, …) naming set, prompt and overlap

A row leaks a prompt when at least `OVERLAP` of the prompt's n-grams (lower-case words) stand in it. A share, not a
single n-gram, because sets repeat their instructions ("reason step by step …") in every prompt. A prompt shorter than
one n-gram must stand in the row as a whole; below `SHORTEST` words it identifies nothing and is not looked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.config import Decontaminate
from pipeline.corpus.duplicates import words
from pipeline.corpus.normalise import Skip
from pipeline.corpus.prompts import load_prompts
from pipeline.corpus.rows import Row

OVERLAP = 0.3
SHORTEST = 5


@dataclass
class Leaks:
    """N-grams of all prompt sets, by length. Word tuples are kept as joined text."""

    ngram: int
    exempt: frozenset[str]
    grams: dict[int, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(dict))  # length → gram → prompts
    prompts: list[tuple[str, str, int]] = field(default_factory=list)  # (set, prompt id, distinct grams)
    vocabulary: set[str] = field(default_factory=set)
    too_short: Counter[str] = field(default_factory=Counter)

    def add(self, prompt_set: str, prompt_id: str, text: str) -> None:
        tokens = words(text)
        if len(tokens) < SHORTEST:
            self.too_short[prompt_set] += 1
            return
        length = min(self.ngram, len(tokens))
        grams = {" ".join(tokens[at : at + length]) for at in range(len(tokens) - length + 1)}
        for gram in grams:
            self.grams[length].setdefault(gram, []).append(len(self.prompts))
        self.prompts.append((prompt_set, prompt_id, len(grams)))
        self.vocabulary.update(tokens)

    def check(self, row: Row) -> None:
        """Raise Skip(contaminated) with the prompt set, the prompt and the overlap when the row holds a prompt."""
        if row.source in self.exempt:
            return
        found: dict[int, set[str]] = defaultdict(set)
        for message in row.messages:
            for gram, numbers in self._hits(words(message["content"])):
                for number in numbers:
                    found[number].add(gram)
        best = max(((len(grams) / self.prompts[n][2], -n) for n, grams in found.items()), default=(0.0, 0))
        if best[0] >= OVERLAP:
            name, prompt, _ = self.prompts[-best[1]]
            raise Skip(
                "contaminated", prompt_set=name, prompt=prompt, overlap=round(best[0], 3), id=row.id, source=row.source
            )

    def _hits(self, tokens: list[str]) -> Iterator[tuple[str, list[int]]]:
        """Known n-grams of a text. Only runs of words that some prompt uses are looked at, which spares most."""
        start = 0
        for end in range(len(tokens) + 1):
            if end < len(tokens) and tokens[end] in self.vocabulary:
                continue
            run = tokens[start:end]
            for length, grams in self.grams.items():
                for at in range(len(run) - length + 1):
                    gram = " ".join(run[at : at + length])
                    if gram in grams:
                        yield gram, grams[gram]
            start = end + 1


def load_leaks(settings: Decontaminate | None) -> Leaks | None:
    """N-grams of the configured prompt sets; None when there is nothing to look for.

    Raises ConfigError or DataError when a set cannot be read.
    """
    if settings is None or not settings.prompt_sets:
        return None
    leaks = Leaks(settings.ngram, frozenset(settings.exempt))
    for name in settings.prompt_sets:
        for prompt in load_prompts(name):
            for turn in prompt.turns:
                leaks.add(name, prompt.id, turn)
    return leaks
