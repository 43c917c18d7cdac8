"""What sections are made of: roles, numbers that are what they look like, and checks between fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

FIELDS_ONLY = {"check": "fields only"}  # validation context: what does not go together is told elsewhere
Dtype = Literal["float32", "bfloat16"]


def _whole(value: Any) -> Any:
    """Counts are whole numbers: 4.0, "4" and true are refused rather than rounded or cast."""
    if isinstance(value, bool | float | str):
        raise ValueError("a whole number is expected")
    return value


def _number(value: Any) -> Any:
    """true is not 1.0. Text that is a number is one, as on a command line."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


def _not_tiny(value: float) -> float:
    """Logits over a smaller temperature leave fp32; whoever means the most likely token says 0."""
    if 0.0 < value < 1e-3:
        raise ValueError("0 (the most likely token) or at least 0.001 is expected")
    return value


def _apart(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Files are named by these, six digits of a number: no two may share a name."""
    names = [value if isinstance(value, str) else f"{value:g}" for value in values]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{', '.join(repeated)} stands there more than once")
    return values


def _address(value: str) -> str:
    """Whether anybody listens there is found out later; what nobody could ask is refused now."""
    try:
        parts = urlsplit(value)
        there = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        there = False
    if not there or value.split() != [value]:
        raise ValueError("a base URL such as http://host:8000/v1 is expected")
    return value


LARGEST = 2**53 - 1  # JSON holds it exactly, and 64 bits a thousand times
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[Whole, Field(ge=1)]
Natural = Annotated[Whole, Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0.0, le=1.0)]
Share = Annotated[Fraction, Field(gt=0.0)]  # nothing is no share
BelowOne = Annotated[Fraction, Field(lt=1.0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0.0, allow_inf_nan=False)]
Temperature = Annotated[NonNegative, AfterValidator(_not_tiny)]
Temperatures = Annotated[tuple[Temperature, ...], Field(min_length=1), AfterValidator(_apart)]
Address = Annotated[str, AfterValidator(_address)]
Names = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_apart)]


def result(default: Any = ..., doc: str = "", **kwargs: Any) -> Any:
    """A field that changes the result: part of every fingerprint that reads its section."""
    return Field(default, description=doc, json_schema_extra={"role": "result"}, **kwargs)


def execution(default: Any = ..., doc: str = "", **kwargs: Any) -> Any:
    """A field that only changes how the result is computed: never part of a fingerprint."""
    return Field(default, description=doc, json_schema_extra={"role": "execution"}, **kwargs)


class Clash(ValueError):
    """Values that do not go together. `problems` are told one by one."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    def problems(self) -> Iterator[str]:
        """What does not go together, where every field is right by itself."""
        return iter(())

    @model_validator(mode="after")
    def _goes_together(self, info: ValidationInfo) -> Self:
        if info.context is not FIELDS_ONLY and (found := list(self.problems())):
            raise Clash(found)
        return self
