"""What the documents say is so: commands, settings, and the commands that the README tells people to type."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from splatcli.config import Config, flat_settings
from splatcli.errors import SplatError
from tests.cli.tiny import QUICK, write_scene

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_the_reference_pages_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "docs_reference.py"))
    for page, text in script["fresh_pages"]().items():
        assert page.read_text(encoding="utf-8") == text, "run make docs-reference"


@pytest.mark.parametrize(
    "command", ["train", "sfm", "resume", "render", "export", "edit", "view", "eval", "compare", "info"]
)
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


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    found: dict[str, int] = {}
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if not number else f"{name}-{number}" for name, count in found.items() for number in range(count + 1)}


def test_links_between_documents_lead_somewhere() -> None:
    checked = 0
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/*.md")]:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"
                checked += 1
    assert checked > 20


def runnable_blocks(page: Path) -> list[str]:
    """The shell blocks that a ``<!-- tested -->`` line precedes."""
    return re.findall(r"<!-- tested -->\n```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def quick(block: str) -> str:
    """``block`` with the settings that make training quick: real runs take minutes."""
    block = block.replace("[1,4,7,10]", "[1,4,7]").replace("480x360", "48x36")  # the tiny scene has ten small images
    block = re.sub(r" (-n|--iterations|--cap-max|--max-time|-r) \S+", "", block)
    return re.sub(r"(splat train \w+/)", rf"\1 {' '.join(QUICK)} --iterations 30", block)


def needs(block: str, folder: Path) -> None:
    """Skip the test where a program of ``block`` is not installed; ffmpeg may be the one of imageio-ffmpeg."""
    with contextlib.suppress(ImportError, RuntimeError):
        import imageio_ffmpeg

        (folder / ".bin" / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    for program in ("jq", "ffmpeg"):
        if re.search(rf"\b{program} ", block) and not (shutil.which(program) or (folder / ".bin" / program).exists()):
            pytest.skip(f"{program} is not installed")


def test_the_readme_has_tested_commands_and_is_short() -> None:
    assert len(runnable_blocks(ROOT / "README.md")) > 2
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.parametrize("block", runnable_blocks(ROOT / "README.md"), ids=lambda block: block.split("\n")[0])
def test_commands_of_the_readme_work(block: str, shell: Callable[..., Any], tmp_path: Path) -> None:
    needs(block, tmp_path)
    for scene in set(re.findall(r"splat train (\w+)/", block)):
        write_scene(tmp_path / scene)
    done = shell(f"set -euo pipefail\n{quick(block)}")
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    for moving in tmp_path.glob("*.webp"):
        with Image.open(moving) as picture:
            assert picture.size == (48, 36)
            assert picture.n_frames > 100  # equal frames become one


def test_moving_pictures_are_small() -> None:
    (picture,) = (DOCS / "pictures").glob("*.webp")
    assert picture.stat().st_size < 1_500_000
    with Image.open(picture) as moving:
        assert moving.size[0] <= 480
        assert moving.n_frames > 50


def test_source_files_that_the_documents_name_exist() -> None:
    for page in [ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for name in re.findall(r"`([\w/]+/\w+\.(?:py|h|cuh|cpp|cu))`", page.read_text(encoding="utf-8")):
            places = [ROOT / name, ROOT / "splatcli" / name]
            assert any(place.exists() for place in places), f"{page.name} names {name}"


def test_the_tree_has_every_part_of_the_package_and_nothing_else() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    tree = page.partition("```\nsplatcli/\n")[2].partition("```")[0].partition("\ncuda/\n")[0]
    named = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    there = [path for path in (ROOT / "splatcli").iterdir() if not path.name.startswith(("_", "."))]
    package = [f"{path.name}/" if path.is_dir() else path.name for path in there if path.suffix in ("", ".py")]
    assert sorted(named) == sorted(package)


def test_the_walk_through_the_code_names_files_and_functions_that_exist() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    walk = page.partition("\n## From the command to the kernel and back\n")[2].partition("\n## ")[0]
    assert check_names(re.findall(r"^\| \d+\. [^|]*\|[^|]*\|([^|]*)\|$", walk, re.MULTILINE)) > 40


def test_the_names_of_other_programs_are_translated_to_names_that_exist() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    table = page.partition("\n| there | here |\n|---|---|\n")[2].partition("\n\n")[0]
    assert check_names(re.findall(r"^\|[^|]*\|([^|]*)\|$", table, re.MULTILINE)) > 20


def check_names(cells: list[str]) -> int:
    """Check that the files and names of each cell exist, names in the file before them; return how many there are."""
    sources = {
        path: path.read_text(encoding="utf-8") for path in [*ROOT.glob("splatcli/**/*.py"), *ROOT.glob("cuda/**/*.*")]
    }
    everything = "\n".join(sources.values())
    checked = 0
    for cell in cells:
        file = None
        for name in re.findall(r"`([^`]+)`", cell):
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
    return checked
