"""Malformed settings: TOML files and --set words, spoiled as text, and with odd values under keys that exist."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from splatcli.config import Config, build_config, flat_settings, parse_config
from tests.torture.harness import Case, Figure, fuzz, main, refused, rng_of
from tests.torture.mutate import FLOATS, INTEGERS, NUMBERS, STRINGS, spoil_bytes, spoil_text

_DEFAULTS = {key: value for key, value in flat_settings(Config()).items() if value is not None}


def figures(count: int, seed: int) -> dict[str, Figure]:
    what = (
        "a malformed settings file, and odd --set words with it, make the settings of a run; they are refused with a "
        "message, or in range and stored without loss"
    )
    return fuzz("fuzz_config", what, case_of, count, seed)


def case_of(seed: int, folder: Path) -> Case:
    path = folder / "fuzz.toml"

    def case(index: int) -> str:
        rng = rng_of(seed, index)
        path.write_bytes(malformed(rng))
        words = [assignment(rng) for _ in range(rng.choice([0, 0, 0, 1]))]
        return "refused" if refused(lambda: _read(path, words)) else "read"

    return case


def _read(path: Path, words: list[str]) -> None:
    config = build_config({"train.iterations": None}, file=path, assignments=words)
    stored = config.model_dump_json()
    assert parse_config(json.loads(stored)) == config
    stored.encode()


def malformed(rng: random.Random) -> bytes:
    """A settings file with some of the keys, and faults in values, in words, in bytes, or in several of them."""
    values = dict(rng.sample(sorted(_DEFAULTS.items()), rng.randint(1, 12)))
    way = rng.random()
    if way < 0.4:
        for key in rng.sample(sorted(values), min(len(values), rng.randint(1, 2))):
            values[key] = _odd(rng)
    text = _toml(values)
    if way < 0.02:
        depth = rng.choice([10, 900, 1100, 50_000])
        return f"[save]\nsteps = {'[' * depth}{']' * depth if rng.random() < 0.5 else ''}\n".encode()
    if way > 0.3:
        text = spoil_text(rng, text, most=2)
    content = text.encode("utf-8", "surrogatepass")
    return spoil_bytes(rng, content) if way > 0.8 else content


def assignment(rng: random.Random) -> str:
    key = rng.choice([*_DEFAULTS, *_DEFAULTS, "", "train", "train.", "train.iterations.x", *STRINGS])
    value = rng.choice([_literal(_odd(rng)), *rng.sample(NUMBERS, 2), *rng.sample(STRINGS, 2)])
    word = f"{key}{rng.choice(['=', '=', '=', ' = ', '==', ''])}{value}"
    # As a command line gives them: without NUL, other bytes as surrogates of the lower half.
    return word.replace("\0", "0").replace("\ud800", "\udcff")


def _odd(rng: random.Random) -> Any:
    return rng.choice(
        [
            rng.choice(INTEGERS),
            rng.choice(FLOATS),
            rng.choice(STRINGS),
            rng.choice([True, False, [], [1, 2.5, "a"], [[[]]], list(range(rng.choice([3, 3000])))]),
        ]
    )


def _toml(values: dict[str, Any]) -> str:
    lines, section = [], ""
    for key, value in values.items():
        above, _, name = key.rpartition(".")
        if above != section:
            lines.append(f"[{above}]")
            section = above
        lines.append(f"{name} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


if __name__ == "__main__":
    main(figures, 100_000)
