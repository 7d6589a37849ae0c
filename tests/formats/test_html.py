"""The page: whole, with nothing to fetch, and its viewer as its authors published it.

Where a headless Chromium is at hand (tests/browser.py), it is inspected, too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from splatcli.errors import ModelFileError
from splatcli.formats import html
from splatcli.formats.format import ExportMetadata
from splatcli.formats.html import PageModule, encode_html, to_viewer, viewer_page
from splatcli.formats.registry import format_of, format_to_write, import_model
from splatcli.formats.sog import encode_sog
from splatcli.scene.camera import Camera
from tests.browser import look_at
from tests.formats.made import scene

VIEWER = Path(html.__file__).parent / "viewer"


def bootstrap(page: str) -> dict[str, Any]:
    found = re.search(r'id="sse-bootstrap">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    settings: dict[str, Any] = json.loads(found[1])
    return settings


def first_view(reported: ExportMetadata) -> dict[str, Any]:
    view: dict[str, Any] = bootstrap(encode_html(scene(50, 0), reported).payload.decode())["settings"]["cameras"][0][
        "initial"
    ]
    return view


def head_of(page: str) -> str:
    """What comes before the viewer's own script."""
    return page.partition("const TRACEID_GPU_TIMINGS")[0]


@pytest.fixture(scope="module")
def page() -> str:
    return encode_html(scene(200, 1), ExportMetadata()).payload.decode()


def test_the_page_holds_the_scene_the_style_and_the_script(page: str) -> None:
    settings = bootstrap(page)
    kind, _, content = settings["contentUrl"].partition(",")
    assert kind == "data:application/octet-stream;base64"
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(content))) as archive:
        assert json.loads(archive.read("meta.json"))["count"] == 200
    assert "./index" not in page
    assert "sourceMappingURL" not in page
    assert page.count("</script>") == page.count("<script") == 3


