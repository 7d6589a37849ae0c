"""Imports run one way, so that a change cannot reach further than the tree says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import shape

PACKAGE = Path(__file__).resolve().parents[1] / "splatcli"

#: From the top down; a module may import its own part and those of lower layers. Parts of one layer are listed in the
#: order in which they may use each other.
LAYERS = (
    ("cli",),
    ("gsplat", "api"),
    ("viewer", "mesh", "render", "train", "sfm", "edit", "formats", "doctor", "bench", "lightning"),
    ("rasterizer", "output_files", "checkpoint"),
    ("native", "scene", "distributed"),
    ("gaussians", "sh", "rotation", "similarity", "reproducible", "config", "plugins"),
    ("errors", "machine", "darwin", "disk", "sizes", "progress"),
)
RANK = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
HEAVY = {"torch", "numpy", "pydantic", "scipy", "pycolmap", "PIL", "imageio", "plyfile"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """The absolute names that a module imports, outside TYPE_CHECKING blocks."""
    pending: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_no_higher_layer(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    assert part in RANK, f"{part} has no place among the layers"
    used = {name.split(".")[1] for name in imports(path) if name.startswith("splatcli.")} - {part, "__version__"}
    higher = sorted(other for other in used if RANK[other] < RANK[part])
    assert not higher, f"{path.name} of {part} imports {higher}"


def test_parts_form_no_circle() -> None:
    uses: dict[str, set[str]] = {part: set() for part in RANK}
    for path in modules():
        if part_of(path) in RANK:
            names = {name.split(".")[1] for name in imports(path) if name.startswith("splatcli.")}
            uses[part_of(path)] |= (names & RANK.keys()) - {part_of(path)}
    while uses:
        free = {part for part, others in uses.items() if not others & uses.keys()}
        assert free, f"a circle among {uses}"
        uses = {part: others for part, others in uses.items() if part not in free}


def test_no_modules_import_each_other_at_run_time() -> None:
    trees = {name: ast.parse(text) for name, text in shape.module_texts(PACKAGE).items()}
    assert shape.circles(shape.run_time_imports(trees)) == []


def test_the_report_that_structure_from_motion_writes_and_readers_look_for_is_named_once() -> None:
    named = [
        path.relative_to(PACKAGE).as_posix()
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "sfm.json"
    ]
    assert named == ["scene/sfm_report.py"]


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_the_command_line_imports_nothing_heavy_at_module_level(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & HEAVY


def test_what_every_command_loads_loads_the_parts_of_scipy_where_it_uses_them() -> None:
    """``import scipy`` loads its parts late; scipy.spatial alone takes a fifth of the time of ``import torch``."""
    parts = ("checkpoint", "formats", "scene", "render", "rasterizer", "train")
    eager = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in modules()
        if part_of(path) in parts
        for name in imports(path, top_level_only=True)
        if name.startswith("scipy.")
    ]
    assert eager == []


def test_help_loads_nothing_heavy_and_structure_from_motion_no_torch() -> None:
    """Half of the seconds that a small scene takes would be for ``import torch``, in the command and in its worker."""
    # Typer itself uses pydantic to read the command line.
    code = (
        "import sys, splatcli.cli.commands as b\n"
        "code = b.run(['train', '--help'])\n"
        f"heavy = sorted({HEAVY - {'pydantic'}!r} & set(sys.modules))\n"
        "code |= b.run(['sfm', sys.executable + '/nothing']) != 3\n"
        "import splatcli.sfm.worker, splatcli.sfm.run\n"
        "splatcli.sfm.run.gpu_wanted('auto')\n"
        "heavy += ['torch'] if 'torch' in sys.modules else []\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
