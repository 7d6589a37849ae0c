"""Sizes in bytes are read as people write them, and a number without a unit is not guessed at."""

from __future__ import annotations

import pytest

from splatcli.sizes import counted, evenly, gib, listed, parse_count, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("8 gb", 8_000_000_000),
        ("1.5GiB", 3 << 29),
        ("800M", 800 << 20),
        ("800MB", 800_000_000),
        ("1T", 1 << 40),
        ("2000kB", 2_000_000),
        ("2147483648", 2 << 30),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8", "0", "", "many", "-8G", "8X", "1e9", "G", "0.5M", "nan"])
def test_what_is_no_size_is_refused_with_the_known_forms(text: str) -> None:
    with pytest.raises(ValueError, match="8GiB, 8GB, 800M"):
        parse_size(text)


def test_a_smaller_size_is_read_where_it_may_be() -> None:
    assert parse_size("800kB", least=1000) == 800_000
    with pytest.raises(ValueError, match="less than 1,000 bytes"):
        parse_size("8", least=1000)


def test_what_is_no_text_is_left_as_it_is() -> None:
    assert parse_size(7) == 7
    assert parse_size(None) is None


def test_sizes_are_reported_in_two_units() -> None:
    assert gib(3 << 29) == "1.5 GiB"
    assert gib(10 << 20) == "10.0 MiB"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("30k", 30_000), ("30K", 30_000), ("1M", 1_000_000), ("1.5m", 1_500_000), ("30000", "30000"), (7, 7)),
        *(("3e4", 30_000), ("1.5E6", 1_500_000), ("2e+3", 2_000)),
    ],
)
def test_counts_have_suffixes(text: object, count: object) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["k", "1.0005k", "1kk", "-1k", "1e3k", "1e-3", "1.5e0", "1e999", "auto", "1 G"])
def test_other_texts_are_no_counts(text: str) -> None:
    assert parse_count(text) == text


def test_a_count_stands_with_its_noun() -> None:
    texts = [counted(n, "image") for n in (0, 1, 2, 12_345)]
    assert texts == ["0 images", "1 image", "2 images", "12,345 images"]
    assert [counted(n, "view has", "views have") for n in (1, 3)] == ["1 view has", "3 views have"]


@pytest.mark.parametrize(
    ("names", "separator", "text"),
    [
        ([], ", ", ""),
        (["a"], ", ", "a"),
        (["a", "b"], ", ", "a, b"),
        ([1, 2, 3], ", ", "1, 2, and 1 more"),
        (["a"] * 1002, "; ", "a; a; and 1,000 more"),
    ],
)
def test_a_list_names_the_first_and_counts_the_others(names: list[object], separator: str, text: str) -> None:
    assert listed(names, 2, separator) == text


@pytest.mark.parametrize(
    ("count", "most", "from_first", "to_last"),
    [
        (0, 3, [], []),
        (5, 1, [0], [0]),
        (3, 8, [0, 1, 2], [0, 1, 2]),
        (10, 4, [0, 2, 5, 7], [0, 3, 6, 9]),
        (100, 3, [0, 33, 66], [0, 50, 99]),
    ],
)
def test_a_few_of_many_are_evenly_spaced(count: int, most: int, from_first: list[int], to_last: list[int]) -> None:
    assert evenly(range(count), most) == from_first
    assert evenly(range(count), most, ends=True) == to_last
