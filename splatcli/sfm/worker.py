"""The process that does the work: ``python -m splatcli.sfm.worker``, a request on stdin, JSON lines on stdout.

It is a process of its own because C++ libraries abort, run out of memory and do not listen to Ctrl-C; whatever
happens to it, the one that started it can say so. Lines are ``{"phase", "done", "total"}`` on the way, and at the end
``{"facts"}`` or ``{"error"}``; stderr is pycolmap's log.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from splatcli import __version__
from splatcli.checkpoint.atomic import sync
from splatcli.errors import OutputError, SceneError, SplatError, UsageError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.colmap import check_written
from splatcli.scene.control_points import ControlPoints, fit_control_points
from splatcli.scene.decode import Header, read_header
from splatcli.scene.georeference import PositionsError, Similarity, georeference, position_of, write_sidecar
from splatcli.scene.images import max_pixels
from splatcli.sfm.features import SfmImage, Stored, die_with_parent, extract
from splatcli.sfm.fisheye import compared, wide_cameras, with_fisheyes
from splatcli.sfm.gaps import find_gaps, stretches_in
from splatcli.sfm.images import SfmInput, orientation_of, readable
from splatcli.sfm.lens import choose_lenses, own_lenses
from splatcli.sfm.matching import Pair, choose_pairs, how_to_match, match, match_again, pairs_to_retry
from splatcli.sfm.options import (
    AUTO,
    COLOURS,
    FISHEYE,
    LOCK,
    MIN_IMAGES,
    STATIONARY,
    VIDEO_FRAMES,
    Matching,
    SfmOptions,
    is_fisheye_model,
)
from splatcli.sfm.panorama import face_camera, is_panorama, write_faces, write_masks
from splatcli.sfm.static_masks import write_static_masks
from splatcli.sfm.stationary import Places, boxes_of, drop_stationary, find_stationary
from splatcli.sfm.triangulate import hold_lenses, pairs_by_pose, triangulate
from splatcli.sfm.video import sharpest, sharpness, write_frames, write_more_frames

Tell = Callable[[str, int, int], None]

#: Points whose parallax is measured; a median needs no more.
_PARALLAX_POINTS = 2_000
#: Share of the images that may lack in a model without a try of fisheyes, and that these must register more.
_FEW_LACKING = 0.1
_OVERLAP = "images have to overlap by two thirds, be sharp, and show things with texture that stand still"


@dataclass(frozen=True, slots=True)
class Mapped:
    """Images in a database, and the models that their matches give.

    keys: the names of ``stored`` in the database. pairs: what was matched, indices into ``stored``. verified: how many
    of the pairs hold. models: the largest first.
    """

    database: Path
    stored: list[Stored]
    keys: list[str]
    pairs: list[Pair]
    verified: int
    models: list[pycolmap.Reconstruction]

    def name_of(self, number: int) -> str:
        """Return the name of the image that has a number in the database."""
        return next(item.image.name for item in self.stored if item.number == number)


class Job:
    """One reconstruction, step by step."""

    def __init__(
        self, footage: SfmInput, options: SfmOptions, folder: Path, *, threads: int, gpu: bool, tell: Tell
    ) -> None:
        """Set up a Job. folder: exists; receives images/, sparse/0/ and, in work/, what is thrown away.

        What a Job of the same images and options left in work/ is used, everything else there is removed.
        """
        self.footage = footage
        self.options = options
        self.folder = folder
        self.threads = threads
        self.gpu = gpu
        self.seconds: dict[str, float] = {}
        self.unreadable: dict[str, str] = {}
        self.panoramas: list[str] = []
        self._tell = tell
        self._since = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Run all steps; return the facts of the report. Raises SplatError."""
        pycolmap.set_random_seed(self.options.seed)
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        frames = self._known_frames()
        remove_unfinished(self.folder, keep_images=frames is not None)
        (self.folder / "images").mkdir(exist_ok=True)
        images = self._images(frames)
        database = work / "database.db"
        stored, bad = extract(
            database, images, self.options, threads=self.threads, gpu=self.gpu, progress=self._phase("features")
        )
        self._leave_out(bad)
        self._check_count([item.image.name for item in stored])
        keys = keys_of(stored, images)
        places, stationary = self._find_stationary(database, stored)
        stored = drop_stationary(database, stored, keys, places, self.options.max_image_size)
        cameras = self.options.cameras
        how = how_to_match(self.options.matching, len(stored), video=self.footage.is_video)
        by_pose = cameras is not None and self.options.matching == "auto"
        if cameras is not None and by_pose:
            pairs = pairs_by_pose([cameras[item.image.name] for item in stored])
        else:
            pairs = choose_pairs(how, [item.sample for item in stored], self.options.seed)
        # The faces of a panorama are at one place, and known to each other.
        source = sources(stored)
        pairs = [(i, j) for i, j in pairs if source[i] is None or source[i] != source[j]]
        seed = self.options.seed
        if cameras is not None:
            hold_lenses(database, stored, cameras)
        verified = self._match("matching", database, keys, pairs)
        added, retried = None, None
        if cameras is None:
            models = self._map("mapping", database, work / "models", len(stored))
            mapped = Mapped(database, stored, keys, pairs, verified, models)
            mapped, added = self._fill_gaps(mapped, images, how, places) if self.footage.is_video else (mapped, None)
            mapped, retried = self._retry(mapped)
            mapped = self._try_fisheyes(mapped)
            models = mapped.models
        else:
            progress = self._phase("triangulation")
            models = [
                triangulate(
                    database, work / "models", stored, keys, cameras, seed=seed, threads=self.threads, progress=progress
                )
            ]
            mapped = Mapped(database, stored, keys, pairs, verified, models)
        stored = self._settle(mapped.stored, images, models)
        names = sorted(item.image.name for item in stored)
        if added is not None:
            added["kept"] = len(stored) - added["of"]
        if not mapped.verified and not (retried and retried["verified_pairs"]):
            raise SceneError(
                f"no two of the {len(names)} images show the same thing from different places",
                where=self.footage.path,
                remedy=_OVERLAP + ("; masks may hide too much: --masks none" if self.footage.masks else ""),
            )
        self._check_models(models, names)
        lenses: list[dict[str, Any]] = []
        zoomed: list[dict[str, Any]] = []
        if self.options.camera_model == AUTO and cameras is None:
            models, lenses, zoomed = self._choose_lenses(mapped)
        model = models[0]
        for each in models:
            name_and_colour(
                each,
                {item.number: item.image.name for item in stored},
                {item.number: item.colours for item in stored},
            )
        placed = self._place(model)
        for number, each in enumerate(models):
            self._write(each, number)
        masks, made = sum(image.mask is not None for image in images), 0
        if places and not masks and not self.panoramas and self.footage.static_masks:
            made = self._write_static_masks([item.image for item in stored], places)
        return {
            **model_facts(model, names),
            "lenses": lenses,
            "zoomed": zoomed,
            "georeference": placed,
            "other_models": [other.num_reg_images() for other in models[1:]],
            "other_images": [sorted(centers_of(other)) for other in models[1:]],
            "cameras_held": cameras is not None,
            "matching": "poses" if by_pose else how,
            "pairs": len(mapped.pairs),
            "verified_pairs": mapped.verified,
            "added_frames": added,
            "retried": retried,
            "unreadable": self.unreadable,
            "stationary": stationary,
            "panoramas": self.panoramas,
            "masks": masks or made,
            "static_masks": made > 0,
            "seconds": {phase: round(spent, 2) for phase, spent in self.seconds.items()},
            "threads": self.threads,
            "gpu": self.gpu,
            "versions": versions(),
        }

    def _map(self, phase: str, database: Path, folder: Path, total: int) -> list[pycolmap.Reconstruction]:
        seed, progress = self.options.seed, self._phase(phase)
        if is_fisheye_model(self.options.mapped_model):
            database = with_fisheyes(database, self.options.mapped_model)
        if self.options.mapper == "global":
            return run_global_mapper(
                database, folder, seed=seed, threads=self.threads, gpu=self.gpu, total=total, progress=progress
            )
        return run_mapper(database, folder, seed=seed, threads=self.threads, total=total, progress=progress)

    def _try_fisheyes(self, mapped: Mapped) -> Mapped:
        """Map anew with fisheyes where many images are not registered; return what is used, the larger model."""
        registered = mapped.models[0].num_reg_images() if mapped.models else 0
        lacking = len(mapped.stored) - registered
        if not self._may_be_fisheye(mapped.database) or lacking <= _FEW_LACKING * len(mapped.stored):
            return mapped
        found = self._map_fisheyes(mapped, None)
        enough = registered + _FEW_LACKING * len(mapped.stored)
        return found if found.models and found.models[0].num_reg_images() > enough else mapped

    def _choose_lenses(
        self, mapped: Mapped
    ) -> tuple[list[pycolmap.Reconstruction], list[dict[str, Any]], list[dict[str, Any]]]:
        """Choose the lens of each camera of the largest model; return the models with it, and two reports.

        The second is of cameras that were zoomed, each of whose images has a lens of its own.
        """
        models, constant = mapped.models, _rig_cameras(mapped.database)
        kind = {"seed": self.options.seed, "threads": self.threads}
        as_mapped = models[0]
        models[0], lenses = choose_lenses(models[0], constant=constant, progress=self._phase("lens"), **kind)
        mapped_so = any(is_fisheye_model(fact["start"]) for fact in lenses)
        wide = wide_cameras(models[0], lenses)
        if not wide and not mapped_so and not constant and self.options.camera_per != "image":
            own = own_lenses(as_mapped, lenses, constant=constant, **kind)
            if own is not None:
                zoomed = {fact["camera"] for fact in own[1]}
                return [own[0], *models[1:]], [fact for fact in lenses if fact["camera"] not in zoomed], own[1]
        if not wide or mapped_so or not self._may_be_fisheye(mapped.database):
            return models, lenses, []
        again = self._map_fisheyes(mapped, wide).models
        report = compared(again[0], models[0], lenses, wide, constant=constant, **kind) if again else None
        return (models, lenses, []) if report is None else (again, report, [])

    def _may_be_fisheye(self, database: Path) -> bool:
        """Return whether fisheyes are tried: the lens is not given, and the mapper can hold the faces of panoramas."""
        options = self.options
        return options.camera_model == AUTO and options.mapper == "incremental" and not _rig_cameras(database)

    def _map_fisheyes(self, mapped: Mapped, cameras: set[int] | None) -> Mapped:
        """Map anew with fisheyes in place of ``cameras``, None: of all. What an earlier try wrote is replaced."""
        database = with_fisheyes(mapped.database, FISHEYE, cameras)
        folder = database.with_name(f"{database.stem}-models")
        shutil.rmtree(folder, ignore_errors=True)
        models = self._map("mapping as fisheye", database, folder, len(mapped.stored))
        return replace(mapped, database=database, models=models)

    def _match(self, phase: str, database: Path, keys: list[str], pairs: list[Pair]) -> int:
        seed, progress = self.options.seed, self._phase(phase)
        return match(database, keys, pairs, seed=seed, threads=self.threads, gpu=self.gpu, progress=progress)

    def _find_stationary(self, database: Path, stored: list[Stored]) -> tuple[Places, list[dict[str, Any]]]:
        """Return the places of features that do not move, and their facts; those that an earlier Job found."""
        file = self.folder / "work" / STATIONARY
        try:
            facts: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = find_stationary(database, stored, self.options.max_image_size)
            facts = [
                {
                    "width": size[0],
                    "height": size[1],
                    "images": sum((item.image.width, item.image.height) == size for item in stored),
                    "boxes": boxes_of(places, size),
                    "places": places.round(2).tolist(),
                }
                for size, places in found.items()
            ]
            file.write_text(json.dumps(facts), encoding="utf-8")
        known = {(fact["width"], fact["height"]): np.array(fact["places"], np.float32) for fact in facts}
        return known, [{**fact, "places": len(fact["places"])} for fact in facts]

    def _write_static_masks(self, images: list[SfmImage], places: Places) -> int:
        """Write masks/ of what stands still in the images, which lie in images/ now; return how many."""
        there = [replace(image, path=self.folder / "images" / image.name) for image in images]
        return write_static_masks(there, places, self.folder / "masks", self._phase("masks"), self.threads)

    def _fill_gaps(
        self, first: Mapped, images: list[SfmImage], how: Matching, places: Places
    ) -> tuple[Mapped, dict[str, Any] | None]:
        """Add frames of the video between neighbours that no model has both of, and map anew.

        images: the frames that were chosen at first. places: around which features are dropped.
        Returns what is to be used, ``first`` unless the largest model registers more of these now, and the facts of the
        try, or None without gaps. All that is written lies in work/gaps/: what is kept of ``first`` stays valid.
        """
        models = [{first.name_of(number) for number in model.reg_image_ids()} for model in first.models]
        gaps = find_gaps([image.name for image in images], models)
        stretches = stretches_in(gaps, len(images))
        if not stretches:
            return first, None
        folder = self.folder / "work" / "gaps"
        folder.mkdir()
        names = write_more_frames(self.footage.path, folder, stretches, self._phase("more frames"))
        headers, _ = readable(SfmInput(folder, tuple(names)), max_pixels(None))
        more = [SfmImage.of(name, folder, header) for name, header in headers.items()]
        database = folder / "database.db"
        shutil.copyfile(first.database, database)
        shutil.copytree(first.database.with_name(COLOURS), database.with_name(COLOURS))
        # The database names images by their place in this list, so new ones are at its end.
        everything = [*images, *more]
        progress = self._phase("more features")
        stored, _ = extract(database, everything, self.options, threads=self.threads, gpu=self.gpu, progress=progress)
        keys = keys_of(stored, everything)
        stored = drop_stationary(database, stored, keys, places, self.options.max_image_size)
        order = sorted(range(len(stored)), key=lambda index: stored[index].image.name)
        wanted = choose_pairs(how, [stored[index].sample for index in order], self.options.seed)
        pairs = [(min(order[i], order[j]), max(order[i], order[j])) for i, j in wanted]
        new = sorted(pair for pair in pairs if pair[1] >= len(first.stored))
        verified = self._match("more matching", database, keys, new)
        found = self._map("more mapping", database, folder / "models", len(stored))
        chosen = {item.number for item in first.stored}
        before, after = (len(chosen & set(each[0].reg_image_ids())) if each else 0 for each in (first.models, found))
        facts = {"gaps": len(gaps), "frames": len(more), "before": before, "after": after, "of": len(chosen)}
        if after <= before:
            return first, facts
        return Mapped(database, stored, keys, [*first.pairs, *new], verified, found), facts

    def _settle(
        self, stored: list[Stored], images: list[SfmImage], models: list[pycolmap.Reconstruction]
    ) -> list[Stored]:
        """Leave out frames that were added to ``images`` and are in none of the models; move the others to images/."""
        used = {number for model in models for number in model.reg_image_ids()}
        chosen = {image.name for image in images}
        kept = [item for item in stored if item.image.name in chosen or item.number in used]
        for item in kept:
            if item.image.name not in chosen:
                item.image.path.rename(self.folder / "images" / item.image.name)
        return kept

    def _retry(self, mapped: Mapped) -> tuple[Mapped, dict[str, Any] | None]:
        """Match the images that the largest model lacks again, loosely and with all others, and map anew.

        Returns what is to be used, ``mapped`` unless the largest model registers more images now, and the facts of the
        try, or None if no image is lacking.
        """
        models, stored, keys, pairs = mapped.models, mapped.stored, mapped.keys, mapped.pairs
        registered = set(models[0].reg_image_ids()) if models else set()
        lacking = {index for index, item in enumerate(stored) if item.number not in registered}
        if not lacking:
            return mapped, None
        work = self.folder / "work"
        shutil.copyfile(mapped.database, work / "retry.db")
        again = partial(
            match_again,
            mapped.database,
            work / "retry.db",
            keys,
            seed=self.options.seed,
            threads=self.threads,
            gpu=self.gpu,
            progress=self._phase("matching again"),
        )
        held = again(pairs_to_retry(pairs, lacking, sources(stored)))
        # A registered image that holds with a lacking one needs more points for it: those it shares with others.
        beside = {index for pair in held for index in pair} - lacking
        again([(i, j) for i, j in pairs if (i in beside or j in beside) and not {i, j} & lacking])
        found = self._map("mapping again", work / "retry.db", work / "models-again", len(stored)) if held else []
        count = found[0].num_reg_images() if found else 0
        facts = {"images": len(lacking), "verified_pairs": len(held), "before": len(registered), "after": count}
        if count > len(registered):
            mapped = replace(mapped, database=work / "retry.db", models=found)
        return mapped, facts

    def _phase(self, name: str) -> Callable[[int, int], None]:
        """End the phase before; return the progress callback of the new one. A phase lasts until its last call."""
        self._since = time.monotonic()

        def progress(done: int, total: int) -> None:
            self.seconds[name] = time.monotonic() - self._since
            self._tell(name, done, total)

        return progress

    @property
    def _frame_list(self) -> Path:
        return self.folder / "work" / "frames.json"

    def _known_frames(self) -> list[str] | None:
        """Return the frames of the video that an earlier Job wrote, if it wrote all."""
        try:
            names: list[str] = json.loads(self._frame_list.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return names if all((self.folder / "images" / name).is_file() for name in names) else None

    def _images(self, frames: list[str] | None) -> list[SfmImage]:
        """Return the images to work on, in name order; they lie in, or are linked from, images/ then.

        frames: those of a video that are there already.
        """
        footage = self.footage
        if footage.is_video:
            count = self.options.frames or VIDEO_FRAMES
            names = frames or write_frames(footage.path, self.folder / "images", count, self._phase("frames"))
            self._frame_list.write_text(json.dumps(names), encoding="utf-8")
            for path in (self.folder / "images").iterdir():
                if path.name not in names:
                    path.unlink()  # a Job that was stopped had added it
            footage = SfmInput(self.folder / "images", tuple(names))
            self._check_count(names)
        headers, bad = readable(footage, max_pixels(None))
        cameras = self.options.cameras
        if cameras is not None:
            headers = {name: header for name, header in headers.items() if name in cameras}
        panoramas = [] if self.footage.is_video or cameras is not None else self._panoramas(footage, headers, bad)
        self._leave_out(bad)
        images = [SfmImage.of(name, footage.path, header, footage.mask(name)) for name, header in headers.items()]
        if self.options.frames is not None and self.options.frames < len(images):
            images = self._sharpest(images, self.options.frames)
        self._check_count([image.name for image in [*images, *panoramas]])
        if not self.footage.is_video:
            for image in images:
                link(image.path, self.folder / "images" / image.name)
                if image.mask is not None:
                    link(image.mask, self.folder / "masks" / footage.masks[image.name])
        return sorted([*images, *panoramas], key=lambda image: image.name)

    def _panoramas(self, footage: SfmInput, headers: dict[str, Header], bad: dict[str, SplatError]) -> list[SfmImage]:
        """Write the faces of panoramas and return them; take the panoramas out of ``headers``."""
        faces: list[SfmImage] = []
        for name, header in list(headers.items()):
            path = footage.path / name
            try:
                if not is_panorama(path, header):
                    continue
                if self.options.mapper == "global":
                    raise UsageError(
                        f"{name} is a panorama, which needs the incremental mapper",
                        where="--mapper",
                        remedy="leave out --mapper global, or the panorama",
                    )
                written = write_faces(path, self.folder / "images" / name)
                mask = footage.mask(name)
                place = self.folder / "masks" / name
                masks = [] if mask is None else write_masks(mask, header.width, header.height, place)
            except SceneError as problem:
                bad[name] = problem
                del headers[name]
                continue
            del headers[name]
            self.panoramas.append(name)
            lens = face_camera(header.width)
            size = int(lens.width), int(lens.height)
            for i, file in enumerate(written):
                of = (name, header.width, i)
                mask_of = masks[i] if masks else None
                faces.append(SfmImage(f"{name}/{file.name}", file, 1, *size, mask_of, 1, of))
        return faces

    def _sharpest(self, images: list[SfmImage], count: int) -> list[SfmImage]:
        from splatcli.scene.decode import decode_rgb

        progress = self._phase("frames")

        def score(index: int, image: SfmImage) -> float:
            progress(index + 1, len(images))
            try:
                return sharpness(decode_rgb(image.path, (0, 0, 0)))
            except SplatError:
                return 0.0  # is reported when features are looked for, if nothing better is near it

        return list(sharpest(((p, score(i, p)) for i, p in enumerate(images)), len(images), count))

    def _leave_out(self, bad: dict[str, SplatError]) -> None:
        self.unreadable.update({name: problem.what for name, problem in bad.items()})

    def _check_count(self, names: list[str]) -> None:
        if len(names) >= MIN_IMAGES:
            return
        kind = "frames" if self.footage.is_video else "images"
        first = next(iter(self.unreadable.items()), None)
        others = "" if first is None else f"; {len(self.unreadable)} cannot be read, {first[0]}: {first[1]}"
        total = len(names) + len(self.unreadable)
        have = f"only {len(names)} of {total}" if names else f"none of the {total}"
        raise SceneError(
            f"{have} {kind} can be used, at least {MIN_IMAGES} are needed{others}",
            where=self.footage.path,
            remedy="add images that can be read" if kind == "images" else "use a longer video",
        )

    def _check_models(self, models: list[pycolmap.Reconstruction], names: list[str]) -> None:
        placed = models[0].num_reg_images() if models else 0
        if placed >= MIN_IMAGES:
            return
        raise SceneError(
            f"only {placed} of {len(names)} images could be placed, at least {MIN_IMAGES} are needed"
            if placed
            else f"none of the {len(names)} images could be placed: no pair of them shows enough depth to begin with",
            where=self.footage.path,
            remedy=f"{_OVERLAP}; step sideways between images instead of turning on the spot",
        )

    def _place(self, model: pycolmap.Reconstruction) -> dict[str, Any]:
        """Give the model metres, and a place where GPS says so; return what was done, or why it was not."""
        if self.options.cameras is not None:
            return {"applied": False, "reason": "the cameras are held"}
        if self.options.control_points is not None:
            return self._control(model, ControlPoints.from_dict(self.options.control_points))
        if self.options.scale_from is not None:
            return self._scale(model)
        if self.options.georeference == "off" or self.footage.is_video:
            return {"applied": False, "reason": "off" if self.options.georeference == "off" else "videos have no GPS"}
        try:
            centers = {self._source(name): center for name, center in centers_of(model).items()}
            found = georeference(centers, self.footage.path)
        except PositionsError as reason:
            if self.options.georeference == "on":
                raise SceneError(
                    f"the model cannot be aligned with GPS: {reason}",
                    where=self.footage.path,
                    remedy="leave out --georeference on; --scale-from A,B,LENGTH gives it metres",
                ) from None
            return {"applied": False, "reason": str(reason)}
        if self.options.georeference == "auto" and not found.fit.is_good:
            reason_ = (
                f"GPS is too coarse for the size of the scene: it leaves the scale uncertain by "
                f"{100 * found.fit.scale_error:.0f} % and the tilt by {found.fit.tilt_error:.0f} degrees"
            )
            return {"applied": False, "reason": reason_, **found.facts()}
        model.transform(pycolmap.Sim3d(found.fit.similarity.matrix))
        write_sidecar(self.folder, found.document())
        return {"applied": True, "origin": list(found.origin), **found.facts()}

    def _source(self, name: str) -> str:
        """Return the file that an image of the model was taken from."""
        source = str(PurePosixPath(name).parent)
        return source if source in self.panoramas else name

    def _scale(self, model: pycolmap.Reconstruction) -> dict[str, Any]:
        first, second, length = self.options.known_distance()
        centers = centers_of(model)
        apart = float(np.linalg.norm(self._center(first, centers) - self._center(second, centers)))
        if not apart > 0:
            raise SceneError(f"{first} and {second} are at one place", where="--scale-from", remedy="name two others")
        similarity = Similarity(length / apart, np.eye(3), np.zeros(3))
        model.transform(pycolmap.Sim3d(similarity.matrix))
        facts = {"metres_per_unit": similarity.scale, "scale_from": self.options.scale_from}
        write_sidecar(self.folder, {"version": 1, "frame": "metres, axes as they came", **facts})
        unused = 0
        if not self.footage.is_video:
            unused = sum(position_of(self.footage.path / self._source(name)) is not None for name in centers)
        return {"applied": True, **facts, "unused_positions": unused}

    def _center(self, name: str, centers: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the position of an image, or of a panorama, whose faces are at one place. Raises SceneError.

        The ending may differ where only one image has the rest of the name.
        """
        places = {**{self._source(each): center for each, center in centers.items()}, **centers}
        stem = PurePosixPath(name).with_suffix("")
        alike = [each for each in places if PurePosixPath(each).with_suffix("") == stem]
        if name not in places and len(alike) != 1:
            raise SceneError(
                f"{name!r} is not among the {len(centers)} registered images",
                where="--scale-from",
                remedy=f"name two that are, such as {min(centers)}",
            )
        return places[name if name in places else alike[0]]

    def _control(self, model: pycolmap.Reconstruction, control: ControlPoints) -> dict[str, Any]:
        found = fit_control_points(model, control, self._unturned)
        model.transform(pycolmap.Sim3d(found.fit.similarity.matrix))
        write_sidecar(self.folder, found.document())
        place = {} if found.origin is None else {"origin": list(found.origin)}
        return {"applied": True, **place, **found.facts()}

    def _unturned(self, name: str) -> int:
        """Return the EXIF orientation of an image of the model that is worked on as it is stored; else 1."""
        file = self.footage.path / name
        if self.footage.is_video or not file.is_file():  # a frame, or a face of a panorama
            return 1
        header = read_header(file)
        return header.orientation if orientation_of(header) == 1 else 1

    def _write(self, model: pycolmap.Reconstruction, number: int) -> None:
        """Write a model. Raise OutputError where the disk does not hold all of it, which pycolmap does not notice."""
        sparse = self.folder / "sparse" / str(number)
        sparse.mkdir(parents=True)
        model.write_binary(sparse)
        try:
            for file in sparse.iterdir():
                sync(file)
            check_written(sparse)
        except SceneError as problem:
            raise OutputError(
                f"the model could not be written (disk full?): {Path(str(problem.where)).name} {problem.what}",
                where=self.folder,
                remedy="free some space, or choose another place with -o",
            ) from None


def sources(stored: list[Stored]) -> list[str | None]:
    """Return for each image the panorama that it is a face of, or None."""
    return [None if item.image.panorama is None else item.image.panorama[0] for item in stored]


def keys_of(stored: list[Stored], images: list[SfmImage]) -> list[str]:
    """Return the names in the database: the places in ``images``, whose own names are distinct."""
    places = {image.name: str(place) for place, image in enumerate(images)}
    return [places[item.image.name] for item in stored]


def remove_unfinished(folder: Path, *, keep_images: bool) -> None:
    """Remove from a Job's folder all that a later one makes anew: not features and matches, nor images if kept."""
    kept = {
        folder / "key.json",
        folder / "log",
        folder / LOCK,
        folder / "work",
        *([folder / "images"] if keep_images else []),
    }
    stored = (
        "database.db",
        "database.db-journal",
        "database.db-wal",
        "database.db-shm",
        COLOURS,
        "frames.json",
        STATIONARY,
    )
    for path in [*folder.iterdir(), *(folder / "work").iterdir()]:
        if path in kept or (path.parent.name == "work" and path.name in stored):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def link(image: Path, place: Path) -> None:
    """Give an image a second name, which takes no room and survives a move of either folder; else a symbolic link.

    A second name is not possible on another file system, and on some systems for files of somebody else.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    real = image.resolve()
    try:
        os.link(real, place)
    except OSError:
        place.symlink_to(real)


def run_mapper(
    database: Path, folder: Path, *, seed: int, threads: int, total: int, progress: Callable[[int, int], None]
) -> list[pycolmap.Reconstruction]:
    """Return the models that the matches give, those with most images first; they need not be of one piece.

    folder: where pycolmap may write. progress: hears images placed in the model that is being built, and ``total``.
    """
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = seed
    options.num_threads = threads
    options.min_model_size = MIN_IMAGES
    rigged = _rig_cameras(database)
    if rigged:
        options.constant_cameras = rigged
        options.ba_refine_sensor_from_rig = False
    options.extract_colors = False  # pycolmap would decode the images again, and not in every format
    placed = 0

    def start() -> None:
        nonlocal placed
        placed = 2
        progress(placed, total)

    def go_on() -> None:
        nonlocal placed
        placed = min(placed + 1, total)
        progress(placed, total)

    folder.mkdir()
    models = pycolmap.incremental_mapping(
        database, folder, folder, options, initial_image_pair_callback=start, next_image_callback=go_on
    )
    return largest_first(models)


def run_global_mapper(
    database: Path,
    folder: Path,
    *,
    seed: int,
    threads: int,
    gpu: bool,
    total: int,
    progress: Callable[[int, int], None],
) -> list[pycolmap.Reconstruction]:
    """Return the models that the matches give by pycolmap's global mapper (GLOMAP), as run_mapper().

    Focal lengths without EXIF are calibrated from the pairs first, in the database. progress: hears the end only.
    It adjusts the lens of every camera, so images that are faces of panoramas are not for it.
    """
    progress(0, total)
    calibration = pycolmap.ViewGraphCalibrationOptions()
    calibration.random_seed = seed
    pycolmap.calibrate_view_graph(database, calibration)
    options = pycolmap.GlobalPipelineOptions()
    options.min_model_size = MIN_IMAGES
    for each in (options, options.mapper):
        each.random_seed, each.num_threads = seed, threads
    options.mapper.global_positioning.use_gpu = options.mapper.bundle_adjustment.ceres.use_gpu = gpu
    folder.mkdir()
    models = pycolmap.global_mapping(database, folder, folder, options)
    progress(total, total)
    return largest_first(models)


def largest_first(models: Mapping[int, pycolmap.Reconstruction]) -> list[pycolmap.Reconstruction]:
    """Return the models without those whose images larger ones have too: mappers may try the same images twice."""
    kept: list[pycolmap.Reconstruction] = []
    known: set[int] = set()
    for model in sorted(models.values(), key=lambda model: (-model.num_reg_images(), -model.num_points3D())):
        images = set(model.reg_image_ids())
        if images - known:
            kept.append(model)
            known |= images
    return kept


def _rig_cameras(database: Path) -> set[int]:
    """Return the cameras of rigs of several, the faces of panoramas, whose lens is exact."""
    with pycolmap.Database.open(database) as store:
        rigs = [rig for rig in store.read_all_rigs() if rig.num_sensors() > 1]
        return {int(sensor.id) for rig in rigs for sensor in [rig.ref_sensor_id, *rig.non_ref_sensors]}


def name_and_colour(
    model: pycolmap.Reconstruction, names: Mapping[int, str], colours: Mapping[int, NDArray[np.uint8]]
) -> None:
    """Give images their names, and each point the mean colour of its observations.

    names: image id -> path of the image. colours: image id -> [N, 3] of its features.
    """
    for number in list(model.images):
        model.image(number).name = names[number]
    for number, point in list(model.points3D.items()):
        seen = [colours[element.image_id][element.point2D_idx] for element in point.track.elements]
        model.point3D(number).color = np.mean(seen, axis=0).round().astype(np.uint8)


def centers_of(model: pycolmap.Reconstruction) -> dict[str, NDArray[np.float64]]:
    """Return the positions of the registered cameras by the names of their images."""
    images = (model.image(number) for number in model.reg_image_ids())
    return {image.name: np.asarray(image.projection_center()) for image in images}


def parallax(model: pycolmap.Reconstruction) -> float:
    """Return the median over points of the widest angle in degrees between the rays to the cameras that see one."""
    centers = {number: model.image(number).projection_center() for number in model.reg_image_ids()}
    points = list(model.points3D.values())
    angles = []
    for point in points[:: max(1, len(points) // _PARALLAX_POINTS)]:
        rays = np.stack([centers[element.image_id] for element in point.track.elements]) - point.xyz
        rays /= np.maximum(np.linalg.norm(rays, axis=1, keepdims=True), 1e-300)
        angles.append(float(np.degrees(np.arccos(np.clip((rays @ rays.T).min(), -1.0, 1.0)))))
    return float(np.median(angles)) if angles else 0.0


def model_facts(model: pycolmap.Reconstruction, names: list[str]) -> dict[str, Any]:
    """Return figures of a model. names: of all images that it was to be made of."""
    placed = {model.image(number).name for number in model.reg_image_ids()}
    used = {model.image(number).camera_id for number in model.reg_image_ids()}
    return {
        "registered": len(placed),
        "total": len(names),
        "unregistered": [name for name in names if name not in placed],
        "points": int(model.num_points3D()),
        "reprojection_error_px": float(model.compute_mean_reprojection_error()),
        "track_length": float(model.compute_mean_track_length()),
        "observations_per_image": float(model.compute_mean_observations_per_reg_image()),
        "parallax_degrees": parallax(model),
        "cameras": [camera_facts(model.camera(number)) for number in sorted(used)],
    }


def camera_facts(camera: pycolmap.Camera) -> dict[str, Any]:
    return {
        "model": camera.model_name,
        "width": int(camera.width),
        "height": int(camera.height),
        "focal_px": [float(camera.params[index]) for index in camera.focal_length_idxs()],
        "params": [float(value) for value in camera.params],
    }


def versions() -> dict[str, str]:
    return {"splatcli": __version__, "pycolmap": pycolmap.__version__}


def main() -> None:
    """Read the request, work, and write the result."""
    die_with_parent()
    # What libraries print must not come between the lines: they get stderr.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    masks = None if request["mask_folder"] is None else Path(request["mask_folder"])
    footage = SfmInput(
        Path(request["path"]), tuple(request["names"]), request["masks"], masks, (), request["static_masks"]
    )

    def tell(phase: str, done: int, total: int) -> None:
        _say(lines, {"phase": phase, "done": done, "total": total})

    try:
        options = SfmOptions(**request["options"])
        folder = Path(request["folder"])
        job = Job(footage, options, folder, threads=request["threads"], gpu=request["gpu"], tell=tell)
        _say(lines, {"facts": job.run()})
    except SplatError as problem:
        _say(lines, {"error": problem.as_dict()})
    except OSError as error:
        refused = OutputError(f"structure from motion cannot go on: {error.strerror or error}", where=error.filename)
        _say(lines, {"error": refused.as_dict()})


def _say(lines: TextIO, fact: dict[str, Any]) -> None:
    lines.write(json.dumps(fact) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
