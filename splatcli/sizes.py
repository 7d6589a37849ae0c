"""Parse and format numbers of bytes and counts; shorten lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

#: A smaller size is a mistake: usually its unit is missing.
_LEAST = 1 << 20

#: A letter alone is a power of 1024, as graphics cards are sold.
_UNITS = {"": 1, "k": 1 << 10, "kib": 1 << 10, "kb": 1000}
_UNITS |= {"m": 1 << 20, "mib": 1 << 20, "mb": 10**6, "g": 1 << 30, "gib": 1 << 30, "gb": 10**9}
_UNITS |= {"t": 1 << 40, "tib": 1 << 40, "tb": 10**12}


def parse_size(value: object, least: int = _LEAST) -> object:
    """Return the bytes of ``"8GiB"``, ``"8G"`` (the same), ``"8GB"`` (8e9) or ``"800M"``; other types as they are.

    Raises ValueError for other texts, and for fewer than ``least`` bytes.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError("a size is a number with a unit: 8GiB, 8GB, 800M")
    size = round(float(found[1]) * _UNITS[found[2]])
    if size < least:
        shortest = "a mebibyte (1MiB)" if least == _LEAST else f"{least:,} bytes"
        raise ValueError(f"{value} is less than {shortest}; a size needs its unit: 8GiB, 8GB, 800M")
    return size


def parse_count(value: object) -> object:
    """Return the number of ``"30k"``, ``"1.5M"`` (powers of 1000) or ``"3e4"``; other values as they are."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)(?:\s*([kKmM])|[eE]\+?([0-9]{1,2}))\s*", value)
    if found is None:
        return value
    exponent = int(found[3]) if found[3] else 3 if found[2] in "kK" else 6
    count = float(found[1]) * 10**exponent
    return int(count) if count.is_integer() else value


def counted(count: int, one: str, several: str = "") -> str:
    """Return ``1 image``, or ``2 images``.

    one: the noun, which a verb may follow ("image has"). several: its plural where that is not one more s.
    """
    return f"1 {one}" if count == 1 else f"{count:,} {several or one + 's'}"


def gib(count: int) -> str:
    """Return ``1.5 GiB``, or MiB where that is less than a tenth of a GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.1f} MiB"


def listed(names: Iterable[object], limit: int, separator: str = ", ") -> str:
    """Return the first ``limit`` names on one line, and how many more there are: ``a, b, and 3 more``."""
    first = list(map(str, names))
    more = [f"and {len(first) - limit:,} more"] if len(first) > limit else []
    return separator.join([*first[:limit], *more])


def evenly(items: Sequence[Item], most: int, *, ends: bool = False) -> list[Item]:
    """Return at most ``most`` of ``items``, evenly spaced, the first among them; with ``ends`` the last one, too."""
    count = min(most, len(items))
    if ends and count > 1:
        return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
    return [items[i * len(items) // count] for i in range(count)]
