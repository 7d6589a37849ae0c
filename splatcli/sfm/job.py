"""Job: one reconstruction from prepared images to a model on disk, step by step, in the worker process."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from splatcli.checkpoint.atomic import sync
from splatcli.errors import OutputError, SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.colmap import check_written
from splatcli.scene.images import max_pixels
from splatcli.sfm.align import Alignment
from splatcli.sfm.consistency import (
    contradicted_pairs,
    contradicted_share,
    contradicted_steps,
    rotation_share,
    second_motion,
)
from splatcli.sfm.execution import Execution, Phase
from splatcli.sfm.features import Border, SfmImage, Stored, extract
from splatcli.sfm.flight_log import Place, flight_log_beside, read_flight_log
from splatcli.sfm.images import SfmInput, readable
from splatcli.sfm.lens import choose_lenses, remapped_lenses, with_fisheyes
from splatcli.sfm.mapping import calibrate, name_and_colour, own_images, rig_cameras, run_global_mapper, run_mapper
from splatcli.sfm.matching import (
    OVERLAP,
    Pair,
    choose_pairs,
    delete_other_pairs,
    how_to_match,
    image_ids,
    joined,
    match,
    match_again,
    most_alike,
    name_order,
    neighbours,
    pairs_to_retry,
    pairs_with_matches,
    sequences,
    verified_pairs,
)
from splatcli.sfm.options import (
    AUTO,
    COLOURS,
    FISHEYE,
    MIN_IMAGES,
    STATIONARY,
    Matching,
    SfmOptions,
    is_fisheye_model,
)
from splatcli.sfm.prepare import Prepared, check_count, prepare, reasons
from splatcli.sfm.report import CONTRADICTED, TURNED, model_facts, versions
from splatcli.sfm.static_masks import StaticParts, border_facts, find_borders, write_static_masks
from splatcli.sfm.stationary import Places, drop_stationary, known_stationary
from splatcli.sfm.triangulate import hold_lenses, pairs_by_pose, triangulate
from splatcli.sfm.video import find_gaps, folder_of, frame_index, stretches_in, write_more_frames

#: Share of the images that may lack in a model without a try of fisheyes, and that these must register more.
_FEW_LACKING = 0.1
#: Share of the steps between neighbours in name order that matches hold, where the order says what is beside what.
_IN_ORDER = 0.8
#: Neighbours reach over one in so many parts of the images: a turn of a subject has alike sides at half, or a quarter.
_PARTS = 8
#: Share of the images that a model of unambiguous pairs registers at least, of those that were registered before.
_MOST = 0.9
_OVERLAP = "images have to overlap by two thirds, be sharp, and show things with texture that stand still"


@dataclass(frozen=True, slots=True)
class Mapped:
    """Images in a database, and the models that their matches give.

    pairs: what was matched, indices into ``stored``. verified: how many of them were. models: the largest first.
    added, retried, ambiguous: the facts of the tries that map anew, for the report; None where there was none.
    """

    database: Path
    stored: list[Stored]
    pairs: list[Pair]
    verified: int
    models: list[pycolmap.Reconstruction]
    added: dict[str, Any] | None = None
    retried: dict[str, Any] | None = None
    ambiguous: dict[str, Any] | None = None

    @property
    def registered(self) -> set[int]:
        """Ids of the images that the largest model registers: a try that maps anew is kept where these are more."""
        return set(self.models[0].reg_image_ids()) if self.models else set()

    def name_of(self, image_id: int) -> str:
        """Return the name of the image that has an id in the database."""
        return next(item.image.name for item in self.stored if item.image_id == image_id)


def reconstruct(inputs: SfmInput, options: SfmOptions, folder: Path, execution: Execution) -> dict[str, Any]:
    """Make a model of images or videos; return the facts of the report. Raises SplatError.

    folder: exists; receives images/, sparse/0/ and, in work/, what is thrown away. What a call of the same images and
    options left in work/ is used, everything else there is removed.
    """
    prepared = prepare(inputs, options, folder, execution)
    return Job(prepared, inputs, options, folder, execution).run()


class Job:
    """One reconstruction from features to models on disk, step by step."""

    def __init__(
        self,
        prepared: Prepared,
        inputs: SfmInput,
        options: SfmOptions,
        folder: Path,
        execution: Execution,
    ) -> None:
        """Set up a Job. prepared: what prepare() returned for ``inputs``, ``options`` and ``folder``."""
        self.prepared = prepared
        self.inputs = inputs
        self.options = options
        self.folder = folder
        self.execution = execution
        self.borders: dict[str, Border] = {}
        self.rotation = 0.0

    def run(self) -> dict[str, Any]:
        """Run all steps; return the facts of the report. Raises SplatError."""
        pycolmap.set_random_seed(self.execution.random_seed)
        images = self._without_borders(self.prepared.images)
        database = self.folder / "work" / "database.db"
        stored, static, facts = self._extract(database, images)
        how, pairs = self._choose_pairs(stored)
        if self.options.cameras is not None:
            hold_lenses(database, stored, self.options.cameras)
        delete_other_pairs(database, stored, pairs)
        verified = match(database, stored, pairs, self.execution)
        self.rotation = 0.0 if self.options.cameras is not None else rotation_share(database)
        mapped = self._models(Mapped(database, stored, pairs, verified, []), images, static.dropped)
        stored = self._keep_used(mapped.stored, images, mapped.models)
        if mapped.added is not None:
            mapped.added["kept"] = len(stored) - mapped.added["of"]
        names = sorted(item.image.name for item in stored)
        self._check_models(mapped, names)
        models, lenses, zoomed = self._choose_lenses(mapped)
        doubts = self._doubts(mapped.database, models[0])
        aligned = self._finish(models, stored)
        made = self._write_static_masks([item.image for item in stored], static)
        return {
            **model_facts(models[0], names),
            "lenses": lenses,
            "zoomed": zoomed,
            "georeference": aligned,
            "other_models": [other.num_reg_images() for other in models[1:]],
            "other_images": own_images(models)[1:],
            "cameras_held": self.options.cameras is not None,
            **doubts,
            "max_image_size": self.options.max_image_size,
            "matching": how,
            "pairs": len(mapped.pairs),
            "verified_pairs": mapped.verified,
            "matches_per_pair": float(np.median([*verified_pairs(mapped.database).values()] or [0])),
            "added_frames": mapped.added,
            "retried": mapped.retried,
            "ambiguous": mapped.ambiguous,
            **facts,
            "borders": border_facts([item.image for item in stored]),
            "panoramas": self.prepared.panoramas,
            "upright_copies": self.prepared.upright_copies,
            "masks": sum(image.mask is not None for image in images) or made,
            "static_masks": made > 0,
            "seconds": {phase: round(spent, 2) for phase, spent in self.execution.seconds.items()},
            "threads": self.execution.num_threads,
            "gpu": self.execution.use_gpu,
            "videos": self._video_facts(stored),
            "versions": versions(),
        }

    def _extract(self, database: Path, images: list[SfmImage]) -> tuple[list[Stored], StaticParts, dict[str, Any]]:
        """Find features, and drop those of what does not move; return what is left, these parts, and facts of both."""
        stored, bad = extract(database, images, self.options, self.execution)
        unreadable = {**self.prepared.unreadable, **reasons(bad)}
        used = [item.image for item in stored]
        check_count(self.inputs, [image.name for image in used], unreadable)
        size, file = self.options.max_image_size, self.folder / "work" / STATIONARY
        places = known_stationary(file, database, stored, size)
        static = StaticParts.of(used, places, self.execution.num_threads, drawn=self._makes_masks(used))
        facts = {"unreadable": unreadable, **static.facts(used)}
        return drop_stationary(database, stored, static.dropped, size), static, facts

    def _doubts(self, database: Path, model: pycolmap.Reconstruction) -> dict[str, float]:
        """Return what casts doubt on the cameras, unless they are given."""
        if self.options.cameras is not None:
            return {"second_motion": 0.0, "contradicted_matches": 0.0, "rotation": 0.0}
        return {
            "second_motion": round(second_motion(database, model, self.execution.random_seed), 4),
            "contradicted_matches": round(contradicted_share(database, model), 4),
            "rotation": round(self.rotation, 4),
        }

    def _video_facts(self, stored: list[Stored]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "frames": len(frames),
                "most": self.prepared.most_frames[name],
                "hdr": self.prepared.videos[name].colour.hdr,
            }
            for name, frames in self._frames_of_videos(stored).items()
        ]

    def _frames_of_videos(self, stored: list[Stored]) -> dict[str, list[str]]:
        """Return the frames in use of each video that can be read, by its name."""
        folders = self.inputs.frame_folders
        used = {item.image.panorama[0] if item.image.panorama else item.image.name for item in stored}
        return {name: [frame for frame in used if folder_of(frame) == folders[name]] for name in self.prepared.videos}

    def _how_to_match(self, count: int) -> Matching:
        """Return how images are chosen for matching, ``count`` of them, where no poses are known."""
        return how_to_match(self.options.matching, count, video=self.inputs.is_video)

    def _choose_pairs(self, stored: list[Stored]) -> tuple[str, list[Pair]]:
        """Return the method by which pairs of images were chosen, for the report, and the pairs."""
        cameras, how = self.options.cameras, self._how_to_match(len(stored))
        by_pose = cameras is not None and self.options.matching == "auto"
        if cameras is not None and by_pose:
            pairs = pairs_by_pose([cameras[item.image.name] for item in stored])
        else:
            pairs = self._pairs_by_images(how, stored)
        # The faces of a panorama are at one place, and known to each other.
        source = sources(stored)
        pairs = [(i, j) for i, j in pairs if source[i] is None or source[i] != source[j]]
        return "poses" if by_pose else how, pairs

    def _pairs_by_images(self, how: Matching, stored: list[Stored]) -> list[Pair]:
        """Return the pairs of ``stored`` that choose_pairs() takes of the images in name order."""
        order = name_order([item.image.name for item in stored])
        pairs = choose_pairs(how, [stored[index].sample for index in order], self.execution.random_seed)
        return sorted((min(order[i], order[j]), max(order[i], order[j])) for i, j in pairs)

    def _models(self, matched: Mapped, images: list[SfmImage], places: Places) -> Mapped:
        """Map what is matched, with the tries that may register more, or triangulate it where cameras are known."""
        database, stored = matched.database, matched.stored
        folder = self.folder / "work" / "models"
        if self.options.cameras is not None:
            model = triangulate(database, folder, stored, self.options.cameras, self.execution)
            return replace(matched, models=[model])
        if self.options.mapper == "global":
            # Calibration changes cameras and geometries; the next call finds those of matching.
            database = database.with_name("calibrated.db")
            shutil.copyfile(matched.database, database)
        models = self._map("mapping", database, folder, len(stored))
        mapped = replace(matched, database=database, models=models)
        if self.rotation > TURNED:  # more images would bring no depth
            return mapped
        if self.inputs.is_video and not self.prepared.panoramas:
            mapped = self._fill_gaps(mapped, images, self._how_to_match(len(stored)), places)
        return self._disambiguate(self._try_fisheyes(self._retry(mapped)))

    def _finish(self, models: list[pycolmap.Reconstruction], stored: list[Stored]) -> dict[str, Any]:
        """Name and colour what is in the models, align the largest, and write all; return what the alignment did."""
        for model in models:
            name_and_colour(model, stored)
        recorded = self._recorded_positions(stored)
        aligned = Alignment(self.inputs, self.options, self.folder, self.prepared.panoramas, recorded).apply(models[0])
        for number, model in enumerate(models):
            self._write(model, number)
        return aligned

    def _recorded_positions(self, stored: list[Stored]) -> dict[str, Place]:
        """Return the positions of the frames of videos that have a flight log beside them."""
        found: dict[str, Place] = {}
        for name, frames in self._frames_of_videos(stored).items():
            video = self.prepared.videos[name]
            file = flight_log_beside(video.path)
            log = None if file is None else read_flight_log(file)
            if log is not None and video.frames and video.seconds:
                places = {frame: log.at(frame_index(frame) / video.frames * video.seconds) for frame in frames}
                found |= {frame: place for frame, place in places.items() if place is not None}
        return found

    def _map(self, phase: Phase, database: Path, folder: Path, total: int) -> list[pycolmap.Reconstruction]:
        if self.options.mapper == "global":
            calibrate(database, self.execution.random_seed)
        if is_fisheye_model(self.options.mapped_model):
            database = with_fisheyes(database, self.options.mapped_model)
        run = run_global_mapper if self.options.mapper == "global" else run_mapper
        return run(database, folder, total, self.execution, phase)

    def _try_fisheyes(self, mapped: Mapped) -> Mapped:
        """Map anew with fisheyes where many images are not registered; return what is used, the larger model."""
        registered = mapped.registered
        # Without a verified pair, no lens brings an image in.
        unregistered = len(joined(verified_pairs(mapped.database), registered) - registered)
        few = _FEW_LACKING * len(mapped.stored)
        if not self._may_be_fisheye(mapped.database) or unregistered <= few:
            return mapped
        found = self._map_fisheyes(mapped, None)
        return found if len(found.registered) > len(registered) + few else mapped

    def _choose_lenses(
        self, mapped: Mapped
    ) -> tuple[list[pycolmap.Reconstruction], list[dict[str, Any]], list[dict[str, Any]]]:
        """Choose the lens of each camera of the largest model, unless it is given; return the models, and two reports.

        The second is of cameras that were zoomed, each of whose images has a lens of its own.
        """
        if self.options.camera_model != AUTO or self.options.cameras is not None:
            return mapped.models, [], []
        chosen = choose_lenses(
            mapped.models[0],
            self.execution,
            constant=rig_cameras(mapped.database),
            each_image=self.options.camera_per != "image",
        )
        if chosen.wide and self._may_be_fisheye(mapped.database):
            again = self._map_fisheyes(mapped, chosen.wide).models
            report = remapped_lenses(again[0], chosen, self.execution) if again else None
            if report is not None:
                return again, report, []
        return [chosen.model, *mapped.models[1:]], chosen.cameras, chosen.zoomed

    def _may_be_fisheye(self, database: Path) -> bool:
        """Return whether fisheyes are tried: the lens is not given, and no faces of panoramas have one."""
        options = self.options
        return options.camera_model == AUTO and not rig_cameras(database)

    def _map_fisheyes(self, mapped: Mapped, cameras: set[int] | None) -> Mapped:
        """Map anew with fisheyes in place of ``cameras``, None: of all. What an earlier try wrote is replaced."""
        database = with_fisheyes(mapped.database, FISHEYE, cameras)
        folder = database.with_name(f"{database.stem}-models")
        shutil.rmtree(folder, ignore_errors=True)
        models = self._map("mapping as fisheye", database, folder, len(mapped.stored))
        return replace(mapped, database=database, models=models)

    def _makes_masks(self, images: list[SfmImage]) -> bool:
        """Return whether images get masks of what is not of the scene: none are given or refused."""
        return self.inputs.static_masks and not any(image.mask or image.panorama for image in images)

    def _without_borders(self, images: list[SfmImage]) -> list[SfmImage]:
        """Return the images with their black borders, unless masks are given or refused."""
        if self._makes_masks(images):
            self.borders = find_borders(images, self.execution.num_threads)
        return [replace(image, border=self.borders.get(image.name, image.border)) for image in images]

    def _write_static_masks(self, images: list[SfmImage], static: StaticParts) -> int:
        """Write masks/ of borders and of what stands still in the images, which lie in images/ now; return how many."""
        if not (static.dropped or self.borders) or not self._makes_masks(images):
            return 0
        there = [replace(image, path=self.folder / "images" / image.name) for image in images]
        return write_static_masks(there, static.regions, self.folder / "masks", self.execution, static.overlays)

    def _fill_gaps(self, first: Mapped, images: list[SfmImage], how: Matching, places: Places) -> Mapped:
        """Add frames of the video between neighbours that no model has both of, and map anew.

        images: the frames that were chosen at first. places: around which features are dropped.
        Returns ``first`` unless the largest model registers more of these now. All that is written lies in work/gaps/:
        what is kept of ``first`` stays valid.
        """
        names_by_model = [{first.name_of(image_id) for image_id in model.reg_image_ids()} for model in first.models]
        gaps = find_gaps([image.name for image in images], names_by_model)
        stretches = stretches_in(gaps, len(images))
        if not stretches:
            return first
        folder = self.folder / "work" / "gaps"
        folder.mkdir()
        names: list[str] = []
        progress = self.execution.start("more frames")
        for name, within in self.inputs.frame_folders.items():
            if within in stretches:
                (folder / within).mkdir(parents=True, exist_ok=True)
                more_of = write_more_frames(self.prepared.videos[name], folder / within, stretches[within], progress)
                names += [str(PurePosixPath(within, frame)) for frame in more_of]
        headers, _ = readable(SfmInput(folder, tuple(names)), max_pixels(None))
        more = [SfmImage.of(name, folder, header) for name, header in headers.items()]
        # Frames that are added have the border that all of their size have.
        common = {image.size: image.border for image in images}
        common |= {image.size: image.border for image in images if not any(image.border)}
        more = [replace(image, border=common.get(image.size, image.border)) for image in more]
        database = folder / "database.db"
        shutil.copyfile(first.database, database)
        shutil.copytree(first.database.with_name(COLOURS), database.with_name(COLOURS))
        # The database names images by their place in this list, so new ones are at its end.
        everything = [*images, *more]
        stored, _ = extract(database, everything, self.options, self.execution, "more features")
        stored = drop_stationary(database, stored, places, self.options.max_image_size)
        new = [pair for pair in self._pairs_by_images(how, stored) if pair[1] >= len(first.stored)]
        verified = match(database, stored, new, self.execution, "more matching")
        models = self._map("more mapping", database, folder / "models", len(stored))
        found = Mapped(database, stored, [*first.pairs, *new], verified, models)
        chosen = {item.image_id for item in first.stored}
        before, after = len(chosen & first.registered), len(chosen & found.registered)
        facts = {"gaps": len(gaps), "frames": len(more), "before": before, "after": after, "of": len(chosen)}
        return replace(found if after > before else first, added=facts)

    def _keep_used(
        self, stored: list[Stored], images: list[SfmImage], models: list[pycolmap.Reconstruction]
    ) -> list[Stored]:
        """Leave out frames that were added to ``images`` and are in none of the models; move the others to images/."""
        used = {image_id for model in models for image_id in model.reg_image_ids()}
        chosen = {image.name for image in images}
        kept = [item for item in stored if item.image.name in chosen or item.image_id in used]
        for item in kept:
            if item.image.name not in chosen:
                place = self.folder / "images" / item.image.name
                place.parent.mkdir(parents=True, exist_ok=True)
                item.image.path.rename(place)
        return kept

    def _retry(self, mapped: Mapped) -> Mapped:
        """Match the images that the largest model lacks again, loosely, and map anew.

        Returns ``mapped`` unless the largest model registers more images now.
        """
        models, stored, pairs = mapped.models, mapped.stored, mapped.pairs
        registered = mapped.registered
        unregistered = {index for index, item in enumerate(stored) if item.image_id not in registered}
        if not unregistered:
            return mapped
        work = self.folder / "work"
        database = work / "retry.db"
        shutil.copyfile(mapped.database, database)
        tried = self._pairs_to_retry(mapped, database, unregistered)
        # What images of one smaller model have in common joins them with the largest only if another pair does.
        place = {image_id: model for model, each in enumerate(models) for image_id in each.reg_image_ids()}
        inside = {pair for pair in tried if len({place.get(stored[index].image_id, -1 - index) for index in pair}) == 1}

        def again(pairs: list[Pair]) -> list[Pair]:
            return match_again(database, stored, pairs, self.execution)

        held = again([pair for pair in tried if pair not in inside])
        if held:
            held = sorted([*held, *again([pair for pair in tried if pair in inside])])
            # A registered image of such a pair needs more points for the unregistered one: those it shares with others.
            beside = {index for pair in held for index in pair} - unregistered
            again([(i, j) for i, j in pairs if (i in beside or j in beside) and not {i, j} & unregistered])
        new_models = self._map("mapping again", database, work / "models-again", len(stored)) if held else []
        found = replace(mapped, database=database, models=new_models)
        before, after = len(registered), len(found.registered)
        facts: dict[str, Any] = {
            "images": len(unregistered),
            "verified_pairs": len(held),
            "before": before,
            "after": after,
        }
        # Where a scene repeats, looser matching joins what only looks alike, and most pairs contradict the cameras.
        if after > before and (contradicted := contradicted_share(database, new_models[0])) > CONTRADICTED:
            return replace(mapped, retried={**facts, "contradicted_matches": round(contradicted, 4)})
        return replace(found if after > before else mapped, retried=facts)

    def _disambiguate(self, mapped: Mapped) -> Mapped:
        """Map anew without pairs that only look alike, where matches of neighbours in name order contradict cameras.

        Returns ``mapped`` unless fewer steps between neighbours are contradicted then, and most images are registered.
        """
        steps, wrong = self._contradicted_steps(mapped, mapped)
        if not wrong or len(steps) < _IN_ORDER * len(self._neighbours(mapped, 1)):
            return mapped
        found = self._map_unambiguous(mapped, "neighbours")
        if len(found.registered) < len(mapped.registered):
            database = mapped.database.with_name("neighbours-again.db")
            shutil.copyfile(mapped.database, database)
            match_again(database, mapped.stored, self._neighbours(mapped), self.execution)
            found = self._map_unambiguous(replace(mapped, database=database), "neighbours-loose")
        left = self._contradicted_steps(mapped, found)[1]
        used = len(left) < len(wrong) and len(found.registered) >= _MOST * len(mapped.registered)
        facts = {
            "steps": len(steps),
            "contradicted_before": len(wrong),
            "contradicted_after": len(left),
            "before": len(mapped.registered),
            "after": len(found.registered),
            "left_out": len(verified_pairs(mapped.database).keys() - verified_pairs(found.database).keys()),
            "used": used,
        }
        return replace(found if used else mapped, ambiguous=facts)

    def _contradicted_steps(self, matched: Mapped, mapped: Mapped) -> tuple[list[Pair], list[Pair]]:
        """Return the steps between neighbours that matches of ``matched`` hold, and which ``mapped`` contradicts."""
        held: list[Pair] = []
        wrong: list[Pair] = []
        for images in self._sequences(matched) if mapped.models else []:
            ids = [matched.stored[index].image_id for index in images]
            both = contradicted_steps(matched.database, mapped.models[0], ids, _reach(images))
            held, wrong = held + both[0], wrong + both[1]
        return held, wrong

    def _neighbours(self, mapped: Mapped, reach: int | None = None) -> list[Pair]:
        """Return the pairs of neighbours in name order, indices into the images, within ``reach``, None: _reach()."""
        found = [pair for images in self._sequences(mapped) for pair in neighbours(images, reach or _reach(images))]
        return sorted((min(pair), max(pair)) for pair in found)

    def _sequences(self, mapped: Mapped) -> list[list[int]]:
        return sequences([item.image.name for item in mapped.stored])

    def _map_unambiguous(self, mapped: Mapped, name: str) -> Mapped:
        """Map neighbours alone, then with them all pairs that agree with their cameras. name: of new files."""
        verified = verified_pairs(mapped.database)

        def of_verified(pairs: list[Pair]) -> dict[Pair, Pair]:
            return {
                ids: pair for ids, pair in zip(image_ids(mapped.stored, pairs), pairs, strict=True) if ids in verified
            }

        near = of_verified(self._neighbours(mapped))
        first = self._map_pairs(mapped, list(near.values()), name)
        if not first.models:
            return first
        pairs = of_verified([(i, j) for j in range(len(mapped.stored)) for i in range(j)])
        far = {ids: pair for ids, pair in pairs.items() if first.registered.issuperset(ids)}
        wrong = contradicted_pairs(mapped.database, first.models[0], far)
        agreeing = {ids: pair for ids, pair in far.items() if ids not in wrong}
        return self._map_pairs(mapped, sorted({*near.values(), *agreeing.values()}), f"{name}-and-far")

    def _map_pairs(self, mapped: Mapped, pairs: list[Pair], name: str) -> Mapped:
        """Map the matches of ``pairs`` alone, indices into the images. name: of new files."""
        database = mapped.database.with_name(f"{name}.db")
        shutil.copyfile(mapped.database, database)
        delete_other_pairs(database, mapped.stored, pairs)
        models = self._map("mapping neighbours", database, database.with_name(f"{name}-models"), len(mapped.stored))
        return replace(mapped, database=database, verified=len(pairs), models=models)

    def _pairs_to_retry(self, mapped: Mapped, database: Path, unregistered: set[int]) -> list[Pair]:
        """Return the pairs of images ``unregistered`` whose descriptors match, ascending.

        Those that were never matched are matched in ``database`` as at first: the most similar ones, and no more than
        were matched at first.
        """
        stored = mapped.stored
        pairs = pairs_to_retry(mapped.pairs, unregistered, sources(stored))
        matched = set(mapped.pairs)
        others = [pair for pair in pairs if pair not in matched]
        others = most_alike(others, [item.sample for item in stored], len(matched), self.execution.random_seed)
        if others:
            match(database, stored, others, self.execution, "matching more")
        return pairs_with_matches(database, stored, pairs)

    def _check_models(self, mapped: Mapped, names: list[str]) -> None:
        """Raise SceneError where the images, ``names``, give no model."""
        if not mapped.verified and not (mapped.retried and mapped.retried["verified_pairs"]):
            raise self._hopeless(
                f"no two of the {len(names)} images show the same thing from different places",
                _OVERLAP + ("; masks may hide too much: --masks none" if self.inputs.masks else ""),
            )
        registered = len(mapped.registered)
        if registered >= MIN_IMAGES:
            return
        if self.rotation > TURNED:
            raise self._hopeless(
                f"{registered or 'none'} of the {len(names)} images could be registered: a rotation alone explains "
                "what they have in common, so the camera stayed at one place",
                "step sideways between images, around the subject, instead of turning on the spot",
            )
        raise self._hopeless(
            f"only {registered} of {len(names)} images could be registered, at least {MIN_IMAGES} are needed"
            if registered
            else f"none of the {len(names)} images could be registered: no pair of them has enough depth to start from",
            f"{_OVERLAP}; step sideways between images instead of turning on the spot",
        )

    def _hopeless(self, what: str, remedy: str) -> SceneError:
        """Return the error for images that give no model; only others help, and these have features of their own."""
        if self.inputs.videos_beside:
            video = self.inputs.path / self.inputs.videos_beside[0]
            remedy += f"; or name a video that lies among them: splat sfm {shlex.quote(str(video))}"
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        return SceneError(what, where=self.inputs.path, remedy=remedy)

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


def _reach(images: Sequence[int]) -> int:
    """Return how far apart neighbours are at most, of images in a sequence."""
    return max(1, min(OVERLAP, len(images) // _PARTS))


def sources(stored: list[Stored]) -> list[str | None]:
    """Return for each image the panorama that it is a face of, or None."""
    return [None if item.image.panorama is None else item.image.panorama[0] for item in stored]