def test_the_scene_is_read_back_as_that_of_a_sog(tmp_path: Path) -> None:
    for name, write in (("x.sog", encode_sog), ("x.html", encode_html)):
        (tmp_path / name).write_bytes(write(scene(200, 1), ExportMetadata()).payload)
    assert format_of(tmp_path / "x.html").name == "html"
    wanted, found = (import_model(tmp_path / f"x.{kind}") for kind in ("sog", "html"))
    for (name, a), (_, b) in zip(wanted.columns._asdict().items(), found.columns._asdict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('{"contentUrl"', '{"contentURL"', "cannot be read (KeyError"),
        ('{"contentUrl"', '{contentUrl"', "cannot be read (JSONDecodeError"),
        ("data:application/octet-stream;base64,", "https://example.org/", "is not inside it: it is at 'https"),
        (";base64,UEs", ";base64,!Es", "cannot be read (Error"),
        (";base64,UEs", ";base64,AAA", "not a readable SOG"),
    ],
)
def test_a_page_that_holds_no_scene_is_refused(page: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in page
    path = tmp_path / "x.html"
    path.write_text(page.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ModelFileError) as caught:
        import_model(path)
    assert said in caught.value.what


#: How pages of SuperSplat and splat-transform have held their scene, the oldest first.
OLDER = (
    '<pc-asset id="ply" type="gsplat" src="data:application/ply;base64,{}" preload></pc-asset>',
    '<script type="module">const s = {{ settings: {{}}, contents: fetch("data:application/ply;base64,{}") }};</script>',
    '<link href="data:image/png;base64,iVBORw0KGgo="><script>fetch("data:application/octet-stream;base64,{}")</script>',
)


@pytest.mark.parametrize("place", OLDER)
@pytest.mark.parametrize("kind", ["compressed.ply", "ply", "sog"])
def test_the_scene_of_an_older_page_of_supersplat_is_read(place: str, kind: str, tmp_path: Path) -> None:
    payload = format_to_write(Path(f"x.{kind}"), None).write(scene(200, 1), ExportMetadata()).payload
    (tmp_path / f"x.{kind}").write_bytes(payload)
    page = f"<!DOCTYPE html>\n<html><body>{place.format(base64.b64encode(payload).decode())}</body></html>"
    (tmp_path / "x.html").write_text(page)
    wanted, found = (import_model(tmp_path / f"x.{each}") for each in (kind, "html"))
    for (name, a), (_, b) in zip(wanted.columns._asdict().items(), found.columns._asdict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("content", "said", "where"),
    [
        (b"", "holds no scene", ""),
        (b'<a href="data:application/ply;base64,AAAA">', "holds no scene", ""),
        (b'fetch("data:application/ply;base64,cGx5CmEAAAA")', "cannot be read (Error", ", byte "),
        (b'fetch("data:application/ply;base64,cGx5Cg==")', "header", ", byte "),
        (b'fetch("data:application/octet-stream;base64,UEsDBAAA")', "not a readable SOG", ""),
    ],
)
def test_an_older_page_without_a_sound_scene_is_refused(content: bytes, said: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    path.write_bytes(b"<!DOCTYPE html>\n" + content)
    with pytest.raises(ModelFileError) as caught:
        import_model(path)
    assert said in caught.value.what
    assert str(caught.value.where).startswith(f"{path}{where}")
    assert caught.value.remedy


def test_the_page_loads_nothing_from_anywhere(page: str) -> None:
    # The script's own texts name places, and fetch none.
    assert not re.findall(r"""(?:src|href)=["']?(?!data:)[^"'> ]+""", head_of(page).replace('href=""', ""))


def test_the_viewer_is_the_published_one() -> None:
    sums = dict(re.findall(r"^\| `([\w.]+)` \| `(\w{64})` \|$", (VIEWER / "README.md").read_text(), re.MULTILINE))
    assert set(sums) == {"index.html", "index.css", "index.js"}
    for name, expected in sums.items():
        assert hashlib.sha256((VIEWER / name).read_bytes()).hexdigest() == expected, name
    assert "MIT License" in (VIEWER / "LICENSE").read_text()


def test_the_first_view_is_that_of_a_camera() -> None:
    viewmat = np.eye(4)
    viewmat[:3, 3] = [0.5, -1.0, 4.0]  # the camera stands at (-0.5, 1, -4) and looks along z
    camera = Camera(name="a", width=200, height=100, fx=100.0, fy=50.0, cx=100.0, cy=50.0, viewmat=viewmat)
    view = first_view(ExportMetadata(camera=camera))
    assert view["position"] == pytest.approx([0.5, -1.0, -4.0])
    assert view["target"][:2] == pytest.approx([0.5, -1.0])
    assert view["target"][2] == pytest.approx(0.0, abs=0.5)
    assert view["fov"] == pytest.approx(90.0)


@pytest.mark.parametrize(
    "size", [(200, 100, 100.0, 50.0, 90.0), (100, 300, 100.0, 100.0, 112.62), (300, 100, 100.0, 100.0, 112.62)]
)
def test_the_angle_of_view_is_along_the_longer_side(size: tuple[int, int, float, float, float]) -> None:
    width, height, fx, fy, expected = size
    camera = Camera("a", width, height, fx, fy, width / 2, height / 2, np.eye(4))
    assert first_view(ExportMetadata(camera=camera))["fov"] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    "up", [(0, -1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (0.6, 0, -0.8), (0.1, -0.7, 0.7), (1e-12, 1, 0)]
)
def test_what_is_up_in_the_photos_is_up_on_the_page(up: tuple[float, float, float]) -> None:
    direction = np.array(up) / np.linalg.norm(up)
    turn = to_viewer(direction)
    assert turn @ direction == pytest.approx(np.array([0.0, 1.0, 0.0]), abs=1e-9)
    assert turn @ turn.T == pytest.approx(np.eye(3), abs=1e-9)
    assert np.linalg.det(turn) == pytest.approx(1.0)
    page = encode_html(scene(9, 0), ExportMetadata(up=direction)).payload.decode()
    (found,) = re.findall(r"entity\.setLocalRotation\(([-+.e\d, ]+)\);", page)
    quaternion = [float(number) for number in found.split(",")]
    assert Rotation.from_quat(quaternion).as_matrix() == pytest.approx(turn, abs=1e-9)


def test_without_cameras_y_points_down() -> None:
    assert to_viewer(np.array([0.0, -1.0, 0.0])) == pytest.approx(np.diag([-1.0, -1.0, 1.0]))


@pytest.mark.parametrize("antialiased", [False, True])
def test_the_viewer_compensates_opacities_where_training_did(antialiased: bool) -> None:
    page = encode_html(scene(9, 0), ExportMetadata(antialiased=antialiased)).payload.decode()
    assert f"aa: {str(antialiased).lower()}," in head_of(page)


def test_a_module_is_started_with_the_viewer_on_pages_that_name_one(page: str) -> None:
    """Pages of ``splat export`` name none: their visitors have neither the model nor splat."""
    assert "cameraManager:" not in page
    assert "createViewer({ container: document.body, settings, ...options });" in page
    module = PageModule("./own.js", {"name": "</script>\udcff"})
    gaussians, metadata = scene(9, 0), ExportMetadata(up=np.array([0.0, 0.0, 1.0]))
    own = viewer_page("scene.ply", "scene.ply", gaussians, metadata, module=module).decode()
    assert own.count("</script>") == own.count("<script") == 3
    assert "cameraManager: () => viewer.cameraManager ?? null," in own
    (url, settings) = re.findall(r"if \(options\.ui\) \(await import\((.*?)\)\)\.start\(await viewer, (.*)\);", own)[0]
    assert json.loads(url) == "./own.js"
    found = json.loads(settings)
    assert found["name"] == "</script>\udcff"
    assert np.reshape(found["turn"], (3, 3)) == pytest.approx(to_viewer(np.array([0.0, 0.0, 1.0])))


def test_a_viewer_of_another_shape_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_STYLE", "<link nowhere>")
    with pytest.raises(AssertionError, match="belong together"):
        encode_html(scene(3, 0), ExportMetadata())


@pytest.mark.slow
def test_a_browser_without_a_network_shows_the_scene(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    gaussians = scene(500, 1)
    gaussians.log_scales += 1.5
    gaussians.sh0[:, 0] = 1.5  # red
    gaussians.sh0[:, 1:] = -1.5
    path.write_bytes(encode_html(gaussians, ExportMetadata()).payload)
    seen = look_at(f"{path.as_uri()}?noanim&noui&webgl", tmp_path / "a.png", (480, 360))
    assert (seen.requests, seen.errors) == ([], [])
    middle = seen.pixels[120:240, 160:320].astype(float).mean(axis=(0, 1))
    assert middle[0] > 80
    assert middle[0] > 3 * max(middle[1], middle[2])
