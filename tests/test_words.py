"""The code and the documents speak the field's words: a reader who searches for gsplat's or COLMAP's term finds it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("splatcli", "cuda", "scripts", "tests", "docs", "examples", "benchmarks")
KINDS = {".py", ".md", ".h", ".cpp", ".cu", ".cuh"}

#: Parts of identifiers that are retired, and the word instead.
NAMES = {
    "agreed_wish": "sync_stop_request",
    "allowance": "budget",
    "begin_together": "check_agreement",
    "bystander": "read-only checkpointer",
    "crew": "process group",
    "crowd": "intersection overflow",
    "crowding": "intersections",
    "found_together": "raise_on_all",
    "keeper": "checkpointer",
    "largest_and_rest": "smallest_three",
    "line_pairs": "tile_row_isects",
    "looked_at": "gather_geometry, or inspected",
    "most_of_all": "all_reduce_max",
    "odd_ones": "minority",
    "onlookers": "viewers",
    "pacer": "step time model",
    "pair_bound": "max_isects",
    "pair_masks": "isect_masks",
    "pair_records": "projected Gaussians of the intersections",
    "refilter": "update_filter_3d",
    "rest_bytes": "shN_bytes",
    "rest_steps": "sh_last_step",
    "roomy": "round_capacity",
    "settle": "flush, or estimate_view_dependence",
    "sh_rest": "shN, or SHN_COUNTS",
    "share_out": "redistribute",
    "shoot": "render_view",
    "studio": "view renderer",
    "take_logs": "to_raw",
    "told": "reported",
    "untold": "pending",
    "wish": "request",
    "wishes": "overrides, options",
}

#: Phrases that are retired in comments, docstrings, messages and documents, and what to say instead.
PHRASES = {
    r"\btold\b": "reported, known, distinguished",
    r"\blooked at\b": "inspected, read, checked",
    r"\b[Ww]hoever\b": "name the one",
    r"\bonlookers?\b": "viewers",
    r"\bthe bits of\b": "bit-identical to",
    r"\b[Tt]ile pairs?\b": "tile intersections",
    r"\blines? of tiles\b": "tile rows",
    r"\bthe crew\b": "the process group",
}

#: Openings of docstrings that are retired in the package.
OPENINGS = re.compile(r'"""(What|Whoever|Whatever|Of those|Those|That which) ')

#: Files whose words are not ours, or whose subject they are.
EXEMPT = {"tests/test_words.py", "tests/golden/digests.json"}


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT).as_posix()
            if path.suffix in KINDS and inside not in EXEMPT and "splatcli/formats/viewer/" not in inside:
                yield path
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


def identifiers(path: Path, text: str) -> Iterator[tuple[int, str]]:
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
    elif path.suffix != ".md":
        for number, line in enumerate(text.splitlines(), 1):
            for word in re.findall(r"\b[A-Za-z_]\w*", line):
                yield number, word


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower().strip("_")


def findings() -> Iterator[str]:
    retired = re.compile(rf"(?:^|_)({'|'.join(NAMES)})(?:_|$)")
    phrases = [(re.compile(pattern), better) for pattern, better in PHRASES.items()]
    for path in sources():
        text, inside = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        for number, name in identifiers(path, text):
            if (found := retired.search(snake(name))) is not None:
                yield f"{inside}:{number}: {name}; better: {NAMES[found[1]]}"
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, better in phrases:
                if (found := pattern.search(line)) is not None:
                    yield f"{inside}:{number}: {found[0]!r}; better: {better}"
            if inside.parts[0] == "splatcli" and (found := OPENINGS.search(line)) is not None:
                yield f"{inside}:{number}: {found[0]!r}; better: the subject first: Return, Raise, a noun"


def test_retired_words_stay_out() -> None:
    found = list(findings())
    assert not found, f"{len(found)} places:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("name", ["agreed_wish", "_Crew", "ReadKeeper", "untold"])
def test_a_retired_name_is_found_in_any_spelling(name: str) -> None:
    assert re.search(rf"(?:^|_)({'|'.join(NAMES)})(?:_|$)", snake(name))
