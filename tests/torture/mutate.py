"""Ways to spoil a sound file: bytes, words of a text, and nodes of a JSON document. Several at once, by chance."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

#: Whole numbers at the edges of what formats store, and beyond.
INTEGERS = [
    *(0, 1, -1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 32767, 65535, 65536, 10**6, 10**9),
    *(
        2**31 - 1,
        2**31,
        -(2**31),
        2**32 - 1,
        2**32,
        2**53 + 1,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64 - 1,
        2**64,
        10**18,
        10**30,
    ),
]
#: Floating point numbers at the edges.
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-310, 1e-30, 1e30, 3.4e38, 1e39, 1e300, math.inf, -math.inf, math.nan]
#: How texts may spell a number, and what is none.
NUMBERS = [
    *(str(i) for i in INTEGERS),
    *(repr(f) for f in FLOATS),
    *(
        "nan",
        "-nan",
        "inf",
        "NaN",
        "Infinity",
        "1e999",
        "-1e999",
        "1e-999",
        "0x10",
        "1_000",
        "1,5",
        "1.2.3",
        "--1",
        "+",
    ),
    *("", " ", "#", "a", "é", "\u0661", "½", "\ufeff", "\0", "1e", "e5", "None", "true", "9" * 400, "1" + "0" * 5000),
    "0x" + "f" * 5000,
]
#: Text for names and the like.
STRINGS = [
    *("", " ", ".", "..", "/", "../x", "/etc/passwd", "a/../../b", "C:\\x", "http://x/y", "\0", "a\0b", "\n", "\u202e"),
    *("é" * 200, "x" * 5000, "\ud800", "%s%n", "-o", "a b", "images", "images/", "nul", "~", "$HOME", "😀"),
]


def spoil_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """One to ``most`` random faults anywhere in ``data``."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, most)):
        rng.choice(_BYTE_FAULTS)(rng, spoiled)
    return bytes(spoiled)


def spoil_text(rng: random.Random, text: str, most: int = 4) -> str:
    """One to ``most`` faults in the words and lines of ``text``."""
    for _ in range(rng.randint(1, most)):
        text = rng.choice(_TEXT_FAULTS)(rng, text)
    return text


def spoil_json(rng: random.Random, document: Any, most: int = 3) -> Any:
    """A copy of a JSON document with one to ``most`` nodes replaced, removed, renamed or repeated."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, most)):
        places = list(_places(document))
        if not places:
            break
        # Half of the time one of the few nodes near the root, which a blind choice would hardly find.
        near = [place for place in places if len(place) <= 2]
        document = _spoil_at(rng, document, rng.choice(near if near and rng.random() < 0.5 else places))
    return document


def dumps(document: Any) -> bytes:
    """JSON with NaN, infinity and broken surrogates in it, as bad writers make it."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def any_value(rng: random.Random) -> Any:
    """Something JSON can hold that is unlikely to be right."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(STRINGS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice([None, True, False, [], {}, [[]], {"": {}}, [None] * 5]),
        lambda: [rng.choice(FLOATS) for _ in range(rng.randint(0, 20))],
        lambda: [[rng.choice(FLOATS) for _ in range(rng.randint(0, 5))] for _ in range(rng.randint(0, 5))],
    ]
    return rng.choice(kinds)()


# --- bytes -----------------------------------------------------------------------------------------------------------


def _flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray) -> None:
    kind = rng.choice(["<B", "<H", "<I", "<Q", ">I", "<f", "<d"])
    number = rng.choice(FLOATS) if kind[1] in "fd" else rng.choice(INTEGERS) % (1 << 8 * struct.calcsize(kind))
    try:
        piece = struct.pack(kind, number)
    except OverflowError:  # 1e39 as float32
        piece = struct.pack(kind, math.inf)
    place = rng.randrange(len(data) + 1)
    data[place : place + len(piece)] = piece


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice([1, 2, 4, 8, 12, 100])]


def _insert(rng: random.Random, data: bytearray) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.choice([1, 2, 4, 8, 100]))


def _repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = data[start : start + rng.choice([1, 4, 8, 64, 500])]


def _append(rng: random.Random, data: bytearray) -> None:
    data += rng.choice([b"\0", b"\n", bytes(100), rng.randbytes(10), bytes(data[:100])])


def _fill(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([1, 4, 8, 64, 1000]))
    data[start:end] = rng.choice([b"\0", b"\xff", b" ", b"\n"]) * (end - start)


_BYTE_FAULTS = [_flip, _flip, _overwrite, _overwrite, _cut, _remove, _insert, _repeat, _append, _fill]

# --- text ------------------------------------------------------------------------------------------------------------


def _number(rng: random.Random, text: str) -> str:
    return _replace(rng, text, r"[-+]?\d[\d.eE+-]*", NUMBERS)


def _word(rng: random.Random, text: str) -> str:
    return _replace(rng, text, r"\S+", [*NUMBERS, *STRINGS])


def _replace(rng: random.Random, text: str, pattern: str, choices: list[str]) -> str:
    found = list(re.finditer(pattern, text))
    if not found:
        return text
    match = rng.choice(found)
    return text[: match.start()] + rng.choice(choices) + text[match.end() :]


def _lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case 3:
            lines.insert(i, rng.choice(["", "#", " ", "\t", "# x", "0", "\r"]))
        case _:
            lines[i] += rng.choice([" ", " 0", " x", "\t1 2 3", " nan", "\\"])
    return "\n".join(lines)


def _whole(rng: random.Random, text: str) -> str:
    match rng.randrange(5):
        case 0:
            return text.replace("\n", "\r\n")
        case 1:
            return "\ufeff" + text
        case 2:
            return text.replace(".", ",")
        case 3:
            return text[: rng.randrange(len(text) + 1)]
        case _:
            return text.replace(" ", rng.choice(["\t", "  ", "", ", "]))


def _letter(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(["\0", "\u2028", "é", "\x1a", "\r", " ", "-", ".", "{", '"']) + text[place + 1 :]


_TEXT_FAULTS = [_number, _number, _word, _lines, _lines, _whole, _letter]

# --- JSON ------------------------------------------------------------------------------------------------------------

_Place = tuple[str | int, ...]


def _places(node: Any, above: _Place = ()) -> Iterator[_Place]:
    """Paths of all nodes below the root."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*above, key)
        yield from _places(child, (*above, key))


def _spoil_at(rng: random.Random, document: Any, place: _Place) -> Any:
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    last: Any = place[-1]
    match rng.randrange(6):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(STRINGS)] = parent.pop(last)
        case 1 | 2 if isinstance(parent, list):
            parent.insert(last, parent[last])
        case 3:
            parent[last] = [parent[last]] if rng.random() < 0.5 else {"a": parent[last]}
        case 4 if isinstance(parent[last], float | int) and not isinstance(parent[last], bool):
            parent[last] = rng.choice([*INTEGERS, *FLOATS, str(parent[last]), -parent[last], parent[last] * 1.01])
        case _:
            parent[last] = any_value(rng)
    return document
