"""A corpus with planted copies, near copies and benchmark items, and the truth about it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.unit.corpus.stage import chat

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "il", "os")]


@dataclass
class Planted:
    """Rows in a shuffled order; the texts of what was planted, by kind."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)  # the text that stands twice
    near: list[tuple[str, str]] = field(default_factory=list)  # original answer, changed answer
    decoys: list[tuple[str, str]] = field(default_factory=list)  # related, but too different to go
    leaks: dict[str, str] = field(default_factory=dict)  # question of the row → the prompt it holds


def plant(count: int, *, each: int, seed: int = 1) -> Planted:
    """`count` independent rows, and `each` exact copies, near copies (0.92 similar), decoys (about 0.4), leaks."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(4000)]

    def text(words: int) -> str:
        return " ".join(rng.choices(vocabulary, k=words))

    planted = Planted()
    originals = [(f"{text(14)}?", f"{text(120)}.") for _ in range(count)]
    planted.rows = [chat(question, answer, source=f"s{n % 4}") for n, (question, answer) in enumerate(originals)]
    for number in range(each):
        question, answer = originals[number]
        planted.rows.append(chat(question, answer, source="copies"))
        planted.exact.append(question)
        question, answer = originals[each + number]
        planted.rows.append(chat(question, changed := _change(answer, vocabulary, rng, 1), source="near"))
        planted.near.append((answer, changed))
        question, answer = originals[2 * each + number]
        planted.rows.append(chat(f"{text(14)}?", changed := _change(answer, vocabulary, rng, 22), source="decoys"))
        planted.decoys.append((answer, changed))
        prompt = f"{text(40)}?\nPlease reason step by step, and put your final answer within \\boxed{{}}."
        planted.prompts.append(prompt)
        asked = f"Please help me with this one.\n{prompt.upper() if number % 2 else prompt}"
        planted.rows.append(chat(asked, text(30), source="leaky"))
        planted.leaks[asked] = prompt
        harmless = f"{text(20)}?\nPlease reason step by step, and put your final answer within \\boxed{{}}."
        planted.rows.append(chat(harmless, text(30), source="same-instruction"))
    rng.shuffle(planted.rows)
    return planted


def _change(answer: str, vocabulary: list[str], rng: random.Random, count: int) -> str:
    words = answer.split()
    for place in rng.sample(range(len(words)), count):
        words[place] = rng.choice(vocabulary)
    return " ".join(words)
