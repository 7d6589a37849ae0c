"""The documentation as a site (mkdocs.yml, scripts/docs_site.py): it builds strictly, and reads as on GitHub."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("mkdocs", "material", "latex2mathml"):
    pytest.importorskip(package, reason="make docs installs it: pip install 'splatcli[docs]'")

ROOT = Path(__file__).resolve().parents[1]
#: What Markdown leaves in the text when it is not understood.
LEFT_OVER = re.compile(r"^(?:```|\||#+ |- ).*|\]\(.*|\*\*.*|\$\S.*", re.MULTILINE)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the site is made of, and of the files that its pages name."""
    copy = tmp_path_factory.mktemp("project") / "splatcli"
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "output", "_native_bin", "courtyard")
    shutil.copytree(ROOT, copy, ignore=leave)
    return copy


def build(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(project: Path) -> dict[str, str]:
    """Path -> HTML of each page."""
    done = build(project)
    assert done.returncode == 0, done.stderr
    folder = project / "build" / "site"
    return {str(page.relative_to(folder)): page.read_text(encoding="utf-8") for page in folder.rglob("*.html")}


def test_every_document_is_a_page(site: dict[str, str]) -> None:
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages | {"index.html", "benchmarks.html", "contributing.html", "changelog.html"} <= site.keys()


def test_markdown_is_understood(site: dict[str, str]) -> None:
    for page, text in site.items():
        article = re.search(r"<article.*?</article>", text, re.DOTALL)
        if page == "404.html":
            continue
        assert article, page
        prose = re.sub(r"<(pre|code|math)\b.*?</\1>", "", article[0], flags=re.DOTALL)
        prose = html.unescape(re.sub(r"<[^>]+>", "\n", prose))
        assert not (found := LEFT_OVER.search(prose)), f"{page}: {found[0]}"
    assert site["math.html"].count("<math ") > 300
    assert "<table>" in site["settings.html"]


def test_links_of_the_repository_lead_to_pages(site: dict[str, str]) -> None:
    assert 'href="guides/phone-video.html"' in site["index.html"]
    assert 'src="pictures/plush.webp"' in site["index.html"]
    assert 'href="benchmarks.html#the-same-bits"' in site["design.html"]
    assert 'href="../long-runs.html#exit-codes"' in site["guides/cluster.html"]
    assert 'href="design.html"' in site["contributing.html"]
    assert "own_loss.py" in site["api.html"]
    assert "examples/own_loss.py)" not in site["api.html"], "files that are no pages are named"


def test_a_page_loads_nothing_from_elsewhere(site: dict[str, str]) -> None:
    for page, text in site.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]*)", text)
        loaded += re.findall(r"<link[^>]* rel=\"?stylesheet\"?[^>]* href=\"?(https?:[^\" >]*)", text)
        assert loaded == [], page


@pytest.mark.parametrize("link", ["docs/nowhere.md", "docs/long-runs.md#nowhere"])
def test_a_link_that_leads_nowhere_fails_the_build(project: Path, link: str) -> None:
    readme = project / "README.md"
    whole = readme.read_text(encoding="utf-8")
    try:
        readme.write_text(f"{whole}\n[a]({link})\n", encoding="utf-8")
        done = build(project)
    finally:
        readme.write_text(whole, encoding="utf-8")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
