"""Loading a run configuration: YAML file, `section.key=value` overrides, validation with all problems at once.

    config = load("configs/debug.yaml", ["train.steps=20"])

Unknown keys are refused with the nearest valid one. The sections themselves are in `pipeline.schema`, re-exported here.
Imports no torch: it runs on login nodes.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.schema import (
    BETWEEN,
    FIELDS_ONLY,
    Answers,
    Calibrate,
    Clash,
    Config,
    Data,
    Decontaminate,
    Draft,
    Evaluate,
    Export,
    Launch,
    NearDuplicates,
    Profile,
    Section,
    Source,
    Target,
    Targets,
    Template,
    TinyTarget,
    Tokens,
    Tracking,
    Train,
)

__all__ = [
    "Answers",
    "Calibrate",
    "Config",
    "Data",
    "Decontaminate",
    "Draft",
    "Evaluate",
    "Export",
    "Launch",
    "NearDuplicates",
    "Profile",
    "Section",
    "Source",
    "Target",
    "Targets",
    "Template",
    "TinyTarget",
    "Tokens",
    "Tracking",
    "Train",
    "dump",
    "load",
    "result_fields",
    "validate",
]

# ------------------------------------------------------------------------------------------------ loading


class _Loader(yaml.SafeLoader):
    """Numbers as YAML 1.2 reads them: 24:00:00 is text (1.1 counts in sixties), 1e-3 is a number (1.1: text)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """As usual, but a key given twice is refused: one of the two values would silently not count."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag not in (_INT, _FLOAT)]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf)$|^\.(?:nan|NaN)$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides (values parsed as YAML), and validate everything.

    Raises:
        ConfigError: with every problem at once: unreadable file, unknown key (nearest valid key named), wrong type.
    """
    path = Path(path)
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a mapping of sections is expected, found {type(tree).__name__}")
    problems = [problem for item in overrides if (problem := _override(tree, item))]
    return validate(tree, problems)


def validate(tree: dict[str, Any], problems: Sequence[str] = ()) -> Config:
    """Build a `Config` from plain data, reporting `problems` found earlier together with its own."""
    found = list(problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        found += [problem for item in error.errors() for problem in _explain(item)]
        if all(item["loc"] for item in error.errors()):  # else `Config` itself came to look between its sections
            found += _between(tree, {str(item["loc"][0]) for item in error.errors() if _clash(item) is None})
    if found:
        raise ConfigError(found)
    return config


def _between(tree: dict[str, Any], wrong: set[str]) -> list[str]:
    """What does not fit between sections none of whose fields is wrong by itself."""
    found: list[str] = []
    for names, check in BETWEEN:
        if not wrong & set(names):
            models = [_section_of(Config.model_fields[name].annotation) or Section for name in names]
            parts = zip(names, models, strict=True)
            found += check(*(model.model_validate(tree.get(name, {}), context=FIELDS_ONLY) for name, model in parts))
    return found


def _clash(item: Any) -> Clash | None:
    error = item.get("ctx", {}).get("error")
    return error if isinstance(error, Clash) else None


def _override(tree: dict[str, Any], item: str) -> str | None:
    key, equals, text = item.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        return f"override {item!r}: write section.key=value"
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        return f"override {item!r}: value is not valid YAML: {error}"
    node: Any = tree
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            if problem := _bad_index(item, parts[:depth], part, node):
                return problem
            node = node[int(part)]
            continue
        if not isinstance(node, dict):
            return f"override {item!r}: {part!r} is not inside a section"
        if not isinstance(node.get(part), dict | list):
            node[part] = {}
        node = node[part]
    if isinstance(node, list):
        if problem := _bad_index(item, parts[:-1], parts[-1], node):
            return problem
        node[int(parts[-1])] = value
    else:
        node[parts[-1]] = value
    return None


def _bad_index(item: str, where: Sequence[str], part: str, entries: Sequence[Any]) -> str | None:
    if part.isdigit() and int(part) < len(entries):
        return None
    known = f"0 to {len(entries) - 1}" if len(entries) > 1 else "0" if entries else "none"
    return f"override {item!r}: {'.'.join(where)} has {len(entries)} entries, numbered {known}; {part!r} is not one"


def _explain(item: Any) -> list[str]:
    where = ".".join(str(part) for part in item["loc"])
    if clash := _clash(item):
        return [f"{where}: {problem}" if where else problem for problem in clash.problems]
    if item["type"] == "too_short" and item["input"]:
        return []  # a list whose every item is refused is also called too short: no problem of its own
    if item["type"] == "extra_forbidden":
        *parents, name = item["loc"]
        near = difflib.get_close_matches(str(name), _keys(parents), n=1, cutoff=0.5)
        hint = (
            f"did you mean {'.'.join([*map(str, parents), near[0]])}?"
            if near
            else f"valid: {', '.join(_keys(parents))}"
        )
        return [f"{where}: unknown key; {hint}"]
    if item["type"] == "missing":
        return [f"{where}: required, not set"]
    message = item["msg"].removeprefix("Value error, ")
    return [f"{where or 'config'}: {message}, found {item['input']!r}"]


def _keys(parents: Sequence[Any]) -> list[str]:
    model: Any = Config
    for part in parents:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, Section) else None
        if field is None:
            return []
        model = _section_of(field.annotation) or model
    return sorted(model.model_fields)


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in typing.get_args(annotation):
        if (found := _section_of(argument)) is not None:
            return found
    return None


# ------------------------------------------------------------------------------------------------ roles


def result_fields(section: Section) -> dict[str, Any]:
    """The *result* fields of a section as plain data, nested sections included: what a fingerprint hashes."""
    out: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        role = (field.json_schema_extra or {}).get("role")  # type: ignore[union-attr]
        if role == "result":
            out[name] = _plain(getattr(section, name))
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return result_fields(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def dump(config: Config) -> str:
    """The resolved configuration as YAML, defaults included: loading it again gives the same `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)
