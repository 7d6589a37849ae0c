"""Lines of text files that may be large: read as they are, with progress."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from splatcli.progress import report

#: Bytes between two reports.
_REPORT_BYTES = 4_000_000


def lines_of(path: Path) -> Iterator[str]:
    """Yield each line of a file with its end.

    Bytes that are no UTF-8 become surrogates, so that they do not end the search for a faulty line; a byte order mark
    is no part of the text.
    """
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file,
    ):
        size, reported = path.stat().st_size, 0
        for line in file:
            yield line
            if raw.tell() - reported > _REPORT_BYTES:
                reported = raw.tell()
                report(f"reading {path.name}, MB", reported // 1_000_000, size // 1_000_000)
        if reported:
            report(f"reading {path.name}, MB", size // 1_000_000, size // 1_000_000)
