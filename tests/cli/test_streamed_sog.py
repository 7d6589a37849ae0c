"""Streamed SOG: whole commands write a folder of chunks, read it back, and replace nothing that is not theirs.

The browser of tests/browser.py looks at one, where it is at hand.
"""

from __future__ import annotations

import functools
import http.server
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.cli.commands import run
from splatcli.errors import ModelFileError, VersionError
from splatcli.formats import streamed_sog
from splatcli.formats.format import ExportMetadata
from splatcli.formats.html import viewer_page
from splatcli.formats.ply import write_ply_file
from splatcli.formats.registry import import_model
from splatcli.gaussians import Gaussians
from tests.browser import look_at
from tests.forked import splat_command
from tests.formats.made import by_position, errors, read_ply, scene
from tests.formats.test_round_trips import BOUNDS
from tests.formats.test_third_party import transformed


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves, chunks and blocks so small that a small model has several of each."""
    monkeypatch.setattr(streamed_sog, "LEAF", 100)
    monkeypatch.setattr(streamed_sog, "CHUNK", 250)
    monkeypatch.setattr(streamed_sog, "BLOCK", 400)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    gaussians = scene(1000, 1)
    gaussians.logit_opacities.clamp_(-5, 5)
    write_ply_file(gaussians, tmp_path / "a.ply")
    return tmp_path / "a.ply"


def exported(model: Path, *words: object) -> int:
    return run(["export", str(model), "-q", *map(str, words)])


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "lod-meta.json").read_text())
    return found


def leaves(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "lods" in node:
        yield node
    for child in node.get("children", []):
        yield from leaves(child)


def read(path: Path) -> Gaussians:
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_gaussians_of_endless_size_have_bounds(tmp_path: Path) -> None:
    """JSON has no infinity."""
    gaussians = scene(300, 0)
    gaussians.log_scales[:3] = 1e4
    write_ply_file(gaussians, tmp_path / "huge.ply")
    assert run(["export", str(tmp_path / "huge.ply"), "-o", str(tmp_path / "a.lod"), "-q"]) == 0
    bound = index_of(tmp_path / "a.lod")["tree"]["bound"]
    assert all(map(math.isfinite, (*bound["min"], *bound["max"])))
    assert len(read(tmp_path / "a.lod" / "lod-meta.json")) == 300


@pytest.mark.usefixtures("small_parts")
def test_the_folder_has_levels_by_half_in_chunks_and_leaves(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scene.lod"
    assert exported(model, "-o", f"{folder}/", "--lod-levels", 3) == 0
    index = index_of(folder)
    assert (index["version"], index["lodLevels"]) == (1, 3)
    assert index["counts"] == pytest.approx([1000, 500, 250], abs=4)  # each block is halved by itself
    assert index["count"] == sum(index["counts"])
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []
    held = [json.loads((folder / name).read_text())["count"] for name in index["filenames"]]
    assert max(held) <= 250
    assert sum(held) == index["count"]
    taken = [0] * len(held)
    for leaf in leaves(index["tree"]):
        assert set(leaf["lods"]) == {"0", "1", "2"}
        assert leaf["lods"]["0"]["count"] <= 100
        low, high = (np.array(leaf["bound"][end]) for end in ("min", "max"))
        for level, entry in leaf["lods"].items():
            assert index["filenames"][entry["file"]].startswith(f"{level}_")
            taken[entry["file"]] += entry["count"]
            rows = slice(entry["offset"], entry["offset"] + entry["count"])
            means = read(folder / index["filenames"][entry["file"]]).means[rows].numpy()
            assert bool((means >= low - 1e-3).all())
            assert bool((means <= high + 1e-3).all())
    assert taken == held


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shared", [600, 1000])
def test_gaussians_on_one_plane_and_at_one_place_are_divided(shared: int, tmp_path: Path) -> None:
    gaussians = scene(1000, 1)
    gaussians.logit_opacities.clamp_(-5, 5)
    gaussians.means[:shared, 0] = float(gaussians.means[:, 0].min()) - 1.0
    gaussians.means[:shared:2] = gaussians.means[0]
    write_ply_file(gaussians, tmp_path / "plane.ply")
    assert exported(tmp_path / "plane.ply", "-o", tmp_path / "plane.lod/", "--lod-levels", 1) == 0
    index = index_of(tmp_path / "plane.lod")
    counts = [leaf["lods"]["0"]["count"] for leaf in leaves(index["tree"])]
    assert sum(counts) == 1000
    assert min(counts) > 0


@pytest.mark.usefixtures("small_parts")
def test_the_finest_level_is_read_back(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exported(model, "-o", tmp_path / "named" / "lod-meta.json") == 0
    for named in ("named/lod-meta.json", "named"):
        assert run(["info", str(tmp_path / named), "--json"]) == 0
        facts = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert (facts["kind"], facts["format"], facts["num_gaussians"]) == ("lod", "streamed SOG", 1000)
        assert facts["bytes"] == sum(map(len, contents(tmp_path / "named").values()))
        assert run(["check", str(tmp_path / named), "--json"]) == 0
        checked = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert checked["findings"][0]["path"] == str(tmp_path / "named/lod-meta.json")
        assert facts["sh_degree"] == 1
    assert exported(tmp_path / "named", "-o", tmp_path / "b.ply") == 0  # by the folder, too
    before = read_ply(model)
    found = errors(before, by_position(read_ply(tmp_path / "b.ply"), before))
    for attribute, error in found.items():
        assert error <= getattr(BOUNDS["sog"], attribute) + 1e-5, (attribute, found)


def test_the_cameras_of_a_run_tell_what_to_merge(finished_run: Path, tmp_path: Path) -> None:
    """A file of the same Gaussians has no cameras, and its second level is another."""
    assert exported(finished_run, "-o", tmp_path / "a.lod", "--lod-levels", 2) == 0
    assert exported(finished_run, "-o", tmp_path / "a.ply") == 0
    assert exported(tmp_path / "a.ply", "-o", tmp_path / "b.lod", "--lod-levels", 2) == 0
    runs, files = (contents(tmp_path / name) for name in ("a.lod", "b.lod"))
    assert runs["0_0/means_l.webp"] == files["0_0/means_l.webp"]
    assert runs["1_0/means_l.webp"] != files["1_0/means_l.webp"]


def test_a_folder_is_replaced_with_w_alone(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scene.lod"
    folder.mkdir()  # an empty one is nobody's
    assert exported(model, "-o", folder, "--lod-levels", 2) == 0
    before = contents(folder)
    assert exported(model, "-o", folder, "--lod-levels", 1) == 8
    assert "-w replaces it" in capfd.readouterr().err
    assert contents(folder) == before
    assert exported(model, "-o", folder, "--lod-levels", 1, "-w") == 0
    assert index_of(folder)["lodLevels"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ply", "scene.lod"]


@pytest.mark.parametrize("name", ["lod-meta.json", "notes.txt", "0_0/notes.txt", "more/meta.json"])
def test_a_folder_with_anything_of_another_maker_stays(
    name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scene.lod"
    assert exported(model, "-o", folder, "--lod-levels", 1) == 0
    (folder / name).parent.mkdir(exist_ok=True)
    if name == "lod-meta.json":
        index = index_of(folder)
        index["asset"]["generator"] = "splat-transform v2.7.1"
        (folder / name).write_text(json.dumps(index))
    else:
        (folder / name).write_text("mine")
    before = contents(folder)
    assert exported(model, "-o", folder, "-w") == 8
    assert "which splat export did not write" in capfd.readouterr().err
    assert contents(folder) == before


def test_what_goes_wrong_leaves_nothing_new(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scene.lod"
    assert exported(model, "-o", folder, "--lod-levels", 1) == 0
    before = contents(folder)

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert exported(model, "-o", folder, "-w") == 8
    assert "No space left" in capfd.readouterr().err
    assert contents(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ply", "scene.lod"]


#: Sends itself a signal when the first level is written and the second one is being made.
SIGNALLED = """
import os, sys
import splatcli.edit.simplify as simplify
def slow(*_):
    assert [name for name in os.listdir(sys.argv[1]) if '.tmp.' in name]
    os.kill(os.getpid(), int(sys.argv[2]))
