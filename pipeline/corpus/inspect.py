"""What `dspark doctor` says about chats: every token's role and mask, and whether tokenizer, target and server agree.

    findings = examine(config, model, samples=3, endpoint="http://localhost:8000/v1")
    findings.text                                          # tables and facts, for a person
    findings.problems                                      # what would silently cost accepted length

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.config import Config
from pipeline.corpus.endpoint import compare
from pipeline.corpus.masks import training_rows
from pipeline.corpus.normalise import Skip, normalise
from pipeline.corpus.rows import Message, Row
from pipeline.corpus.sources import plan_units, read_unit
from pipeline.corpus.template import ChatTemplate
from pipeline.identity import target_json

_SHOWN_AROUND = 4  # prompt tokens shown at the ends of a long unsupervised run
_DECODED_TOGETHER = 64


@dataclass
class Findings:
    """Lines for a person, and problems; an empty list of problems is a clean bill."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join([*self.lines, *(f"PROBLEM {problem}" for problem in self.problems)])


def examine(
    config: Config,
    model: str,
    *,
    samples: int = 3,
    endpoint: str | None = None,
    rows: Sequence[Row] = (),
    special_tokens: dict[str, int] | None = None,
) -> Findings:
    """Look at `rows` (default: the first ones of the sources) as the tokens stage would render them.

    Args:
        endpoint: base URL of a server whose own rendering is compared, e.g. http://host:8000/v1.
        special_tokens: counts by id from a tokens manifest: what the corpus really holds.

    Raises ConfigError where the tokenizer or its template cannot be used at all.
    """
    target = config.target
    template = ChatTemplate(
        model, config.template, revision=target.revision, trust_remote_code=target.trust_remote_code
    )
    chosen = list(rows)[:samples] or list(first_rows(config, samples))
    findings = Findings()
    _vocabulary(template, config, findings)
    _bos(template, chosen, findings)
    _mask_token(template, config, chosen, special_tokens, findings)
    for row in chosen:
        findings.lines += ["", *_sample(template, row, config)]
    if endpoint is not None:
        served = config.answers.model or str(target.model)
        for row in chosen:
            told, agrees = compare(template, endpoint, served, row.messages[: _first_answer(row)])
            (findings.lines if agrees else findings.problems).append(f"row {row.id}: {told}")
    return findings


def first_rows(config: Config, count: int) -> Iterator[Row]:
    """The first usable rows of the sources, read directly: no stage needs to have run."""
    for unit in plan_units(config.data, seed=config.seed):
        for raw in read_unit(unit):
            if count == 0:
                return
            try:
                if raw.problem is None:
                    source, messages, tools = normalise(
                        raw.value, roles=config.data.roles, name=unit.source.name, default_source=unit.default_name
                    )
                    yield Row.of(source=source, messages=messages, tools=tools)
                    count -= 1
            except (Skip, ValueError, TypeError, RecursionError):
                continue


# ------------------------------------------------------------------------------------------------ tables


def _sample(template: ChatTemplate, row: Row, config: Config) -> list[str]:
    rendered = training_rows(template, row, config.tokens)
    lines = [f"row {row.id} ({row.source}): {len(rendered.rows)} training rows"]
    lines += [f"  turn {turn}: left out, {reason} {detail}" for turn, reason, detail in rendered.skipped]
    for made in rendered.rows:
        roles = token_roles(template, row.messages, made.ids)
        eligible = anchor_eligible(made.mask, config.train.anchor_rule)
        supervised, anchors = sum(made.mask), sum(eligible)
        lines.append(f"  turn {made.turn}: {len(made.ids)} tokens, {supervised} supervised, {anchors} possible anchors")
        lines += token_table(template, made.ids, made.mask, roles, eligible)
    return lines


def anchor_eligible(mask: Sequence[int], rule: str = "generated") -> list[bool]:
    """Positions a drafter may be anchored at (S7): mask[a] and mask[a+1], or with rule `label` mask[a+1] alone."""
    after = [*mask[1:], 0]
    return [bool(label and (here or rule == "label")) for here, label in zip(mask, after, strict=True)]


