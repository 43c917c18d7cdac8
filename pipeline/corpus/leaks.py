"""Evaluation leaks: rows of the corpus that hold a question of a prompt set, found by n-gram overlap.

    leaks = load_leaks(config.data.decontaminate)
    leaks.check(row)                                       # raises Skip(contaminated, …) naming set, prompt and overlap

A row leaks a prompt when at least `OVERLAP` of the prompt's n-grams (lower-case words) stand in it: a share, because
one n-gram may be a common phrase. Instructions a set repeats in every prompt ("reason step by step …") are set aside
first. A prompt shorter than one n-gram must stand in the row as a whole; below `SHORTEST` words it identifies nothing
and is not looked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.config import Decontaminate
from pipeline.corpus.duplicates import words
from pipeline.corpus.normalise import Skip
from pipeline.corpus.prompts import load_prompts
from pipeline.corpus.rows import Row

OVERLAP = 0.3
SHORTEST = 5
_FEW = 10  # texts from which on a shared instruction can be told from chance
_SHARED = 0.8


@dataclass
class Leaks:
    """N-grams of all prompt sets, by length. Word tuples are kept as joined text."""

    ngram: int
    exempt: frozenset[str]
    grams: dict[int, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(dict))  # length → gram → prompts
    prompts: list[tuple[str, str, int]] = field(default_factory=list)  # (set, prompt id, distinct grams)
    openings: dict[str, set[int]] = field(default_factory=dict)  # first words of a gram → lengths of such grams
    too_short: Counter[str] = field(default_factory=Counter)

    def add_set(self, prompt_set: str, prompts: Sequence[tuple[str, str]]) -> None:
        """Look for (id, text) prompts. Instructions that nearly all of them open or close with are set aside."""
        texts = [words(text) for _, text in prompts]
        head, tail = shared_run(texts), shared_run([text[::-1] for text in texts])[::-1]
        for (prompt_id, _), text in zip(prompts, texts, strict=True):
            if head and text[: len(head)] == head:
                text = text[len(head) :]
            if tail and text[-len(tail) :] == tail:
                text = text[: -len(tail)]
            self._add(prompt_set, prompt_id, text)

    def _add(self, prompt_set: str, prompt_id: str, tokens: list[str]) -> None:
        if len(tokens) < SHORTEST:
            self.too_short[prompt_set] += 1
            return
        length = min(self.ngram, len(tokens))
        grams = {" ".join(tokens[at : at + length]) for at in range(len(tokens) - length + 1)}
        for gram in grams:
            self.grams[length].setdefault(gram, []).append(len(self.prompts))
        for at in range(len(tokens) - length + 1):
            self.openings.setdefault(" ".join(tokens[at : at + self._opening]), set()).add(length)
        self.prompts.append((prompt_set, prompt_id, len(grams)))

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

    @property
    def _opening(self) -> int:
        return min(self.ngram, SHORTEST)

    def _hits(self, tokens: list[str]) -> Iterator[tuple[str, list[int]]]:
        """Known n-grams of a text. One look-up of its first words spares most places all others."""
        size = self._opening
        for at in range(len(tokens) - size + 1):
            for length in self.openings.get(" ".join(tokens[at : at + size]), ()):
                gram = " ".join(tokens[at : at + length])
                if gram in self.grams[length]:
                    yield gram, self.grams[length][gram]


def shared_run(texts: Sequence[list[str]]) -> list[str]:
    """The longest run of words that nearly all texts begin with; nothing where there are too few texts to tell."""
    enough = max(_FEW, _SHARED * len(texts))
    run: list[str] = []
    left = list(texts)
    while True:
        following = Counter(text[len(run)] for text in left if len(text) > len(run))
        word, count = max(following.items(), key=lambda item: item[1], default=("", 0))
        if count < enough:
            return run
        left = [text for text in left if len(text) > len(run) and text[len(run)] == word]
        run.append(word)


def load_leaks(settings: Decontaminate | None) -> Leaks | None:
    """N-grams of the configured prompt sets; None when there is nothing to look for.

    Raises ConfigError or DataError when a set cannot be read.
    """
    if settings is None or not settings.prompt_sets:
        return None
    leaks = Leaks(settings.ngram, frozenset(settings.exempt))
    for name in settings.prompt_sets:
        leaks.add_set(name, [(prompt.id, turn) for prompt in load_prompts(name) for turn in prompt.turns])
    return leaks
