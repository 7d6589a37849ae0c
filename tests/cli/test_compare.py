"""``splat compare``: figures, pages and pictures of two models, and of a model and photos."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

from splatcli.render.colour_maps import error_map
from tests.cli.terminal import on_terminal
from tests.cli.tiny import HEIGHT, QUICK, WIDTH, write_scene
from tests.native.cases import NEEDS_COMPILER
from tests.running import Done, Splat

pytestmark = NEEDS_COMPILER

FIGURES = ("psnr_a", "ssim_a", "psnr_b", "ssim_b", "psnr_ab", "ssim_ab")


@pytest.fixture(scope="module")
def simplified(finished_run: Path, splat_once: Splat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quarter of the Gaussians of the finished run."""
    path = tmp_path_factory.mktemp("simplified") / "small.spz"
    assert splat_once("edit", finished_run, "-o", path, "--simplify", "25%").code == 0
    return path


@pytest.fixture(scope="module")
def other_split(tiny_scene: Path, splat_once: Splat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on the same scene that holds out views 0 and 5, and not 0 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "split"
    assert splat_once("train", tiny_scene, "-o", folder, "-n", 1, "--test-every", 5, *QUICK).code == 0
    return folder


class Page(HTMLParser):
    """The elements of a page; fails where tags are not closed in order."""

    VOID = frozenset({"meta", "link", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], "all elements are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def images(self) -> list[tuple[str | None, np.ndarray]]:
        """(kind, pixels) of each image; all are inside the page."""
        found = []
        for one in self.of("img"):
            kind, _, content = str(one["src"]).partition(",")
            assert kind == "data:image/jpeg;base64"
            found.append((one["data-kind"], imageio.imread(base64.b64decode(content))))
        return found


def result(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return done.objects[-1]


def test_a_model_is_equal_to_its_own_ply(splat: Splat, finished_run: Path, exported_ply: Path, tmp_path: Path) -> None:
    facts = result(splat("compare", finished_run, exported_ply, "--json", "-o", tmp_path / "x.html"))
    assert (facts["psnr_ab"], facts["ssim_ab"]) == (100.0, pytest.approx(1.0, abs=1e-6))
    assert (facts["psnr_a"], facts["ssim_a"]) == (facts["psnr_b"], facts["ssim_b"])
    assert [view["name"] for view in facts["views"]] == ["view_00.png", "view_08.png"]
    assert all(view["psnr_ab"] == 100.0 for view in facts["views"])
    a, b = facts["a"], facts["b"]
    assert (a["num_gaussians"], a["sh_degree"]) == (b["num_gaussians"], b["sh_degree"])
    assert (a["step"], b["step"], b["path"], b["bytes"]) == (40, None, str(exported_ply), exported_ply.stat().st_size)
    assert a["format"] == "checkpoint"
    assert "PLY" in b["format"]
    assert "A and B look the same" in (tmp_path / "x.html").read_text()


def test_figures_against_photos_are_those_of_eval(splat: Splat, finished_run: Path, simplified: Path) -> None:
    facts = result(splat("compare", finished_run, simplified, "--json"))
    ours = result(splat("eval", finished_run, "--json"))
    (theirs,) = splat("eval", simplified, "--data", _scene_of(splat, finished_run), "--json").objects
    for side, other in (("a", ours), ("b", theirs)):
        for name in ("psnr", "ssim"):
            assert facts[f"{name}_{side}"] == pytest.approx(other[name], abs=1e-9)
    assert facts["psnr_b"] < facts["psnr_a"]
    assert 10 < facts["psnr_ab"] < 60
    assert facts["b"]["num_gaussians"] == facts["a"]["num_gaussians"] // 4
    for name in FIGURES:
        assert facts[name] == pytest.approx(sum(view[name] for view in facts["views"]) / 2)


def _scene_of(splat: Splat, run: Path) -> str:
    return str(splat("info", run, "--json").objects[-1]["scene"])


def test_plain_lines_have_each_figure_and_each_view(splat: Splat, finished_run: Path, simplified: Path) -> None:
    done = splat("compare", finished_run, simplified)
    facts = result(splat("compare", finished_run, simplified, "--json"))
    words = dict(line.split(" ", 1) for line in done.lines if not line.startswith("view "))
    assert float(words["psnr_ab"]) == pytest.approx(facts["psnr_ab"], abs=0.005)
    assert (words["b"], words["num_gaussians_b"]) == (str(simplified), str(facts["b"]["num_gaussians"]))
    views = [line.split() for line in done.lines if line.startswith("view ")]
    assert [view[1] for view in views] == [view["name"] for view in facts["views"]]
    assert all(view[2::2] == list(FIGURES) for view in views)
    assert "reading" in done.err
    assert splat("compare", finished_run, simplified, "-q").err == ""


@pytest.mark.parametrize("named", [False, True])
def test_one_model_is_compared_with_photos(
    splat: Splat, finished_run: Path, exported_ply: Path, tmp_path: Path, named: bool
) -> None:
    words = (exported_ply, _scene_of(splat, finished_run)) if named else (finished_run,)
    target = tmp_path / "photos.html"
    facts = result(splat("compare", *words, "--views", "all", "--json", "-o", target, "--pictures", 3))
    assert facts["psnr_a"] == pytest.approx(result(splat("eval", finished_run, "--views", "all", "--json"))["psnr"])
    assert facts["b"] is facts["psnr_b"] is facts["psnr_ab"] is None
    page = Page(target.read_text())
    assert [kind for kind, _ in page.images()] == ["a", "photo", "difference"] * 3
    assert [one["value"] for one in page.of("option") if "selected" in one] == ["a", "photo"]


def test_a_page_is_whole_and_bounded(splat: Splat, finished_run: Path, simplified: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "compare.html"
    done = splat("compare", finished_run, simplified, "--views", "all", "-o", page, "--pictures", 4)
    assert done.code == 0
    assert done.lines[-1] == f"output {page}"
    text = page.read_text()
    found = Page(text)
    elsewhere = r"https?:|src=\"(?!data:)|@import|url\((?!data:)|fetch\(|XMLHttp"
    assert not re.search(elsewhere, text.replace(_svg(text), ""))
    policy = next(one["content"] for one in found.of("meta") if "http-equiv" in one)
    assert policy is not None
    assert "default-src 'none'" in policy
    images = found.images()
    assert [kind for kind, _ in images] == ["a", "b", "photo", "difference"] * 4
    assert all(pixels.shape == (HEIGHT, WIDTH, 3) for _, pixels in images)
    labels = [one["aria-label"] for one in found.of("input")]
    facts = result(splat("compare", finished_run, simplified, "--views", "all", "--json"))
    ranked = sorted(facts["views"], key=lambda view: view["psnr_ab"])
    assert labels[0] == f"between left and right, {ranked[0]['name']}", "the least alike is first"
    worst = min(facts["views"], key=lambda view: min(view["psnr_a"], view["psnr_b"]))
    assert any(str(label).endswith(worst["name"]) for label in labels)
    assert any(str(label).endswith(ranked[4]["name"]) for label in labels), "the median"
    assert f"{facts['psnr_ab']:.2f} dB" in text


def _svg(text: str) -> str:
    """The icon, whose name space is no address."""
    found = re.search(r"xmlns='[^']*'", text)
    assert found is not None
    return found[0]


def test_a_folder_gets_a_picture_of_each_view(
    splat: Splat, finished_run: Path, simplified: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    assert splat("compare", finished_run, simplified, "-o", folder).code == 0
    assert splat("render", finished_run, "--views", "test", "-o", tmp_path / "renders").code == 0
    paths = sorted(folder.rglob("*.png"))
    assert [str(path.relative_to(folder)) for path in paths] == ["view_00.png", "view_08.png"]
    for path in paths:
        a, b, difference, photo = np.split(imageio.imread(path), 4, axis=1)
        name = path.relative_to(folder)
        np.testing.assert_array_equal(a, imageio.imread(tmp_path / "renders" / name))
        np.testing.assert_array_equal(photo, imageio.imread(Path(_scene_of(splat, finished_run)) / "images" / name))
        np.testing.assert_array_equal(difference, error_map(b, a))
    refused = splat("compare", finished_run, simplified, "-o", folder)
    assert refused.code == 8
    assert "view_00.png" in refused.err
    assert splat("compare", finished_run, simplified, "-o", folder, "-w").code == 0


def test_a_sheet_has_four_images_a_view(splat: Splat, finished_run: Path, simplified: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    sheet.write_text("mine")
    assert splat("compare", finished_run, simplified, "-o", sheet, "--pictures", 1, "-w").code == 0
    assert splat("compare", finished_run, simplified, "-o", tmp_path / "all").code == 0
    pixels = imageio.imread(sheet)
    strips = [imageio.imread(path) for path in (tmp_path / "all").rglob("*.png")]
    assert any(all(_contains(pixels, part) for part in np.split(strip, 4, axis=1)) for strip in strips), (
        "A, B, difference and photo of one view are on it as they are"
    )


def _contains(sheet: np.ndarray, part: np.ndarray) -> bool:
    height, width = part.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(sheet, (height, width), axis=(0, 1))  # type: ignore[call-overload]
    corners = np.argwhere((windows[..., 0, 0] == part[0, 0]).all(axis=-1))
    return any((sheet[y : y + height, x : x + width] == part).all() for y, x in corners)


def test_files_without_cameras_are_seen_from_all_around(splat: Splat, exported_ply: Path, simplified: Path) -> None:
    facts = result(splat("compare", exported_ply, simplified, "--frames", 2, "--json"))
    assert [view["name"] for view in facts["views"]] == ["outside_00", "outside_01"]
    assert facts["psnr_a"] is None
    assert 10 < facts["psnr_ab"] < 60
    assert len({view["psnr_ab"] for view in facts["views"]}) == 2, "the views are different"
    orbit = splat("compare", exported_ply, simplified, "--frames", 2, "--views", "orbit", "--json")
    assert result(orbit)["psnr_ab"] == pytest.approx(facts["psnr_ab"], abs=0.1)
    assert "the model has no cameras: the orbit goes around its middle" in orbit.err


def test_cameras_come_from_the_second_model_a_file_or_a_path(
    splat: Splat, finished_run: Path, exported_ply: Path, simplified: Path, cameras: Path
) -> None:
    first = result(splat("compare", finished_run, simplified, "--json"))
    second = result(splat("compare", simplified, finished_run, "--json"))
    assert (second["psnr_b"], second["psnr_ab"]) == (first["psnr_a"], first["psnr_ab"])
    given = result(splat("compare", exported_ply, simplified, "--views", cameras, "--json"))
    assert len(given["views"]) == 10
    assert given["views"][8]["psnr_ab"] == first["views"][1]["psnr_ab"]
    assert given["psnr_a"] is None
    path = result(splat("compare", finished_run, simplified, "--views", "orbit", "--frames", 2, "--json"))
    assert (path["views_of"], len(path["views"])) == ("orbit", 2)


def test_held_out_views_that_the_other_run_was_trained_on_are_noted(
    splat: Splat, finished_run: Path, other_split: Path
) -> None:
    done = splat("compare", finished_run, other_split)
    assert done.code == 0
    assert f"1 of the 2 views are held out in {finished_run}" in done.err
    assert "held out in" not in splat("compare", finished_run, other_split, "--views", "all").err


def test_a_run_in_another_frame_is_rendered_from_its_own_cameras(
    splat: Splat, finished_run: Path, tiny_scene: Path, tmp_path: Path
) -> None:
    """The same images with cameras that lie elsewhere: no figure of shared views depends on the frame."""
    moved = tmp_path / "moved"
    shutil.copytree(tiny_scene, moved)
    file = moved / "transforms.json"
    document = json.loads(file.read_text())
    for frame in document["frames"]:
        matrix = np.array(frame["transform_matrix"])
        matrix[:3, 3] += [1e6, 0, 0]
        frame["transform_matrix"] = matrix.tolist()
    file.write_text(json.dumps(document))
    run = tmp_path / "run"
    assert splat("train", moved, "-o", run, "-n", 40, "-q", *QUICK).code == 0
    facts = result(splat("compare", finished_run, run, "--json"))
    own = result(splat("eval", run, "--json"))
    assert facts["psnr_b"] == pytest.approx(own["psnr"], abs=1e-6)
    assert facts["psnr_ab"] > 30
    orbit = splat("compare", finished_run, run, "--views", "orbit", "--frames", 2)
    assert "or in different frames" in orbit.err, "the orbit is around the images of one of them"


def test_models_in_different_frames_are_named_with_a_remedy(
    splat: Splat, finished_run: Path, exported_ply: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.ply"
    assert splat("edit", exported_ply, "-o", moved, "--translate", "0,0,40").code == 0
    done = splat("compare", finished_run, moved, "--background", "white")
    assert done.code == 0
    assert "or in different frames" in done.err
    assert f"splat edit {moved} --align-to" in done.err
    assert "frames" not in splat("compare", finished_run, exported_ply, "--background", "white").err


def test_the_table_fits_a_terminal(
    finished_run: Path, exported_ply: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    screen = on_terminal("compare", finished_run, exported_ply, "--views", "all", "-q", "-o", "page.html")
    assert screen.code == 0
    boxes = [line for line in screen.drawn if line[0] in "│╭╰├"]
    assert max(map(len, screen.drawn)) <= 80
    assert any("PSNR to photos" in line for line in boxes)
    assert sum("view_" in line for line in boxes) == 6
    assert "10 views (all): A and B look the same" in screen.text
    assert "page.html" in screen.text


def ply_of_nothing(folder: Path) -> None:
    (folder / "a.ply").write_bytes(b"")


def scene_of_others(folder: Path) -> None:
    scene = write_scene(folder / "others")
    text = (scene / "transforms.json").read_text()
    for path in (scene / "images").iterdir():
        path.rename(path.with_name(f"other_{path.name}"))
        text = text.replace(path.name, f"other_{path.name}")
    (scene / "transforms.json").write_text(text)


def present(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("mine") and None


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "words", "code", "said"),
    [
        (nothing, ("RUN", "nosuch.ply"), 2, "no such model"),
        (nothing, ("nosuch.ply", "RUN"), 2, "no such model"),
        (ply_of_nothing, ("RUN", "a.ply"), 5, "the file is empty"),
        (nothing, ("RUN", "PLY", "-o", "x.jpg"), 2, "a comparison is not written as .jpg"),
        (nothing, ("RUN", "PLY", "-o", "-"), 2, "stdout gets the figures"),
        (present("x.html"), ("RUN", "PLY", "-o", "x.html"), 8, "-w replaces it"),
        (present("x.png"), ("RUN", "PLY", "-o", "x.png"), 8, "-w replaces it"),
        (present("x"), ("RUN", "PLY", "-o", "x"), 8, "x"),
        (nothing, ("RUN", "PLY", "--pictures", "2"), 2, "only a page and a sheet"),
        (nothing, ("RUN", "PLY", "-o", "folder", "--pictures", "2"), 2, "only a page and a sheet"),
        (nothing, ("RUN", "PLY", "--frames", "2"), 2, "does not apply to --views test"),
        (nothing, ("RUN", "PLY", "--views", "nowhere"), 2, "names no views"),
        (nothing, ("PLY", "PLY", "--views", "test"), 2, "the model has no cameras"),
        (nothing, ("RUN", "PLY", "--background", "whiteish"), 2, "is not a colour"),
        (nothing, ("SCENE", "PLY"), 2, "splat compare PLY SCENE"),
        (nothing, ("RUN", "SCENE", "--data", "SCENE"), 2, "exclude each other"),
        (nothing, ("PLY",), 2, "has neither cameras nor photos"),
        (nothing, ("RUN", "--views", "orbit"), 2, "have no photos to compare one model with"),
        (nothing, ("RUN", "--data", "nosuch"), 3, "nosuch"),
        (scene_of_others, ("RUN", "others"), 3, "no view has a photo of its size"),
    ],
)
def test_bad_input_is_refused(
    splat: Splat,
    finished_run: Path,
    exported_ply: Path,
    tiny_scene: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Path], None],
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    places = {"RUN": finished_run, "PLY": exported_ply, "SCENE": tiny_scene}
    for name, place in places.items():
        said = said.replace(name, str(place))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = splat("compare", *(places.get(word, word) for word in words))
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "Traceback" not in done.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_runs_of_different_scenes_share_no_view(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    scene_of_others(tmp_path)
    assert splat("train", tmp_path / "others", "-o", tmp_path / "run", "-n", 1, *QUICK).code == 0
    done = splat("compare", finished_run, tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert "none of the 2 test views" in done.err
