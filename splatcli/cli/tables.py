"""Tables for results on a terminal; pipes and files get plain lines (console.Output.result)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Words at the start of a line of a cell, and their style.
_STYLES = {
    r"(works|found)\b": "green",
    r"(not installed|unavailable|WARNING)\b": "yellow",
    r"DOES NOT WORK\b": "bold red",
    r"help: .*": "cyan",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. heads: of the columns; without them the first column names the second."""

    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    title: str = ""


def of_lines(lines: Sequence[str], indent: int) -> Table:
    """Return the table of lines ``name    value``; a line without a name belongs to the one before.

    indent: the column where values begin.
    """
    rows: list[list[str]] = []
    for line in lines:
        name, value = line[:indent].strip(), line[indent:]
        if name or not rows:
            rows.append([name, value])
        else:
            rows[-1][1] += f"\n{value}"
    return Table(rows)


def of_markdown(lines: Sequence[str]) -> Table:
    """Return the table of a Markdown table."""
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return Table(rows, heads)


def draw(tables: Sequence[Table], width: int) -> str:
    """Return tables with lines and colours of a terminal of this many columns; long text is wrapped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    target = io.StringIO()
    console = Console(file=target, force_terminal=True, width=width, highlight=False)
    for table in tables:
        shown = RichTable(
            box=box.ROUNDED,
            border_style="dim",
            show_header=bool(table.heads),
            title=table.title or None,
            title_justify="left",
        )
        columns = len(table.heads or table.rows[0])
        for index in range(columns):
            numbers = all(re.match(r"[\d.,]*$|[\d.,]+ ", row[index]) for row in table.rows)
            name = not table.heads and index == 0
            shown.add_column(
                table.heads[index] if table.heads else "",
                justify="right" if numbers and table.heads else "left",
                style="bold" if name else "",
                no_wrap=name,
                overflow="fold",
            )
        for row in table.rows:
            cells = [Text(cell) for cell in row]
            for text in cells:
                for pattern, style in _STYLES.items():
                    text.highlight_regex(rf"(?m)^{pattern}", style)
            shown.add_row(*cells)
        console.print(shown)
    return target.getvalue()
