"""Features that stay at one place of the image while the camera moves: watermarks, timestamps, parts of the vehicle.

They match in every pair, say that the camera stands still, and bend or split the model; so does what stands behind an
object on a turntable. What a camera that moves sees moves in the image, so a place where most images have the same
feature is not of the scene. Such places are found before images are matched, and the features around them are dropped.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label
from scipy.spatial import cKDTree

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.features import Stored, sample_of, save_colours
from splatcli.sfm.matching import unit
from splatcli.sizes import evenly

#: Images of one size that are compared, at least and at most.
_FEWEST, _MOST = 8, 24
#: Share of the other images that must have a feature at its place: photos from two tripods have half of them. Where
#: there are such places, those of features that fewer images have, since they are hardly found, are taken too: of this
#: share, and no farther off than so many pixels.
_SHARE, _LOW_SHARE, _REACH = 0.6, 0.15, 40.0
#: Pixels, at the size at which features were found, by which places may differ; least cosine of the descriptors.
_OFF, _ALIKE = 1.5, 0.85
#: Features near a place that one is compared with: SIFT gives several orientations.
_NEAREST = 4
#: Places below which they are chance; pixels around one in which all features are dropped.
FEWEST_PLACES, _AROUND = 8, 6.0
#: Features that are left in the middle image; with fewer the camera stands still, and nothing is dropped.
_LEFT = 100
#: Cells of the longer side by which places are gathered to boxes, and how many boxes are reported.
_CELLS, _BOXES = 12, 3

Size = tuple[int, int]
#: Width and height of images -> places [P, 2] in pixels.
Places = Mapping[Size, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class _Group:
    """Images of one size in a database. scale: their pixels in one of the size at which features were found."""

    store: pycolmap.Database
    image_ids: list[int]
    scale: float

    def xy(self, image_id: int) -> NDArray[np.float32]:
        return np.asarray(self.store.read_keypoints(image_id), dtype=np.float32)[:, :2]

    def descriptors(self, image_id: int) -> NDArray[np.uint8]:
        return np.asarray(self.store.read_descriptors(image_id).data, dtype=np.uint8).reshape(-1, 128)

    def moves(self, image_id: int, places: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return [N], whether a feature of an image is away from all places."""
        xy = self.xy(image_id)
        away = cKDTree(places).query(xy, distance_upper_bound=_AROUND * self.scale)[0]
        return np.asarray(np.isinf(away), dtype=np.bool_)


