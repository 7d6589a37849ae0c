"""Progress that the library reports, and those who hear of it."""

from __future__ import annotations

import contextlib

from splatcli.progress import listening, report, track


def test_each_item_is_reported_when_it_is_done() -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *one: heard.append(one)):
        assert [(item, len(heard)) for item in track("ab", "letters")] == [("a", 1), ("b", 2)]
        assert list(track(iter("c"), "more", 1)) == ["c"]
    assert heard == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2), ("more", 0, 1), ("more", 1, 1)]


def test_the_last_listener_hears_and_nobody_is_needed() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with listening(lambda _, done, total: outer.append(done)):
        with contextlib.suppress(KeyError), listening(lambda _, done, total: inner.append(done)):
            report("a", 1, 2)
            raise KeyError
        report("a", 2, 2)
    report("a", 3, 3)
    assert (outer, inner) == ([2], [1])
