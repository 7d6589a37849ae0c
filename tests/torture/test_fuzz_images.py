"""Malformed images end in words, not in tracebacks; the harness runs with many more of them."""

from __future__ import annotations

from collections import Counter

from tests.torture.fuzz_images import figures, malformed, sound_files
from tests.torture.harness import rng_of


def test_malformed_images_are_refused_or_have_the_size_they_state() -> None:
    figure = figures(300, 1)["fuzz_images"]
    assert figure.shown == []
    assert figure.trials == 300
    # The faults are neither so coarse that nothing is decoded, nor so fine that nothing is wrong.
    assert figure.details["refused"] >= 100
    assert figure.details["read"] >= 50


def test_the_faults_are_real_and_come_to_every_format() -> None:
    changed: Counter[bytes] = Counter()
    for index in range(2_000):
        rng = rng_of(2, index)
        sound = rng.choice(sound_files())
        changed[sound[:2]] += malformed(rng, sound) != sound
    assert len(changed) >= 8
    assert min(changed.values()) >= 20
    assert changed.total() >= 1_800
