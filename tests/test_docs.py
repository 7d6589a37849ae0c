"""What the documents say is so: commands, settings, and the commands that the README tells people to type."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splatcli.config import Config, flat_settings
from splatcli.errors import SplatError
from tests.cli.tiny import QUICK, write_scene

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_the_reference_pages_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "docs_reference.py"))
    for page, text in script["fresh_pages"]().items():
        assert page.read_text(encoding="utf-8") == text, "run make docs-reference"


@pytest.mark.parametrize("command", ["train", "sfm", "resume", "render", "export", "view", "eval", "info"])
def test_each_command_has_a_section_with_an_example(command: str) -> None:
    section = (
        (DOCS / "cli.md").read_text(encoding="utf-8").partition(f"\n## splat {command}\n")[2].partition("\n## ")[0]
    )
    assert section, f"docs/cli.md has no section on {command}"
    assert f"splat {command} " in section.partition("```sh\n")[2]


def test_every_exit_code_is_documented() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for kind in [SplatError, *SplatError.__subclasses__()]:
        assert re.search(rf"^\| {kind.exit_code} \|", text, re.MULTILINE), kind


def test_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| (?:`(.*?)`|none) \|", (DOCS / "settings.md").read_text(encoding="utf-8"), re.M
    )
    reported = {key: json.loads(value) if value else None for key, value in rows}
    # Through JSON, so that a tuple compares with a list.
    assert reported == json.loads(json.dumps(flat_settings(Config())))


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def runnable_blocks(page: Path) -> list[str]:
    """The shell blocks that a ``<!-- tested -->`` line precedes."""
    return re.findall(r"<!-- tested -->\n```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_has_tested_commands() -> None:
    assert runnable_blocks(ROOT / "README.md")


@pytest.mark.parametrize("block", runnable_blocks(ROOT / "README.md"), ids=lambda block: block.split("\n")[0])
def test_commands_of_the_readme_work(block: str, shell: Callable[..., Any], tmp_path: Path) -> None:
    write_scene(tmp_path / "scene")
    # Real runs take minutes; here each training command gets the settings that make it quick.
    quick = re.sub(r"(splat train scene/)", rf"\1 {' '.join(QUICK)} --iterations 30", block)
    done = shell(f"set -euo pipefail\n{quick}")
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    shutil.rmtree(tmp_path / "scene")


def test_source_files_that_the_documents_name_exist() -> None:
    for page in [ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        for name in re.findall(r"`([\w/]+/\w+\.(?:py|h|cuh|cpp|cu))`", page.read_text(encoding="utf-8")):
            places = [ROOT / name, ROOT / "splatcli" / name]
            assert any(place.exists() for place in places), f"{page.name} names {name}"


def test_the_walk_through_the_code_names_files_and_functions_that_exist() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    walk = page.partition("\n## From the command to the kernel and back\n")[2].partition("\n## ")[0]
    sources = {
        path: path.read_text(encoding="utf-8") for path in [*ROOT.glob("splatcli/**/*.py"), *ROOT.glob("cuda/**/*.*")]
    }
    everything = "\n".join(sources.values())
    checked = 0
    for row in re.findall(r"^\| \d+\. [^|]*\|[^|]*\|([^|]*)\|$", walk, re.MULTILINE):
        file = None
        for name in re.findall(r"`([^`]+)`", row):
            if "/" in name or name.endswith(".py"):
                file = ROOT / ("" if name.startswith("cuda/") else "splatcli") / name
                assert file in sources, f"docs/design.md names {name}, which does not exist"
            elif not name.endswith("_*"):
                kind, _, last = name.rpartition(".")
                # A class without its file is in the file of another stop.
                here = (
                    everything
                    if file is None or name.startswith("splat_") or (kind and f"class {kind}" not in sources[file])
                    else sources[file]
                )
                assert re.search(rf"\b{last}\b", here), f"{file and file.name} has no {name}"
                checked += 1
    assert checked > 40
