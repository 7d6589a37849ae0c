"""Plain words for values that pydantic refuses, in settings and in the files that are read with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

#: Types of pydantic's errors -> what is expected. {0} is the limit that the error names.
_EXPECTED = {
    "greater_than": "a number above {0}",
    "greater_than_equal": "a number of at least {0}",
    "less_than": "a number below {0}",
    "less_than_equal": "a number of at most {0}",
    "multiple_of": "a multiple of {0}",
    "finite_number": "a finite number",
    "string_too_short": "a text of at least {0} characters",
    "string_too_long": "a text of at most {0} characters",
    "too_short": "a list of at least {0} values",
    "too_long": "a list of at most {0} values",
    "literal_error": "{0}",
}
#: The same by the beginning of the type.
_KINDS = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "a text",
    "bytes_": "bytes",
    "list_": "a list",
    "tuple_": "a list",
    "dict_": "a table",
    "model_": "a table",
    "mapping_": "a table",
    "json_": "JSON",
}
#: What patterns of texts take.
_PATTERNS = {r"^\w[\w.-]*$": "a name of letters, digits, _, - and ."}


def fault(error: ErrorDetails) -> str:
    """Return what is wrong with a value that pydantic refuses, after its name: ``expected a whole number``."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("too_short", "too_long") and isinstance(error["input"], str):
        kind = f"string_{kind}"
    if kind == "missing":
        return "it is missing"
    if kind == "extra_forbidden":
        return "there is nothing of this name"
    if kind == "string_pattern_mismatch" and context.get("pattern") in _PATTERNS:
        return f"expected {_PATTERNS[context['pattern']]}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind].format(_limit(context))}"
    if kind == "none_required":
        return "expected none"
    found = next((words for start, words in _KINDS.items() if kind.startswith(start) and kind != "json_invalid"), None)
    # Those of validators of our own are plain already.
    return f"expected {found}" if found else error["msg"].removeprefix("Value error, ")


def first_fault(error: ValidationError, whole: str) -> str:
    """Return the first fault of what pydantic refuses, after its place: ``lods.0: expected a table``.

    whole: stands for the place where the value as a whole is wrong.
    """
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or whole
    return f"{place[:100]}: {fault(first)[:200]}"


def _limit(context: dict[str, Any]) -> str:
    """Return the limit or the choices that an error names."""
    names = ("gt", "ge", "lt", "le", "multiple_of", "expected", "min_length", "max_length")
    limit = next((context[name] for name in names if name in context), "")
    return re.sub(r"'([^']*)'", r"\1", limit) if isinstance(limit, str) else f"{limit:g}"
