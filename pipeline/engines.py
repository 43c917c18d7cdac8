"""Published layouts and serving engines: which layout can carry which drafter, and which engine serves it from there.

Imports no torch: a configuration that asks for an impossible export is refused before anything is trained.

An engine that cannot serve a drafter rarely says so: vLLM ignores `markov_head_type`, DFlash readers take any block
size. So the table stands here, with a reason for every refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import config as run
from pipeline.architecture import activation_of, has_attention_bias, scales
from pipeline.errors import ConfigError

LAYOUTS = ("deepspec", "speculators", "specforge", "dflash", "eagle3", "mtp")
ENGINES = ("vllm", "sglang", "llama.cpp", "deepspec", "speculators", "specforge")
# Targets that own an MTP head our one-layer head can be written as: dense Qwen3.5 (`mtp.*` tensors).
MTP_TARGETS = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class Facts:
    """What decides where a drafter can go.

    `markov` is none, vanilla, gated or rnn; `vocabulary` whether it has a draft vocabulary (S30); `scaled` whether the
    target scales embeddings or logits, which no engine repeats for a foreign drafter; `target_type` its model_type.
    `activation` is the drafter's own, and so are the biases that make it `biased`.
    """

    kind: str
    layout: str
    markov: str
    vocabulary: bool
    taps: bool = True
    scaled: bool = False
    activation: str = "silu"
    target_type: str = "qwen3"
    tapped: int = 5
    biased: bool = False

    @property
    def family(self) -> str:
        """`fill_in` for the original DFlash layout, otherwise the kind."""
        return "fill_in" if self.kind == "dflash" and self.layout == "fill_in" else self.kind


def facts_of(draft: run.Draft, target: Mapping[str, Any], *, tapped: int = 5) -> Facts:
    """Facts of a configuration, before anything is trained, from the target's config.json (its text part)."""
    return Facts(
        kind=draft.kind,
        layout=draft.layout,
        markov=draft.markov,
        vocabulary=draft.vocabulary is not None,
        taps=draft.taps,
        scaled=scales(target) != (1.0, 1.0),
        activation=draft.activation or activation_of(target) or "silu",
        target_type=str(target.get("model_type", "qwen3")),
        tapped=tapped,
        biased=draft.init == "target_layers" and has_attention_bias(target),
    )


def layout_problem(layout: str, facts: Facts) -> str | None:
    """Why `layout` cannot carry this drafter; None when it can."""
    family = facts.family
    if family == "medusa":
        return "Medusa heads have no published layout here; report them from the project's own evaluation"
    if not facts.taps:
        return "a drafter trained without taps is a control: no engine runs one"
    if family not in _CARRIES[layout]:
        if layout == "dflash" and family == "dflash":
            return (
                "a next-token drafter served as fill-in accepts about one token; it goes out as DSpark with a zero head"
            )
        return f"holds {' and '.join(sorted(_CARRIES[layout]))} drafters, this one is {family}"
    if facts.vocabulary and layout not in ("deepspec", "speculators", "eagle3"):
        return "has no place for the draft vocabulary's d2t table and head"
    if family == "fill_in" and layout == "deepspec":
        return "is next-token only"
    if layout == "mtp" and facts.target_type not in MTP_TARGETS:
        return (
            f"engines take the MTP class from the target, and {facts.target_type} has none; "
            f"targets that own a head: {', '.join(MTP_TARGETS)}"
        )
    return None


_CARRIES: dict[str, set[str]] = {
    "deepspec": {"dspark", "dflash"},
    "speculators": {"dspark", "dflash", "fill_in", "eagle3"},
    "specforge": {"dspark", "dflash", "fill_in"},
    "dflash": {"fill_in"},
    "eagle3": {"eagle3"},
    "mtp": {"mtp"},
}


def carriers(facts: Facts) -> list[str]:
    """Layouts that can hold the drafter."""
    return [layout for layout in LAYOUTS if layout_problem(layout, facts) is None]


