"""STS and SPS files exactly as SGLang (and TensorRT-LLM) read them (S24, S28).

Neither is read from a checkpoint by any engine: they are shipped beside it and named on the command line. The schemas
are closed: a key too many is as wrong as one missing, because readers of the original check neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import ArtifactError

STS_KEYS = ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")
SPS_KEYS = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")


def temperature_name(temperature: float) -> str:
    """`0`, `0.7`, `1`: a served temperature as it stands in file names."""
    return f"{temperature:g}"


def sts_file(calibration: Mapping[str, Any], *, block_size: int, where: str) -> dict[str, Any]:
    """The STS file of an export from a calibration file (`sts-T<t>.json` of the calibrate stage).

    Args:
        calibration: holds at least `temperatures`, one divisor per slot: confidence = sigmoid(logit / t).
        block_size: slots that predict (K); the list must be as long.
        where: file named in errors.
    Raises:
        ArtifactError: naming every problem. The power form c^(1/T) is another map and is never exported (S24).
    """
    form = calibration.get("form", "logit")
    if form != "logit":
        raise ArtifactError(
            f"{where}: fitted with the {form!r} form; engines divide logits, only that form is exported"
        )
    out = {
        "temperatures": [float(value) for value in calibration.get("temperatures", ())],
        "dataset": _text(calibration.get("dataset", "")),
        "num_samples": int(calibration.get("num_samples", 0)),
        "ece_before": _numbers(calibration.get("ece_before", ())),
        "ece_after": _numbers(calibration.get("ece_after", ())),
    }
    _refuse(where, sts_problems(out, block_size=block_size))
    return out


def sps_file(profile: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The SPS table of an export from `sps.json` of the profile stage: steps per second by forward batch in tokens."""
    out = {key: profile.get(key) for key in SPS_KEYS}
    _refuse(where, sps_problems(out))
    return out


def sts_problems(data: Mapping[str, Any], *, block_size: int) -> list[str]:
    """What an engine would trip over in an STS file; empty when it is right."""
    problems = _keys(data, STS_KEYS)
    temperatures = data.get("temperatures")
    if not isinstance(temperatures, list) or len(temperatures) != block_size:
        found = len(temperatures) if isinstance(temperatures, list) else type(temperatures).__name__
        problems.append(f"temperatures: {block_size} values expected (one per slot), found {found}")
    elif not all(_positive(value) for value in temperatures):
        problems.append(f"temperatures: all must be finite and > 0, found {temperatures}")
    for key in ("ece_before", "ece_after"):
        values = data.get(key)
        if not isinstance(values, list) or len(values) not in (0, block_size):
            problems.append(f"{key}: empty or {block_size} values expected, found {values}")
        elif not all(_number(value) and 0 <= value <= 1 for value in values):
            problems.append(f"{key}: values in [0, 1] expected, found {values}")
    if not isinstance(data.get("dataset"), str):
        problems.append(f"dataset: text expected, found {data.get('dataset')!r}")
    count = data.get("num_samples")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        problems.append(f"num_samples: a count expected, found {count!r}")
    return problems


def sps_problems(data: Mapping[str, Any]) -> list[str]:
    """What an engine would trip over in an SPS table; empty when it is right."""
    problems = _keys(data, SPS_KEYS)
    tokens, speeds = data.get("sample_batch_tokens"), data.get("sample_steps_per_sec")
    if not isinstance(tokens, list) or not isinstance(speeds, list) or not tokens or len(tokens) != len(speeds):
        return [*problems, "sample_batch_tokens and sample_steps_per_sec: two lists of the same length > 0 expected"]
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in tokens)
    if not whole or any(after <= before for before, after in zip(tokens, tokens[1:], strict=False)):
        problems.append(f"sample_batch_tokens: increasing whole numbers > 0 expected, found {tokens}")
    if not all(_positive(value) for value in speeds):
        problems.append(f"sample_steps_per_sec: all must be finite and > 0, found {speeds}")
    largest = data.get("max_batch_tokens")
    if not isinstance(largest, int) or isinstance(largest, bool) or (whole and largest < tokens[-1]):
        problems.append(f"max_batch_tokens: a whole number, at least the last sample, expected; found {largest!r}")
    return problems


def _keys(data: Mapping[str, Any], expected: Sequence[str]) -> list[str]:
    missing, extra = sorted(set(expected) - set(data)), sorted(set(data) - set(expected))
    return [f"missing keys {missing}"] * bool(missing) + [f"unknown keys {extra}"] * bool(extra)


def _refuse(where: str, problems: Sequence[str]) -> None:
    if problems:
        raise ArtifactError("\n".join(f"{where}: {problem}" for problem in problems))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _numbers(values: Any) -> list[float]:
    """A curve as floats; one with a gap (a slot without data) is left out as a whole: the schema has no null."""
    listed = list(values or ())
    return [float(value) for value in listed] if all(_number(value) for value in listed) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(str(item) for item in value)
