"""Section: the checks of every field in a group of settings. Flag: a field's flag on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Flag:
    """A flag of the command line that sets the field of Config that it is attached to.

    names: with their dashes. metavar: stands for the value in the help; a flag without one is a switch.
    help: None takes the field's description. default: what happens without the flag; None takes the field's default.
    value: what a switch sets. type: how the command line reads the value; None takes the field's type.
    panel: the heading of the help that the flag is listed under; None takes the section's.
    """

    def __init__(
        self,
        *names: str,
        metavar: str | None = None,
        help: str | None = None,
        default: str | None = None,
        value: object = True,
        type: type | None = None,
        panel: str | None = None,
    ) -> None:
        self.names = names
        self.metavar = metavar
        self.help = help
        self.default = default
        self.value = value
        self.type = type
        self.panel = panel


def _takes_text(kinds: Iterable[Any]) -> bool:
    """Return whether one of the types of a setting is str, also with bounds."""
    return any(str in (kind, get_origin(kind), *get_args(kind)[:1]) for kind in kinds)


class Section(BaseModel):
    """Settings of one subject; ``panel`` is the heading that their flags have in the help."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    panel: ClassVar[str] = "Quality"

    @field_validator("*", mode="before")
    @classmethod
    def _may_be_none(cls, value: object, info: ValidationInfo) -> object:
        """Take "none" for None where no text is expected: neither TOML nor a shell can say None."""
        kinds = get_args(cls.model_fields[info.field_name or ""].annotation)
        return None if value == "none" and type(None) in kinds and not _takes_text(kinds) else value

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for numbers: pydantic takes them as 1 and 0."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("takes neither true nor false")
        return value

    @field_validator("*")
    @classmethod
    def _fits(cls, value: object) -> object:
        """Refuse whole numbers beyond 64 bits: Python would store thousands of digits and not read them again."""
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, int) and number.bit_length() > 64 for number in numbers):
            raise ValueError("takes whole numbers of up to 64 bits")
        return value
