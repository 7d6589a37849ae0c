"""What turns the repository's Markdown into pages of the site: a hook of mkdocs (mkdocs.yml).

Pages outside docs/ join the site. Links between files of the repository become links between pages; links to files that
are no pages lead to the repository where `repo_url` is set, and are plain text otherwise. Formulas become MathML.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

#: Files outside docs/ -> their page.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/scaling.md": "scaling.md",
}

LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()#\s]*)(#[^()\s]*)?\)")
FENCE = re.compile(r"^\s*```")
#: Code, which stays; $$ ... $$ over lines; $ ... $ within one.
FORMULA = re.compile(r"(`[^`]*`)|\$\$(.+?)\$\$|(?<![\\$])\$([^$\n]+?)\$", re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text as the site needs it."""
    sources = {page: source for source, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def prose(text: str) -> str:
        text = re.sub(r"(?m)^(<!--.*-->)\n(?=\|)", r"\1\n\n", text)  # a table begins after an empty line
        text = LINK.sub(lambda found: linked(found, source, page.file.src_uri, config.repo_url), text)
        return FORMULA.sub(formula, text)

    return outside_code(nested(markdown), prose)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to what lies between fenced blocks."""
    parts: list[tuple[bool, list[str]]] = [(False, [])]
    for line in markdown.split("\n"):
        is_code, lines = parts[-1]
        if FENCE.match(line) and not is_code:
            parts.append((True, [line]))
        else:
            lines.append(line)
            if FENCE.match(line):
                parts.append((False, []))
    return "\n".join("\n".join(lines) if code else change("\n".join(lines)) for code, lines in parts if lines)


def nested(markdown: str) -> str:
    """Indent what belongs to a list item by four spaces, where GitHub takes two or three."""
    lines, width, in_fence = [], 0, False
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        item = re.match(r"([-*]|\d+\.) ", line)
        if not in_fence and item:
            width = len(item[0])
        elif line and indent == 0 and not in_fence:
            width = 0
        inside = width and indent >= width
        lines.append(" " * (4 - width) + line if inside else line)
        in_fence ^= bool(FENCE.match(line))
    return "\n".join(lines)


def linked(found: re.Match[str], source: str, page: str, repository: str | None) -> str:
    """Return a link of the file ``source`` as one of ``page``. Links that lead nowhere stay, and fail the build."""
    image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target or ":" in target:
        return found[0]
    path = os.path.normpath(PurePosixPath(source).parent / target)
    if not (ROOT / path).exists():
        return found[0]
    uri = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if uri is not None:
        there = os.path.relpath(uri, PurePosixPath(page).parent)
        return f"{image}[{text}]({there}{anchor})"
    if repository:
        return f"{image}[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
    return text if PurePosixPath(path).name in text else f"{text} (`{path}`)"


def formula(found: re.Match[str]) -> str:
    """Return MathML for a formula, and code as it is."""
    code, block, inline = found.groups()
    if code:
        return str(code)
    mathml: str = convert(block or inline, display="block" if block else "inline")
    for sign in "|*_`[]\\":  # which Markdown would take for its own
        mathml = mathml.replace(sign, f"&#x{ord(sign):X};")
    return mathml.replace("\n", " ")
