"""Floaters: the saving of a removal against removals one by one, and what is found in small scenes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.edit.clean import UNSEEN, Photos, _enlarged, _Views, floaters, isolated
from splatcli.edit.operations import Clean, EditedModel, apply_operations, merged
from splatcli.errors import SceneError
from splatcli.formats.format import ExportMetadata
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.rendering import render
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Rgb
from tests.formats.made import scene
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import front_camera
from tests.train.worlds import MadeImages, MadeScene

#: Views of the same wall, side by side.
VIEWS = 5


def made(means: torch.Tensor, size: float, logit: float, colour: torch.Tensor) -> Gaussians:
    count = len(means)
    return Gaussians(
        means=means.float(),
        quats=torch.tensor([1.0, 0, 0, 0]).repeat(count, 1),
        log_scales=torch.full((count, 3), np.log(size)),
        logit_opacities=torch.full((count,), logit),
        sh0=colour.expand(count, 3).clone(),
        shN=torch.zeros(count, 0, 3),
    )


def wall() -> Gaussians:
    """A wall of 24 x 24 Gaussians in the plane z = 4, coloured by place."""
    y, x = torch.meshgrid(*2 * [torch.linspace(-2.5, 2.5, 24)], indexing="ij")
    means = torch.stack([x.ravel(), y.ravel(), torch.full((576,), 4.0)], dim=1)
    return replace(made(means, 0.15, 4.0, torch.zeros(1, 3)), sh0=(means[:, [0, 1, 0]] * 0.4).sin())


def cameras() -> list[Camera]:
    found = []
    for index in range(VIEWS):
        viewmat = np.eye(4)
        viewmat[0, 3] = 0.4 * (index - VIEWS // 2)
        found.append(replace(front_camera(48, 40, 40.0), name=f"{index}.png", viewmat=viewmat))
    return found


def photos_of(gaussians: Gaussians, views: list[Camera]) -> Photos:
    pixels = {view.name: render(gaussians, view).image.clamp(0, 1).mul(255).round().byte().numpy() for view in views}
    return Photos(lambda name: (pixels[name], None))


def before_cameras() -> Gaussians:
    """Large faint Gaussians, and a small opaque one, half-way to the wall or nearer."""
    fog = made(torch.tensor([[0.1, 0, 0.6], [-0.4, 0.1, 0.7], [0.2, -0.1, 0.8]]), 0.12, -0.5, torch.ones(1, 3))
    return merged([fog, made(torch.tensor([[0.1, 0.2, 2.0]]), 0.08, 3.0, torch.tensor([[1.7, -1.7, -1.7]]))])


@NEEDS_COMPILER
def test_what_a_removal_saves_is_the_difference_of_squared_errors() -> None:
    gaussians, view = scene(30, 1, seed=4), front_camera(40, 32, 36.0)
    gaussians.means[:, 2] += 3
    gaussians.log_scales += 1.5
    truth = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8))

    def error(model: Gaussians) -> float:
        return float((render(model, view).image.double() - truth.double() / 255).square().sum())

    exact = []
    for row in range(30):
        without = gaussians.map(torch.clone)
        without.logit_opacities[row] = -30.0
        exact.append(error(gaussians) - error(without))
    repeats = 50  # of signs; the mean has a relative error of about 0.2
    seen = _Views.of(gaussians, [view] * repeats, Photos(lambda _: (truth.numpy(), None)), "test")
    assert np.abs(seen.saved.numpy() / repeats - exact).max() < 0.3 * np.abs(exact).max()
    hidden = Photos(lambda _: (truth.numpy(), np.ones((32, 40), dtype=bool)))
    assert float(_Views.of(gaussians, [view], hidden, "test").saved.abs().max()) == 0.0


@NEEDS_COMPILER
@pytest.mark.parametrize("level", ["normal", "strong"])
def test_what_photos_contradict_goes_and_the_wall_stays(level: str) -> None:
    views = cameras()
    both = merged([wall(), before_cameras()])
    found = floaters(both, level, views, photos_of(wall(), views))
    assert found[576:].tolist() == [True] * 4
    seen = _Views.of(wall(), views, None, "test").weights >= 1
    assert not found[:576][seen].any()
    assert torch.equal(found, floaters(both, level, views, photos_of(wall(), views)))
    # What the photos show stays, wherever it is.
    assert not floaters(both, level, views, photos_of(both, views))[576:].any()


@NEEDS_COMPILER
def test_what_one_photo_shows_and_the_others_contradict_goes_at_strong() -> None:
    views = [replace(view, name=f"{part}-{view.name}") for part in "ab" for view in cameras()]
    near = np.eye(4)
    near[2, 3] = -1.5  # a quarter as far from the floater as the others
    views.append(replace(views[0], name="near.png", viewmat=near))
    both = merged([wall(), made(torch.tensor([[0.0, 0.0, 2.0]]), 0.15, 2.0, torch.tensor([[1.7, -1.7, -1.7]]))])
    without, with_it = photos_of(wall(), views), photos_of(both, views)
    fitted = Photos(lambda name: (with_it if name == "near.png" else without).load(name))
    assert not floaters(both, "normal", views, fitted)[576]
    assert floaters(both, "strong", views, fitted)[576]
    # Two photos that show it are believed.
    twice = Photos(lambda name: (with_it if name in ("near.png", "a-1.png", "b-2.png") else without).load(name))
    assert not floaters(both, "strong", views, twice)[576]


@NEEDS_COMPILER
def test_photos_of_another_size_and_of_other_colours_do() -> None:
    views = cameras()
    both = merged([wall(), before_cameras()])
    large = photos_of(wall(), [view.resized(96, 80) for view in views])
    assert floaters(both, "normal", views, large)[576:].all()
    inside = photos_of(wall(), views)
    dark = Photos(lambda name: ((inside.load(name)[0] * 0.5).astype(np.uint8), None))  # type: ignore[index]
    fitted = replace(dark, fit_colours=True)
    of_dark, of_fitted = (_Views.of(wall(), views, photos, "test").saved for photos in (dark, fitted))
    assert of_dark.max() > 1 > of_fitted.max()
    # A fit of colours takes up most of what the large ones change.
    assert floaters(both, "normal", views, fitted)[578:].all()


@NEEDS_COMPILER
def test_light_drops_what_no_view_shows() -> None:
    # Behind the wall; behind all cameras, where other views may see it.
    behind = made(torch.tensor([[0.3, 0.2, 6], [0.0, 0, -3]]), 0.03, 3.0, torch.ones(1, 3))
    both = merged([wall(), before_cameras(), behind])
    found = floaters(both, "light", cameras())
    assert found[-2:].tolist() == [True, False]
    assert not found[576:-2].any()
    # Fewer pixels of smaller photos show a Gaussian.
    assert floaters(both, "light", [view.resized(12, 10) for view in cameras()]).sum() > found.sum()


@NEEDS_COMPILER
@pytest.mark.parametrize("antialiased", [False, True])
def test_light_counts_the_pixels_that_the_model_shows(antialiased: bool) -> None:
    # A Gaussian far smaller than a pixel covers two pixels, but where its opacity is compensated next to nothing.
    both = merged([wall(), made(torch.tensor([[0.1, 0.2, 2.0]]), 0.002, 3.0, torch.ones(1, 3))])
    model = EditedModel(both, ExportMetadata(antialiased=antialiased), cameras()[:1])
    shown = render(made(both.means[-1:], 0.002, 3.0, torch.ones(1, 3)), cameras()[0], antialiased=antialiased)
    assert (float(shown.alpha.sum()) < UNSEEN) == antialiased
    edited, _ = apply_operations(model, [Clean("--clean light", "light")])
    assert (len(edited.gaussians) == len(both)) == (not antialiased)


def test_small_groups_that_touch_nothing_are_isolated() -> None:
    pair = made(torch.tensor([[0.0, 0, 0], [0.05, 0, 0]]), 0.05, 2.0, torch.ones(1, 3))
    both = merged([wall(), pair])
    assert isolated(both, 2.0, 10).nonzero()[:, 0].tolist() == [576, 577]
    assert not isolated(both, 2.0, 1).any()
    assert floaters(both, "normal").nonzero()[:, 0].tolist() == [576, 577]
    assert not floaters(both, "light").any()
    assert not isolated(pair, 2.0, 10).any(), "the only group is the scene"
    assert not isolated(scene(1, 0), 2.0, 10).any()


@dataclass
class TransparentImages(MadeImages):
    """Photos of which the right half is transparent."""

    def over(self, background: Rgb) -> TransparentImages:
        shown = [pixels.copy() for pixels in self.pixels]
        for pixels in shown:
            pixels[:, pixels.shape[1] // 2 :] = background
        return TransparentImages(shown)


@NEEDS_COMPILER
def test_photos_of_a_scene_have_the_background_and_colours_of_the_model() -> None:
    """A file of splats says neither; a scene of other images is refused."""
    plain, views = wall(), cameras()
    white = replace(plain, sh0=torch.where(plain.means[:, :1] > 0, 1.7, plain.sh0))
    renders = [render(plain, view).image.clamp(0, 1).mul(255).round().byte().numpy() for view in views]

    def photos(images: MadeImages, gaussians: Gaussians) -> Photos:
        found = MadeScene(Path("/made"), "made", views, images, None, [1, 2, 3, 4], [0])  # type: ignore[arg-type]
        return Photos.of_scene(found, gaussians)[0]

    transparent = TransparentImages(renders)
    for gaussians, level in ((white, 1.0), (replace(white, sh0=-white.sh0.abs()), 0.0)):
        found = photos(transparent, gaussians)
        assert (found.background, found.held_out) == ((level, level, level), 1)
        assert found.load(views[0].name) is None
        pixels, masked = found.load(views[2].name) or (None, None)
        assert pixels is not None
        assert masked is None
        assert (pixels[:, 24:] == 255 * level).all()
    opaque = MadeImages(renders)
    opaque.over = lambda background: opaque  # type: ignore[attr-defined]
    assert not photos(opaque, plain).fit_colours
    dark = MadeImages([pixels // 2 for pixels in renders])
    dark.over = lambda background: dark  # type: ignore[attr-defined]
    assert photos(dark, plain).fit_colours
    other = MadeImages([255 - pixels for pixels in renders])
    other.over = lambda background: other  # type: ignore[attr-defined]
    with pytest.raises(SceneError, match="do not resemble"):
        photos(other, plain)


@NEEDS_COMPILER
@pytest.mark.parametrize("divisor", [1, 2, 4])
def test_the_size_of_the_images_of_a_file_is_that_of_the_renders_that_fit_them(divisor: int) -> None:
    """Gaussians that cover the pixels of small images leave gaps between those of larger ones."""
    dots = replace(wall(), log_scales=torch.full((576, 3), np.log(0.06 if divisor == 1 else 0.005 * divisor)))
    views = [view.resized(192, 160) for view in cameras()]
    images = MadeImages([])
    for view in views:
        image = _enlarged(render(dots, view.resized(192 // divisor, 160 // divisor)).image.clamp(0, 1), view)
        images.pixels.append(image.clamp(0, 1).mul(255).byte().numpy())
    images.over = lambda background: images  # type: ignore[attr-defined]
    scene = MadeScene(Path("/made"), "made", views, images, None, [1, 2, 3, 4], [0])  # type: ignore[arg-type]
    assert Photos.of_scene(scene, dots)[1] == divisor


@NEEDS_COMPILER
def test_the_background_of_a_file_is_found_at_the_size_of_its_images() -> None:
    """At full size black is nearer to a dark wall on white: it shows through the gaps."""
    dots = replace(wall(), log_scales=torch.full((576, 3), np.log(0.02)))
    dots = replace(dots, sh0=torch.full_like(dots.sh0, -1.2))
    views = [view.resized(192, 160) for view in cameras()]
    images = MadeImages([])
    for view in views:
        image = render(dots, view.resized(48, 40), background=torch.ones(3)).image
        images.pixels.append(_enlarged(image.clamp(0, 1), view).clamp(0, 1).mul(255).byte().numpy())
    images.over = lambda background: images  # type: ignore[attr-defined]
    scene = MadeScene(Path("/made"), "made", views, images, None, [1, 2, 3, 4], [0])  # type: ignore[arg-type]
    photos, divisor = Photos.of_scene(scene, dots)
    assert (photos.background, divisor) == ((1.0, 1.0, 1.0), 4)
