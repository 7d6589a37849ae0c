"""The help: flags under headings, in panels on a terminal and plain elsewhere, and the guide of ``splat`` alone."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeVar

from splatcli.cli.console import is_styled

GUIDE = """\
splat turns photos or a video into 3D Gaussian splats, shows and exports them.

A first session:
  splat demo --view           train the sample scene for a minute, and view it
  splat doctor                check this machine
  splat train photos/         train on images, a video or a COLMAP scene
  splat view                  look at the newest run in a browser
  splat render --views        render the held-out views, and score them
  splat export -o scene.ply   write a file for other viewers (or .spz, .html)

Where to go next:
  splat --help                all commands
  splat train --help          everyday flags of a command; --help-all: all flags
  splat --install-completion  complete commands and flags with Tab in this shell
  splat docs                  the manual; splat docs cli: the command line
"""

#: Headings in the order of the help. Other headings stand before the last one.
PANELS = ("Arguments", "Options", "Essentials", "Data", "Quality", "Memory", "Several processes", "Viewer", "Expert")

#: Name and help of each line of a heading.
Records = list[tuple[str, str]]

Lines = TypeVar("Lines")

_RESET, _BORDER, _TITLE, _NAME, _DEFAULT = "\x1b[0m", "\x1b[2m", "\x1b[1m", "\x1b[1;36m", "\x1b[2m"

#: Columns of a name; the help of a longer one begins on the next line.
_MAX_NAME = 26


def in_order(panels: dict[str, Lines]) -> list[tuple[str, Lines]]:
    """Return headings and their lines in the order of the help."""
    last = len(PANELS) - 1.5
    return sorted(panels.items(), key=lambda one: PANELS.index(one[0]) if one[0] in PANELS else last)


def write_panels(formatter: Any, panels: dict[str, Records]) -> None:
    """Write headings with their lines: boxes with colour on a terminal, else plain sections."""
    if not _fits_boxes(formatter.width):
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
        return
    formatter.write("\n")
    for title, records in panels.items():
        for line in panel_lines(title, records, formatter.width):
            formatter.write(line + "\n")


def folded(command: str, width: int) -> Iterator[str]:
    """Yield the lines of an indented shell command, continued with a backslash where it is longer than ``width``.

    A flag and its value, and text in quotes, stay on one line.
    """
    indent = command[: len(command) - len(command.lstrip())]
    words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", command)
    pieces = [words[0]] if words else [""]
    for before, word in pairwise(words):
        if before.startswith("-") and not word.startswith(("-", "|", "&", ">")):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    line = indent + pieces[0]
    for number, piece in enumerate(pieces[1:], 2):
        room = width if number == len(pieces) else width - 2  # of the backslash
        if len(line) + 1 + len(piece) <= room:
            line += f" {piece}"
        else:
            yield f"{line} \\"
            line = f"{indent}    {piece}"
    yield line


def _fits_boxes(width: int) -> bool:
    """Return whether stdout is a terminal that shows boxes of ``width`` columns."""
    can_encode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    return is_styled(sys.stdout) and can_encode and shutil.get_terminal_size().columns >= width


def panel_lines(title: str, records: Records, width: int) -> Iterator[str]:
    """Yield the lines of a box of ``width`` columns."""
    indent = min(_MAX_NAME, max(len(name) for name, _ in records)) + 2
    room = width - 4
    yield f"{_BORDER}╭─{_RESET} {_TITLE}{title}{_RESET} {_BORDER}{'─' * (width - len(title) - 5)}╮{_RESET}"
    for name, text in records:
        rows = textwrap.wrap(text, max(20, room - indent), break_on_hyphens=False)
        if len(name) > indent - 2:
            yield from (_row(part, part, room, name=True) for part in textwrap.wrap(name, room))
        else:
            first = rows.pop(0) if rows else ""
            plain = f"{name:<{indent}}{first}"
            yield _row(plain, f"{_NAME}{name}{_RESET}{' ' * (indent - len(name))}{_dim_default(first)}", room)
        yield from (_row(f"{'':{indent}}{row}", f"{'':{indent}}{_dim_default(row)}", room) for row in rows)
    yield f"{_BORDER}╰{'─' * (width - 2)}╯{_RESET}"


def _row(plain: str, shown: str, room: int, *, name: bool = False) -> str:
    """Return a line of a box. plain: the text without colour, which has the length that is seen."""
    text = f"{_NAME}{shown}{_RESET}" if name else shown
    return f"{_BORDER}│{_RESET} {text}{' ' * max(0, room - len(plain))} {_BORDER}│{_RESET}"


def _dim_default(text: str) -> str:
    return re.sub(r"\[(?:default|required)[^]]*\]?", lambda found: f"{_DEFAULT}{found[0]}{_RESET}", text)