def engine_problem(engine: str, layout: str, facts: Facts) -> str | None:
    """Why `engine` cannot serve the drafter from `layout`; None when it can."""
    if engine not in _READS[layout]:
        return f"does not read the {layout} layout"
    if engine == "llama.cpp" and layout == "speculators" and facts.family == "fill_in":
        return "has a converter for the DSpark and Eagle3 files of this layout, none for its fill-in ones"
    if engine == "llama.cpp" and facts.family == "eagle3" and facts.tapped != 3:
        return f"reads Eagle3 drafters of three tapped layers, this one has {facts.tapped} (targets.layers)"
    if facts.biased and (engine == "llama.cpp" or (engine == "sglang" and facts.family == "eagle3")):
        return "has no place for the biases this drafter's attention took from its target (draft.init: random has none)"
    if engine in ("vllm", "llama.cpp") and facts.markov in ("gated", "rnn"):
        return f"serves the vanilla Markov head only, this one is {facts.markov}"
    if facts.activation != "silu" and engine in ("vllm", "sglang", "llama.cpp"):
        return f"builds its draft layers with silu only, this one has {facts.activation} (set draft.activation: silu)"
    if facts.vocabulary and engine not in ("vllm", "llama.cpp", "speculators") and layout != "eagle3":
        return "serves DSpark drafters over the target's whole vocabulary only"
    if facts.scaled and engine not in ("vllm", "deepspec", "speculators"):
        return "uses the target's own embedding and head, without the scaling this target applies to them"
    return None


_READS: dict[str, tuple[str, ...]] = {
    "deepspec": ("vllm", "sglang", "llama.cpp", "deepspec"),
    "speculators": ("vllm", "llama.cpp", "speculators"),
    "specforge": ("sglang", "specforge"),
    "dflash": ("vllm", "sglang", "llama.cpp"),
    "eagle3": ("vllm", "sglang", "llama.cpp"),
    "mtp": ("vllm",),
}


def servers(layout: str, facts: Facts) -> list[str]:
    """Engines that serve the drafter from `layout`."""
    return [engine for engine in ENGINES if engine_problem(engine, layout, facts) is None]


def refusals(layouts: Sequence[str], wanted: Sequence[str], facts: Facts) -> list[str]:
    """Every reason to refuse an export before anything is written; empty when it can go on.

    Args:
        layouts: the folders asked for.
        wanted: engines that must be able to serve at least one of them.
    """
    problems = []
    for layout in layouts:
        reason = layout_problem(layout, facts)
        if reason is not None:
            able = ", ".join(carriers(facts)) or "none"
            problems.append(f"export.layouts: {layout} {_joined(reason)}. Layouts that can: {able}")
    good = [layout for layout in layouts if layout_problem(layout, facts) is None]
    for engine in wanted:
        reasons = {layout: engine_problem(engine, layout, facts) for layout in good}
        if good and all(reasons.values()):
            able = ", ".join(
                name for name in ENGINES if any(name in servers(layout, facts) for layout in carriers(facts))
            )
            told = "; ".join(f"from {layout}: {reason}" for layout, reason in reasons.items())
            problems.append(
                f"export.engines: {engine} cannot serve this drafter ({told}). Engines that can: {able or 'none'}"
            )
    return problems


def _joined(reason: str) -> str:
    return reason if reason.startswith(("holds", "has", "is ")) else f"is refused: {reason}"


def early_refusals(config: run.Config, target: Mapping[str, Any]) -> list[str]:
    """`refusals` of a whole configuration, from the target's config.json (its text part)."""
    layers = config.targets.layers
    facts = facts_of(config.draft, target, **({} if layers is None else {"tapped": len(layers)}))
    return refusals(config.export.layouts, config.export.engines, facts)


def refuse(layouts: Sequence[str], wanted: Sequence[str], facts: Facts) -> None:
    """Raises ConfigError with every refusal."""
    problems = refusals(layouts, wanted, facts)
    if problems:
        raise ConfigError(problems)