simplify._cheapest_pairs = slow
from splatcli.cli.commands import run
sys.exit(run([*sys.argv[3:], '-o', sys.argv[1] + '/scene.lod', '-w']))
"""


def signalled(number: int, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*splat_command(), "-c", SIGNALLED, str(folder), str(int(number)), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})


@pytest.mark.parametrize("command", ["export", "edit"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals, command: str, model: Path, tmp_path: Path) -> None:
    done = signalled(number, tmp_path, command, model)
    assert done.returncode in (128 + number, -number), done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.ply"]
    assert exported(model, "-o", tmp_path / "scene.lod", "--lod-levels", 1) == 0
    before = contents(tmp_path / "scene.lod")
    assert signalled(number, tmp_path, command, model).returncode in (128 + number, -number)
    assert contents(tmp_path / "scene.lod") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ply", "scene.lod"]


def test_what_a_killed_process_leaves_is_removed_by_the_next_export(model: Path, tmp_path: Path) -> None:
    assert signalled(signal.SIGKILL, tmp_path, "export", model).returncode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if ".tmp." in path.name)
    mine = tmp_path / "scene.lod.tmp.notes"
    mine.mkdir()
    living = tmp_path / f"scene.lod.tmp.{os.getppid()}.0123abcd"
    living.mkdir()
    assert exported(model, "-o", tmp_path / "scene.lod", "--lod-levels", 1) == 0
    assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.ply", "scene.lod", mine.name, living.name])


def test_an_edit_writes_what_an_export_writes(
    model: Path, finished_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, given in (("file", model), ("run", finished_run)):
        one, other = tmp_path / f"{name}-a.lod", tmp_path / f"{name}-b.lod"
        assert exported(given, "-o", one) == 0
        capfd.readouterr()
        assert run(["edit", str(given), "--filter", "opacity>=0", "-o", f"{other}/", "--json"]) == 0
        facts = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert facts["path"] == str(other / "lod-meta.json")
        assert facts["levels"] == index_of(other)["counts"]
        assert len(facts["operations"]) == 1
        assert contents(one) == contents(other)
        assert run(["edit", str(given), "--scale", "2", "-o", str(other)]) == 8
        assert run(["edit", str(given), "--scale", "2", "-o", str(other), "-w"]) == 0
        assert contents(one) != contents(other)


def test_a_moved_run_keeps_what_its_cameras_tell(finished_run: Path, tmp_path: Path) -> None:
    """The cameras move along, so that the same Gaussians are merged, but for those that rounding decides."""
    assert exported(finished_run, "-o", tmp_path / "a.lod", "--lod-levels", 2) == 0
    words = ("--translate", "8,0,0", "-o", str(tmp_path / "b.lod"))
    assert run(["edit", str(finished_run), *words]) == 0
    one, other = (read(tmp_path / name / "1_0" / "meta.json").means for name in ("a.lod", "b.lod"))
    near = torch.cdist(one.double() + torch.tensor([8.0, 0, 0]), other.double()).amin(dim=1)
    assert float((near < 0.02).double().mean()) > 0.9


@pytest.mark.parametrize("command", ["info", "export", "edit", "render", "compare"])
def test_a_folder_without_its_index_is_named(
    command: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scene.lod"
    assert exported(model, "-o", folder, "--lod-levels", 1) == 0
    (folder / "lod-meta.json").unlink()
    words = {
        "info": [],
        "export": ["-o", str(tmp_path / "x.ply")],
        "edit": ["--scale", "2", "-o", str(tmp_path / "x.ply")],
        "render": ["-o", str(tmp_path / "x.png")],
        "compare": [str(model)],
    }
    assert run([command, str(folder), *words[command]]) == 5
    said = capfd.readouterr().err
    assert "folder of a streamed SOG without its index lod-meta.json" in said
    assert "0_0/meta.json" in said
    for path in (folder / "0_0").iterdir():
        path.unlink()
    (folder / "0_0").rmdir()
    assert run([command, str(folder), *words[command]]) == 5
    assert "without its index" in capfd.readouterr().err
    assert not list(tmp_path.glob("x.*"))


def test_a_dry_run_tells_the_levels_and_writes_nothing(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exported(model, "-o", tmp_path / "scene.lod", "--dry-run", "--json") == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert facts["levels"] == [1000, 500, 250, 125, 62]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ply"]


def test_levels_are_for_a_streamed_sog(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exported(model, "-o", tmp_path / "b.sog", "--lod-levels", 2) == 2
    assert "-o scene.lod/" in capfd.readouterr().err
    (tmp_path / "c.lod").write_text("a file")
    assert exported(model, "-o", tmp_path / "c.lod", "-w") == 8
    assert (tmp_path / "c.lod").read_text() == "a file"


def _set(**values: object) -> Any:
    return lambda index: index.update(values)


def _leaf(**values: object) -> Any:
    return lambda index: next(leaves(index["tree"]))["lods"]["0"].update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set(version=2), "version 2"),
        (_set(tree={}), "neither levels nor children"),
        (_set(filenames=["../a/meta.json"]), "no chunk inside this folder"),
        (_set(filenames=["/a/meta.json"]), "no chunk inside this folder"),
        (_set(filenames=["0_0/meta.json"] * 2), "listed twice"),
        (_set(filenames=[]), "there are 0"),
        (_set(tree={"lods": {"0": {"file": 0, "offset": 0, "count": 0}}}), "no leaf of the tree"),
        (_set(environment="missing/meta.json"), "no such file"),
        (_leaf(count=10**9), "takes 1,000,000,000"),
        (_leaf(offset=1), "from 1 on"),
        (_leaf(file=-1), "no readable levels: file:"),
        (lambda index: index.pop("lodLevels"), "lodLevels"),
    ],
)
def test_a_damaged_index_is_refused(change: Any, said: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scene.lod"
    assert exported(model, "-o", folder, "--lod-levels", 1) == 0
    index = index_of(folder)
    change(index)
    (folder / "lod-meta.json").write_text(json.dumps(index))
    with pytest.raises((ModelFileError, VersionError)) as caught:
        import_model(folder / "lod-meta.json")
    assert said in str(caught.value)


def test_an_index_of_endless_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lod-meta.json").write_text('{"lodLevels":1,"filenames":[],"tree":' + '{"children":[' * 100_000)
    with pytest.raises(ModelFileError):
        import_model(tmp_path / "lod-meta.json")


def test_leaves_that_share_gaussians_are_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scene.lod"
    assert exported(model, "-o", folder, "--lod-levels", 1) == 0
    index = index_of(folder)
    index["tree"] = {"children": [index["tree"], index["tree"]]}
    (folder / "lod-meta.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="belong to other leaves"):
        import_model(folder / "lod-meta.json")


def test_what_splat_transform_writes_is_read_here(model: Path, tmp_path: Path) -> None:
    """Its environment, which is Gaussians of every view, follows the finest level."""
    for name, count in (("half.ply", 400), ("sky.ply", 30)):
        write_ply_file(scene(count, 1), tmp_path / name)
    words = ("-l", "0", str(tmp_path / "half.ply"), "-l", "1", str(tmp_path / "sky.ply"), "-l", "-1")
    (tmp_path / "theirs").mkdir()
    found = read(transformed(model, tmp_path / "theirs" / "lod-meta.json", *words))
    assert len(found) == 1030
    before = read_ply(model)
    near = torch.cdist(before.means.double(), found.means.double()).amin(dim=1)
    assert float(near.max()) < 1e-3


@pytest.mark.usefixtures("small_parts")
def test_splat_transform_reads_the_chunks(model: Path, tmp_path: Path) -> None:
    assert exported(model, "-o", tmp_path / "scene.lod") == 0
    index = index_of(tmp_path / "scene.lod")
    chunk = tmp_path / "scene.lod" / index["filenames"][0]
    theirs = read_ply(transformed(chunk, tmp_path / "theirs.ply"))
    found = errors(read(chunk), theirs)
    for attribute, error in found.items():
        assert error <= (2e-3 if attribute == "quats" else 2e-5), (attribute, found)


@pytest.mark.usefixtures("small_parts")
def test_the_viewer_draws_the_coarsest_level_first(tmp_path: Path) -> None:
    gaussians = scene(1000, 0)
    gaussians.log_scales += 1.0
    gaussians.sh0[:, 0], gaussians.sh0[:, 1:] = 1.5, -1.5  # red
    write_ply_file(gaussians, tmp_path / "a.ply")
    assert exported(tmp_path / "a.ply", "-o", tmp_path / "scene.lod", "--lod-levels", 3) == 0
    page = viewer_page("./scene.lod/lod-meta.json", "lod-meta.json", gaussians, ExportMetadata())
    (tmp_path / "index.html").write_bytes(page)
    handler = functools.partial(Silent, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/index.html?noanim&noui&webgl"
        try:
            seen = look_at(url, tmp_path / "a.png", (480, 360))
        finally:  # a closed server that is still asked takes a whole core
            server.shutdown()
    assert seen.errors == []
    levels = [request.split("/")[-2][0] for request in seen.requests if request.endswith("_0/meta.json")]
    assert levels[0] == "2"
    middle = seen.pixels[120:240, 160:320].astype(float).mean(axis=(0, 1))
    assert middle[0] > 80
    assert middle[0] > 3 * max(middle[1], middle[2])


class Silent(http.server.SimpleHTTPRequestHandler):
    """A server of a folder that prints nothing."""

    def log_message(self, *_: object) -> None:
        pass
