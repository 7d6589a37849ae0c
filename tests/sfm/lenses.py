"""Reconstructions of known lenses, without images: points that fill the view of cameras a step apart."""

from __future__ import annotations

import numpy as np

from splatcli.scene._pycolmap import pycolmap

WIDTH, HEIGHT = 960, 720
#: Pixels by which observations are off, one standard deviation in x and in y.
NOISE = 0.3


def reconstruct(
    lenses: list[tuple[str, list[float]]], *, images: int = 12, points: int = 1200, seed: int = 0
) -> pycolmap.Reconstruction:
    """Return the model of ``images`` views through each lens: true poses and points, noisy observations."""
    generator = np.random.default_rng(seed)
    made = pycolmap.Reconstruction()
    spread = np.column_stack([generator.uniform(-9, 9, points), generator.uniform(-7, 7, points)])
    world = np.column_stack([spread, generator.uniform(4, 8, points)])
    ids = [made.add_point3D(xyz, pycolmap.Track(), np.zeros(3, np.uint8)) for xyz in world]
    for number, (name, params) in enumerate(lenses, 1):
        camera = pycolmap.Camera(camera_id=number, model=name, width=WIDTH, height=HEIGHT, params=params)
        made.add_camera_with_trivial_rig(camera)
        for step in range(images):
            turned = generator.uniform(-0.25, 0.25, 3)
            rotation = pycolmap.Rotation3d(turned)
            center = generator.uniform([-2.5, -2, -1], [2.5, 2, 1])
            pose = pycolmap.Rigid3d(rotation, -(rotation * center[None])[0])
            rays = np.asarray(pose * world)
            pixels = np.asarray(camera.img_from_cam(rays), dtype=float)
            wide = np.abs(rays[:, :2] / rays[:, 2:]).max(axis=1) < 1.6
            inside = ((pixels > 0) & (pixels < [WIDTH, HEIGHT])).all(axis=1)
            seen = np.flatnonzero((rays[:, 2] > 0.5) & wide & inside)
            noisy = pixels[seen] + generator.normal(0, NOISE, (len(seen), 2))
            image = pycolmap.Image(
                name=f"{number}-{step}.jpg", camera_id=number, image_id=100 * number + step, keypoints=noisy
            )
            made.add_image_with_trivial_frame(image, pose)
            for index, point in enumerate(seen):
                made.add_observation(ids[point], pycolmap.TrackElement(image.image_id, index))
    for point in list(made.point3D_ids()):
        if made.point3D(point).track.length() < 2:
            made.delete_point3D(point)
    return made
