"""``splat docs``: the manual's pages, which come with the package."""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from splatcli.cli import options
from splatcli.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class DocsArguments:
    """The arguments and options of ``splat docs``."""

    page: Annotated[
        str | None,
        typer.Argument(metavar="[PAGE]", help="Name of a page: cli, settings, edit, guides/city.", show_default=False),
    ] = None
    json: options.Json = False
    quiet: options.Quiet = False


def pages() -> dict[str, Path]:
    """Return the manual's pages by name, as ``settings`` and ``guides/city``, from the package or the checkout.

    Raises UsageError when neither has them.
    """
    for folder in (_PACKAGE / "_docs", _PACKAGE.parent / "docs"):
        found = {str(path.relative_to(folder).with_suffix("")): path for path in folder.rglob("*.md")}
        if found:
            return dict(sorted(found.items()))
    raise UsageError(
        "the manual is missing from this installation", where=_PACKAGE, remedy="install splatcli again, by its wheel"
    )


def docs(args: DocsArguments) -> int:
    """Show a page of the manual; without PAGE, list the pages.

    A terminal gets it rendered, in the pager of PAGER; a pipe or a file gets Markdown. `docs/NAME.md` in a message is
    the page NAME.

    \b
    Examples:
      splat docs
      splat docs settings
      splat docs guides/phone-video
      splat docs settings | grep -i opacity
    """
    from splatcli.cli.console import is_styled, open_output

    with open_output(json=args.json, quiet=args.quiet) as out:
        found = pages()
        if args.page is None:
            titles = {name: _title(path) for name, path in found.items()}
            widest = max(map(len, titles))
            out.result({"pages": titles}, (f"{name:{widest}}  {title}" for name, title in titles.items()))
            return 0
        name = re.sub(r"^(\./)?docs/|\.md$", "", args.page)
        if name not in found and f"guides/{name}" in found:
            name = f"guides/{name}"
        if name not in found:
            near, on = difflib.get_close_matches(name, found, n=1), _pages_on(name, found)
            remedy = f"did you mean {near[0]}?" if near else "splat docs lists the pages"
            if on and not near:
                remedy = f"perhaps {' or '.join(on)}; {remedy}"
            raise UsageError("the manual has no such page", where=args.page, remedy=remedy)
        text = found[name].read_text(encoding="utf-8")
        if is_styled(sys.stdout) and not args.json:
            _show(text)
        else:
            out.result({"page": name, "text": text}, [text.rstrip("\n")])
    return 0


def _pages_on(word: str, found: dict[str, Path]) -> list[str]:
    """Return the pages whose titles have a word that begins with ``word``."""
    return [
        name
        for name, path in found.items()
        if word and any(one.startswith(word.lower()) for one in re.findall(r"\w+", _title(path).lower()))
    ]


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return next((line[2:].strip() for line in file if line.startswith("# ")), path.stem)


def _show(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "FRX")  # as git: colours pass, and a short text stays on the screen
    console = Console()
    width = min(console.width, 100)
    # A link shows its text: the address of a page in a folder says nothing.
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    with console.pager(styles=True):
        console.print(Markdown(plain, hyperlinks=False), width=width)