def token_roles(template: ChatTemplate, messages: Sequence[Message], ids: Sequence[int]) -> list[str]:
    """The role each token's text belongs to, or `template` for what the template adds. For people: masks rest on more.

    Contents are looked for in order, each behind the one before.
    """
    text = template.decode(ids)
    spans, at = [], 0
    for message in template.messages(messages):
        content = message["content"].strip()
        found = text.find(content, at) if content else -1
        if found >= 0:
            at = found + len(content)
            spans.append((found, at, message["role"]))
    roles, start = [], 0
    for group in range(0, len(ids), _DECODED_TOGETHER):
        begin = start
        some = ids[group : group + _DECODED_TOGETHER]
        for count in range(1, len(some) + 1):
            end = begin + len(template.decode(some[:count]))
            inside = [role for first, last, role in spans if start < last and end > first]
            roles.append(inside[0] if inside else "template")
            start = end
    return roles


def token_table(
    template: ChatTemplate, ids: Sequence[int], mask: Sequence[int], roles: Sequence[str], eligible: Sequence[bool]
) -> list[str]:
    """Lines of position, id, role, mask, anchor, text; the middle of long unsupervised runs is left out."""
    lines = ["    place      id role       mask anchor text"]
    hidden = 0
    for place, token in enumerate(ids):
        window = mask[max(0, place - _SHOWN_AROUND) : place + _SHOWN_AROUND + 1]
        if not any(window) and place >= _SHOWN_AROUND and place < len(ids) - 1:
            hidden += 1
            continue
        if hidden:
            lines.append(f"      ... {hidden} unsupervised tokens")
            hidden = 0
        anchor = "yes" if eligible[place] else ""
        shown = repr(template.decode([token]))
        lines.append(f"    {place:5d} {token:7d} {roles[place]:10s} {mask[place]:4d} {anchor:6s} {shown}")
    return lines


# ------------------------------------------------------------------------------------------------ checks


def _vocabulary(template: ChatTemplate, config: Config, findings: Findings) -> None:
    model = target_json(config, "config.json")
    rows = (model.get("text_config") or model).get("vocab_size")
    tokens = len(template.tokenizer)
    findings.lines.append(
        f"vocabulary: the tokenizer knows {tokens} tokens, the target's embedding has {rows} rows"
        + (f" ({rows - tokens} rows are spare)" if rows and rows > tokens else "")
    )
    findings.lines.append(f"stop tokens: {', '.join(f'{i} {template.decode([i])!r}' for i in template.stop_ids)}")
    if rows and tokens > rows:
        findings.problems.append(f"the tokenizer has {tokens} tokens, more than the embedding's {rows} rows")


def _bos(template: ChatTemplate, rows: Sequence[Row], findings: Findings) -> None:
    bos = template.tokenizer.bos_token_id
    for row in rows:
        ids = _question(template, row)
        if bos is not None and ids is not None and ids[:2] == [bos, bos]:
            findings.problems.append(
                f"row {row.id}: two BOS tokens ({bos}) open the prompt; the template prints one twice"
            )
            return
    added = template.tokenizer("x")["input_ids"][:1] == [bos]
    findings.lines.append(
        "BOS: " + ("none" if bos is None else f"{bos}, at most once a row") + (", not added again" if added else "")
    )


def _mask_token(
    template: ChatTemplate,
    config: Config,
    rows: Sequence[Row],
    special_tokens: dict[str, int] | None,
    findings: Findings,
) -> None:
    """S6: the mask token must be one that neither the template nor the corpus ever produces."""
    token = config.draft.mask_token_id
    if token is None:
        return
    text = repr(template.decode([token])) if token < len(template.tokenizer) else "a row no token uses"
    findings.lines.append(f"mask token: {token}, {text}")
    used = sum((_question(template, row) or []).count(token) for row in rows)
    counted = (special_tokens or {}).get(str(token), 0)
    if used or counted:
        findings.problems.append(f"mask token {token} ({text}) stands in the corpus: {max(used, counted)} times")


def _question(template: ChatTemplate, row: Row) -> list[int] | None:
    try:
        return template.render_prompt(row.messages[: _first_answer(row)], row.tools)
    except Skip:
        return None


def _first_answer(row: Row) -> int:
    roles = [message["role"] for message in row.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)
