"""A `DraftConfig` from the config.json of any layout, strictly: what we cannot run is refused by name.

    reading = read_config(json.loads(text), where="folder/config.json")

Foreign checkpoints leave out what their own program defaults to; a default is only assumed where the layout fixes it
(serving notes: DeepSpec drafts from the anchor, speculators and DFlash do not unless they say so). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.architecture import read_rope
from pipeline.draft.config import DraftConfig
from pipeline.errors import ArtifactError, ConfigError

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """`config`, the layout it was read from, and whether the stored confidence head reads the Markov embedding."""

    config: DraftConfig
    layout: str
    confidence_with_markov: bool


def detect(data: Data, *, where: str) -> str:
    """Name of the layout. Raises ArtifactError when the file belongs to none of them."""
    if not isinstance(data, Mapping):
        raise ArtifactError(f"{where}: holds a {type(data).__name__}, a mapping expected")
    if "speculators_model_type" in data:
        return "speculators"
    listed, nested = data.get("architectures"), data.get("dflash_config")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    nested = nested if isinstance(nested, Mapping) else {}
    by_name = {
        "Qwen3DSparkModel": "deepspec",
        "DSparkDraftModel": "specforge",
        "DFlashDraftModel": "specforge" if "projector_type" in nested else "dflash",
        "LlamaForCausalLMEagle3": "eagle3",
        "Eagle3LlamaForCausalLM": "eagle3",
        "Qwen3_5MTP": "mtp",
    }
    for name in names:
        if name in by_name:
            return by_name[name]
    raise ArtifactError(f"{where}: architectures {listed} is no drafter layout known here ({', '.join(by_name)})")


def read_config(data: Data, *, where: str, target: Data | None = None) -> Reading:
    """Read config.json of any layout.

    Args:
        target: the target's own config.json, for what a layout may leave out (its number of layers).
    Raises:
        ArtifactError: with every problem: keys missing, values out of range, features no drafter of ours has.
    """
    layout = detect(data, where=where)
    reader = _Reader(data, layout, target)
    try:
        fields = reader.fields()
        reader.problems += _value_problems(fields)
        config = DraftConfig(**fields)
    except ConfigError as error:
        raise ArtifactError(f"{where}: " + "; ".join([*reader.problems, *error.problems])) from error
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        told = [*reader.problems, f"{type(error).__name__}: {error}"]
        raise ArtifactError(f"{where}: " + "; ".join(told)) from error
    if reader.problems:
        raise ArtifactError(f"{where}: " + "; ".join(reader.problems))
    with_markov = bool(reader.own("confidence_head_with_markov", config.markov != "none")) and config.markov != "none"
    return Reading(config, layout, with_markov)


_WHOLE = (
    "block_size", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "markov_rank",
    "target_num_layers", "target_vocab_size", "draft_vocab_size", "mask_token_id",
)  # fmt: skip


def _value_problems(fields: Data) -> list[str]:
    """Values of a kind no drafter can have; what is absent is told where it is read."""
    problems = [
        f"{name} is {fields[name]!r}, a whole number expected"
        for name in _WHOLE
        if fields[name] is not None and not _is_whole(fields[name])
    ]
    if not 0 < fields["rms_norm_eps"] < 1:
        problems.append(f"rms_norm_eps is {fields['rms_norm_eps']}, a small positive number expected")
    for key, value in fields["rope"].items():
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, str | bool | None) and not (isinstance(item, int | float) and math.isfinite(item)):
                problems.append(f"rope parameter {key} is {value!r}, numbers expected")
    return problems


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def rope_problems(rope: Data, target: Data) -> list[str]:
    """Differences between a drafter's rotary parameters and its target's; both config forms are understood (S5)."""
    theirs = read_rope(target)
    return [
        f"{key}: the drafter has {rope.get(key)!r}, its target {theirs.get(key)!r}"
        for key in sorted({*rope, *theirs})
        if rope.get(key) != theirs.get(key)
    ]


# What a config may say that our drafters do not do: key -> values that are harmless.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "causal": (None, False),
    "use_swa": (None, False),
    "use_sliding_window": (None, False),
    "is_neox_style": (None, True),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "logit_scale": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0),
    "use_aux_hidden_state": (None, True),
    "norm_before_residual": (None, False),
    "norm_before_fc": (None, False),
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "mlp_bias": (None, False),
    "attention_mode": (None, "bidirectional", "full"),
}


class _Reader:
    """Collects a `DraftConfig`'s fields and every problem met on the way."""

    def __init__(self, data: Data, layout: str, target: Data | None) -> None:
        self.data, self.layout, self.target = data, layout, target or {}
        self.problems: list[str] = []
        self.stack: Data = self._mapping("transformer_layer_config", data) or data
        self.nested = self._mapping("dflash_config", data) or self._mapping("eagle_config", data)

    def _mapping(self, key: str, place: Data) -> Data:
        """A nested mapping; empty when absent."""
        value = place.get(key)
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.problems.append(f"{key} is {value!r}, a mapping expected")
        return {}

    def own(self, key: str, default: Any = None) -> Any:
        """A key of the drafter's own, wherever the layout nests it; one that stands in two places says one thing."""
        found = [place[key] for place in (self.nested, self.data) if key in place]
        if len(found) == 2 and found[0] != found[1]:
            told = f"{key} is {found[0]!r} in the nested part and {found[1]!r} outside: which one was it trained with?"
            if told not in self.problems:
                self.problems.append(told)
        return found[0] if found else default

    def need(self, key: str, *, place: Data | None = None) -> Any:
        value = self.own(key) if place is None else place.get(key)
        if value is None:
            self.problems.append(f"required key {key} is missing")
        return value

    def fields(self) -> dict[str, Any]:
        """Arguments of `DraftConfig`."""
        self._refuse_features()
        family = self._family()
        markov, rank = self._markov(family)
        kind = {"fill_in": "dflash"}.get(family, "dflash" if family == "dspark" and markov == "none" else family)
        fill_in = family == "fill_in"
        inputs = self._block()
        stack, heads = self.stack, self.need("num_attention_heads", place=self.stack)
        vocab = self.need("vocab_size", place=stack)
        draft_vocab = self.own("draft_vocab_size")
        return {
            "kind": kind,
            "block_size": inputs - 1 if fill_in and isinstance(inputs, int) else inputs,
            "layout": "fill_in" if fill_in else "next_token",
            "layers": 1 if family == "mtp" else self.need("num_hidden_layers", place=stack),
            "hidden_size": self.need("hidden_size", place=stack),
            "intermediate_size": self.need("intermediate_size", place=stack),
            "heads": heads,
            "kv_heads": stack.get("num_key_value_heads") or heads,
            "head_dim": stack.get("head_dim") or (stack["hidden_size"] // heads if heads else None),
            "activation": self.need("hidden_act", place=stack),
            "rms_norm_eps": float(self.need("rms_norm_eps", place=stack) or 0.0),
            "attention_bias": bool(stack.get("attention_bias", False)),
            "rope": self._rope(),
            "markov": markov,
            "markov_rank": rank,
            "confidence": family == "dspark" and bool(self.own("enable_confidence_head", False)),
            "taps": True,
            "target_layer_ids": self._layer_ids(family),
            "target_num_layers": self._target_layers(),
            "target_vocab_size": vocab,
            "draft_vocab_size": None if draft_vocab in (None, vocab) else draft_vocab,
            "mask_token_id": None if family in ("eagle3", "mtp") else self.need("mask_token_id"),
        }

    def _family(self) -> str:
        """dspark (next-token block), fill_in, eagle3 or mtp."""
        if self.layout in ("eagle3", "mtp"):
            return self.layout
        if self.layout == "dflash":
            family = "dflash"
        elif self.layout == "deepspec":
            family = "dspark"
        else:
            key = "speculators_model_type" if self.layout == "speculators" else "projector_type"
            family = str(self.own(key, "dspark"))
            if family not in ("dspark", "dflash", "eagle3"):
                self.problems.append(f"{key} {family!r} is not supported (dspark, dflash, eagle3)")
        if family == "eagle3":
            return family
        # Fixed by the convention where absent: DeepSpec and SpecForge DSpark draft from the anchor, the others do not.
        by_default = family == "dspark" and self.layout != "speculators"
        anchor = bool(self.own("sample_from_anchor", by_default))
        if family == "dflash" and anchor and self.layout == "dflash":
            self.problems.append("sample_from_anchor is true, but the DFlash layout fills in (S1)")
        return "dspark" if anchor else "fill_in"

    def _markov(self, family: str) -> tuple[str, int]:
        rank = self.own("markov_rank", 0) or 0
        if family != "dspark" or rank == 0:
            if rank:
                self.problems.append(f"markov_rank {rank}: a Markov head in the fill-in layout is not supported (S1)")
            return "none", 0
        return str(self.need("markov_head_type")), rank

    def _block(self) -> Any:
        """Inputs of a block, or tokens drafted where the layout has no blocks."""
        if self.layout in ("eagle3", "mtp"):
            return self.data.get("num_speculative_tokens", 1)
        if self.data.get("speculators_model_type") == "eagle3":
            methods = self._mapping("speculators_config", self.data).get("proposal_methods")
            first = methods[0] if isinstance(methods, list) and methods else None
            return first.get("speculative_tokens", 1) if isinstance(first, Mapping) else 1
        return self.need("block_size")

    def _layer_ids(self, family: str) -> tuple[int, ...]:
        """Tapped layers by S4; speculators and Eagle3 files count hidden_states, which is one more."""
        for key, shift in (
            ("aux_hidden_state_layer_ids", 1), ("eagle_aux_hidden_state_layer_ids", 1), ("target_layer_ids", 0),
        ):  # fmt: skip
            ids = self.own(key)
            if isinstance(ids, list) and ids and all(_is_whole(value) for value in ids):
                return tuple(value - shift for value in ids)
            if ids:
                self.problems.append(f"{key} is {ids!r}, a list of layer numbers expected")
                return ()
        if family == "mtp":  # starts from the last hidden state; ids are a note of what the run had cached
            return ()
        self.problems.append("no target layer ids (target_layer_ids, aux_hidden_state_layer_ids)")
        return ()

    def _target_layers(self) -> Any:
        text = self.target.get("text_config") or self.target
        found = self.own("num_target_layers")
        theirs = text.get("num_hidden_layers")
        if found is not None and theirs is not None and found != theirs:
            self.problems.append(f"num_target_layers is {found}, the target has {theirs} layers")
        if found is None and theirs is None:
            self.problems.append("num_target_layers is missing, and no target was given to take it from")
        return found or theirs

    def _rope(self) -> dict[str, Any]:
        old, new = self.stack.get("rope_theta"), self._mapping("rope_parameters", self.stack).get("rope_theta")
        if old is not None and new is not None and float(old) != float(new):
            self.problems.append(f"rope_theta is {old}, rope_parameters say {new}: which one was it trained with?")
        try:
            return read_rope(self.stack)
        except ConfigError as error:
            self.problems += error.problems
            return {"rope_type": "default", "rope_theta": 1.0}

    def _refuse_features(self) -> None:
        for place in (self.data, self.stack, self.nested):
            for key, harmless in _HARMLESS.items():
                if key in place and place[key] not in harmless:
                    told = f"{key} is {place[key]!r}, which no drafter here does"
                    if told not in self.problems:
                        self.problems.append(told)
        kinds = set(self.stack.get("layer_types") or []) - {"full_attention"}
        if kinds:
            self.problems.append(
                f"layer_types holds {', '.join(sorted(map(str, kinds)))}; only full_attention is supported"
            )
        if self.stack.get("tie_word_embeddings"):
            self.problems.append(
                "tie_word_embeddings is true; a drafter's head is the target's, never its own embedding"
            )
