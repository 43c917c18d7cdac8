"""How much text there is: counted where the tokens stage has run, else rows times an assumed length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.artifact import Artifact
from pipeline.benchmarks import HELDOUT
from pipeline.config import Config
from pipeline.corpus.prompts import Prompt, choose, load_prompts, split_prompts
from pipeline.corpus.tokens import read_tokens
from pipeline.decoding.portions import CHUNK
from pipeline.errors import ConfigError

DEFAULT_TOKENS_PER_ROW, DEFAULT_SUPERVISED = 885.0, 0.65  # Open-PerfectBlend: 1.24 G tokens in 1.4 M rows
_SAMPLED_SHARDS = 8  # lengths are read from so many token shards


@dataclass(frozen=True)
class Corpus:
    """Training rows, their tokens and supervised tokens (a row's answer), and where the figures come from.

    `longest` and `longest_prompt` bound memory: the longest row, and the longest part before an answer. `lengths` are
    (tokens, supervised) of some rows in order, `turns` the sizes of the groups decoded together when answers are made:
    one per shard and turn. `asked` are those of calibrate and evaluate: for every unit of prompts a group per turn; a
    stage whose prompts are not at hand is left out.
    """

    rows: int
    tokens: int
    supervised: int
    source: str
    conversations: int
    longest: int
    longest_prompt: int
    lengths: tuple[tuple[int, int], ...]
    turns: tuple[int, ...]
    asked: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens before an answer, of the rows in `lengths`, longest first."""
        return sorted((length - answer for length, answer in self.lengths), reverse=True)

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens before an answer."""
        return (self.tokens - self.supervised) / self.rows

    @property
    def answer_tokens(self) -> float:
        """Mean tokens of an answer."""
        return self.supervised / self.rows


def counted(config: Config, tokens: Artifact) -> Corpus:
    """From a finished tokens artifact."""
    facts = tokens.manifest()
    names = [fact["file"] for fact in facts["shards"]]
    lengths: list[tuple[int, int]] = []
    turns: Counter[tuple[str, int]] = Counter()
    for name in names[:_SAMPLED_SHARDS]:
        for row in read_tokens(tokens.path / name):
            lengths.append((len(row.ids), int(row.mask.sum())))
            turns[name, row.turn] += 1
    whole = len(names) <= _SAMPLED_SHARDS
    limit = config.tokens.max_length
    return Corpus(
        facts["samples"], facts["tokens"], facts["supervised"], "counted in the tokens artifact",
        conversations=facts["conversations"],
        longest=max(length for length, _ in lengths) if whole else limit,
        longest_prompt=max(length - answer for length, answer in lengths) if whole else limit,
        lengths=tuple(lengths),
        turns=tuple(turns.values()) if whole else tuple(fact["samples"] for fact in facts["shards"]),
    )  # fmt: skip


def assumed(config: Config, rows: int, tokens_per_row: float, share: float, source: str) -> Corpus:
    """From a number of rows: every row as long as the mean, one turn each; memory is priced at the longest allowed."""
    length, per_shard = max(2, round(tokens_per_row)), config.data.shard_rows
    answer = max(1, round(tokens_per_row * share))
    shards = [per_shard] * (rows // per_shard) + ([rows % per_shard] if rows % per_shard else [])
    longest = max(length, config.tokens.max_length)
    return Corpus(
        rows, int(rows * tokens_per_row), int(rows * tokens_per_row * share), source,
        conversations=rows, longest=longest, longest_prompt=longest, lengths=((length, answer),), turns=tuple(shards),
    )  # fmt: skip


def find(
    config: Config, chain: dict[str, Artifact], rows: int | None, tokens_per_row: float | None, share: float | None
) -> Corpus:
    """The best figures there are: given, counted, or rows of the data artifact times the assumed length.

    Raises ConfigError when there is nothing to count and nothing was given.
    """
    data = chain.get("data")
    groups = asked(config, data) if data is not None and data.complete else {}
    if rows is None and "tokens" in chain and chain["tokens"].complete:
        return replace(counted(config, chain["tokens"]), asked=groups)
    source = "given"
    if rows is None:
        if data is None or not data.complete:
            raise ConfigError(
                "plan: no corpus statistics yet: run the data stage, or give --rows (and --tokens-per-row)"
            )
        rows, source = (
            int(data.manifest()["rows"]["train"]),
            "rows counted in the data artifact, length assumed",
        )
    text = assumed(config, rows, tokens_per_row or DEFAULT_TOKENS_PER_ROW, share or DEFAULT_SUPERVISED, source)
    return replace(text, asked=groups)


def asked(config: Config, data: Artifact) -> dict[str, list[list[int]]]:
    """Groups of prompts that calibrate and evaluate decode together, where all their prompts are on this machine."""
    sets = {
        "calibrate": (config.calibrate.prompt_sets, config.calibrate.num_prompts),
        "evaluate": (config.evaluate.prompt_sets, config.evaluate.num_prompts),
    }
    found = {}
    for stage, (names, count) in sets.items():
        if names is not None and any(name != HELDOUT and not Path(name).is_file() for name in names):
            continue
        prompts = [list(split_prompts(data, "calibration"))] if names is None else [
            load_prompts(name, data=data) for name in names
        ]  # fmt: skip
        if stage == "calibrate":
            prompts = [[prompt for one in prompts for prompt in one]]
        found[stage] = [unit for one in prompts for unit in _groups(choose(one, count))]
    return found


def _groups(prompts: Sequence[Prompt]) -> list[list[int]]:
    """By unit and turn: how many prompts of a unit have that turn."""
    units = [prompts[start : start + CHUNK] for start in range(0, len(prompts), CHUNK)]
    return [
        [sum(len(prompt.turns) > turn for prompt in unit) for turn in range(max(len(prompt.turns) for prompt in unit))]
        for unit in units
    ]