def known_stationary(
    file: Path, database: Path, stored: Sequence[Stored], max_image_size: int
) -> dict[Size, NDArray[np.float32]]:
    """Return find_stationary(), from ``file`` where an earlier call has left it there; else it is left there now."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {(fact["width"], fact["height"]): np.array(fact["places"], np.float32).reshape(-1, 2) for fact in found}
    except (OSError, ValueError, TypeError, KeyError):
        places = find_stationary(database, stored, max_image_size)
        found = [{"width": size[0], "height": size[1], "places": at.tolist()} for size, at in places.items()]
        file.write_text(json.dumps(found), encoding="utf-8")
        return places


def find_stationary(database: Path, stored: Sequence[Stored], max_image_size: int) -> dict[Size, NDArray[np.float32]]:
    """Return where features stay while the camera moves, for each size of images that has such places.

    max_image_size: pixels of the longer side at which the features were found.
    """
    found = {}
    with pycolmap.Database.open(database) as store:
        for size, group in _groups(store, stored, max_image_size).items():
            places = _places_of(group)
            if len(places):
                left = [int(group.moves(image_id, places).sum()) for image_id in group.image_ids]
                if np.median(left) >= _LEFT:
                    found[size] = places
    return found


def drop_stationary(database: Path, stored: Sequence[Stored], places: Places, max_image_size: int) -> list[Stored]:
    """Drop the features around ``places`` from the database; return the images with those that are left.

    Matches, which count features, are cleared if any is dropped.
    """
    rows: dict[int, NDArray[np.bool_]] = {}
    left: dict[int, tuple[NDArray[np.float32], NDArray[np.uint8]]] = {}
    with pycolmap.Database.open(database) as store:
        for size, group in _groups(store, stored, max_image_size).items():
            for image_id in group.image_ids if size in places else ():
                moves = group.moves(image_id, places[size])
                if not moves.all():
                    rows[image_id] = moves
                    left[image_id] = group.xy(image_id)[moves], group.descriptors(image_id)[moves]
        if rows:
            store.clear_matches()
            store.clear_two_view_geometries()
    # pycolmap replaces no descriptors.
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executemany("DELETE FROM descriptors WHERE image_id = ?", [(image_id,) for image_id in rows])
    result = []
    with pycolmap.Database.open(database) as store, pycolmap.DatabaseTransaction(store):
        for item in stored:
            if item.image_id in rows:
                xy, descriptors = left[item.image_id]
                store.update_keypoints(item.image_id, xy)
                kind = pycolmap.FeatureExtractorType.SIFT
                store.write_descriptors(item.image_id, pycolmap.FeatureDescriptors(type=kind, data=descriptors))
                colours = item.colours[rows[item.image_id]]
                save_colours(database, item.key, colours)
                item = replace(item, sample=sample_of(descriptors), colours=colours)
            result.append(item)
    return result


def boxes_of(places: NDArray[np.float32], size: Size) -> list[list[int]]:
    """Return left, top, right, bottom in pixels of the regions that places gather in, those with most first."""
    cell = max(size) / _CELLS
    column, row = np.minimum(places.T // cell, _CELLS - 1).astype(int)
    counts = np.zeros((_CELLS, _CELLS), np.int64)
    np.add.at(counts, (row, column), 1)
    regions, _ = label(counts, np.ones((3, 3)))
    own = regions[row, column]
    largest = np.argsort(-np.bincount(own)[1:], kind="stable")[:_BOXES] + 1
    corners = (places[own == region] for region in largest)
    return [
        [*np.floor(part.min(axis=0)).astype(int).tolist(), *np.ceil(part.max(axis=0)).astype(int).tolist()]
        for part in corners
    ]


def _groups(store: pycolmap.Database, stored: Sequence[Stored], max_image_size: int) -> dict[Size, _Group]:
    groups: dict[Size, _Group] = {}
    for item in stored:
        size = item.image.size
        if item.image.panorama is None:
            scale = max(1.0, max(size) / max_image_size)
            groups.setdefault(size, _Group(store, [], scale)).image_ids.append(item.image_id)
    return groups


def _places_of(group: _Group) -> NDArray[np.float32]:
    """Return [P, 2], the places of features that images of a group have there; none unless most have some of them."""
    count = len(group.image_ids)
    if count < _FEWEST:
        return np.zeros((0, 2), np.float32)
    compared = evenly(group.image_ids, _MOST, ends=True)
    features = {image_id: (group.xy(image_id), unit(group.descriptors(image_id))) for image_id in compared}
    trees = {image_id: cKDTree(xy) for image_id, (xy, _) in features.items() if len(xy)}
    found, counts = [], []
    for image_id, (xy, descriptors) in features.items():
        seen = np.zeros(len(xy), np.int64)
        for other, tree in trees.items():
            if other == image_id or not len(xy):
                continue
            _, near = tree.query(xy, k=_NEAREST, distance_upper_bound=_OFF * group.scale)
            row, column = np.nonzero(near < tree.n)
            alike = (descriptors[row] * features[other][1][near[row, column]]).sum(axis=1) > _ALIKE
            seen[np.unique(row[alike])] += 1
        found.append(xy)
        counts.append(seen)
    places, share = np.concatenate(found), np.concatenate(counts) / (len(compared) - 1)
    sure = places[share > _SHARE]
    if len(sure) < FEWEST_PLACES:
        return places[:0]
    places = places[share > _LOW_SHARE]
    places = places[np.isfinite(cKDTree(sure).query(places, distance_upper_bound=_REACH * group.scale)[0])]
    step = _OFF * group.scale
    return np.unique((places / step).round(), axis=0) * np.float32(step)
