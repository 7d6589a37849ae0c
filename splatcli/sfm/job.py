"""Job: one reconstruction from prepared images to a model on disk, step by step, in the worker process."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from splatcli.checkpoint.atomic import sync
from splatcli.errors import OutputError, SceneError
from splatcli.progress import Listener
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.colmap import check_written
from splatcli.scene.images import max_pixels
from splatcli.sfm.align import Alignment
from splatcli.sfm.features import Border, SfmImage, Stored, extract
from splatcli.sfm.fisheye import compared, wide_cameras, with_fisheyes
from splatcli.sfm.flight_log import Place, flight_log_beside, read_flight_log
from splatcli.sfm.images import SfmInput, readable
from splatcli.sfm.lens import ADJUSTMENTS, choose_lenses, own_lenses
from splatcli.sfm.mapping import calibrate, name_and_colour, own_images, rig_cameras, run_global_mapper, run_mapper
from splatcli.sfm.matching import (
    Pair,
    choose_pairs,
    delete_other_pairs,
    how_to_match,
    joined,
    match,
    match_again,
    matches_that_hold,
    most_alike,
    pairs_that_hold,
    pairs_to_retry,
    pairs_with_matches,
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
from splatcli.sfm.phases import Phases
from splatcli.sfm.prepare import Prepared, check_count, prepare, reasons
from splatcli.sfm.pure_rotation import rotation_share
from splatcli.sfm.report import CONTRADICTED, TURNED, model_facts, versions
from splatcli.sfm.second_motion import contradicted_share, second_motion
from splatcli.sfm.static_masks import StaticParts, border_facts, find_borders, write_static_masks
from splatcli.sfm.stationary import Places, drop_stationary, known_stationary
from splatcli.sfm.triangulate import hold_lenses, pairs_by_pose, triangulate
from splatcli.sfm.video import find_gaps, folder_of, frame_index, stretches_in, write_more_frames

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

    @property
    def registered(self) -> set[int]:
        """Numbers of the images that the largest model registers: a try that maps anew is kept where these are more."""
        return set(self.models[0].reg_image_ids()) if self.models else set()

    def name_of(self, number: int) -> str:
        """Return the name of the image that has a number in the database."""
        return next(item.image.name for item in self.stored if item.number == number)


def reconstruct(
    inputs: SfmInput, options: SfmOptions, folder: Path, *, threads: int, gpu: bool, progress: Listener
) -> dict[str, Any]:
    """Make a model of images or videos; return the facts of the report. Raises SplatError.

    folder: exists; receives images/, sparse/0/ and, in work/, what is thrown away. What a call of the same images and
    options left in work/ is used, everything else there is removed.
    """
    phases = Phases(progress)
    prepared = prepare(inputs, options, folder, threads=threads, phases=phases)
    return Job(prepared, inputs, options, folder, threads=threads, gpu=gpu, phases=phases).run()


class Job:
    """One reconstruction from features to models on disk, step by step."""

    def __init__(
        self,
        prepared: Prepared,
        inputs: SfmInput,
        options: SfmOptions,
        folder: Path,
        *,
        threads: int,
        gpu: bool,
        phases: Phases,
    ) -> None:
        """Set up a Job. prepared: what prepare() returned for ``inputs``, ``options`` and ``folder``."""
        self.prepared = prepared
        self.inputs = inputs
        self.options = options
        self.folder = folder
        self.threads = threads
        self.gpu = gpu
        self.phases = phases
        self.borders: dict[str, Border] = {}
        self.rotation = 0.0

    def run(self) -> dict[str, Any]:
        """Run all steps; return the facts of the report. Raises SplatError."""
        pycolmap.set_random_seed(self.options.seed)
        images = self._without_borders(self.prepared.images)
        database = self.folder / "work" / "database.db"
        stored, bad = extract(
            database, images, self.options, threads=self.threads, gpu=self.gpu, progress=self.phases.start("features")
        )
        unreadable = {**self.prepared.unreadable, **reasons(bad)}
        check_count(self.inputs, [item.image.name for item in stored], unreadable)
        keys = keys_of(stored, images)
        places = known_stationary(self.folder / "work" / STATIONARY, database, stored, self.options.max_image_size)
        used = [item.image for item in stored]
        static = StaticParts.of(used, places, self.threads, drawn=self._makes_masks(used))
        static_facts = static.facts(used)
        stored = drop_stationary(database, stored, keys, static.dropped, self.options.max_image_size)
        how, pairs = self._choose_pairs(stored)
        if self.options.cameras is not None:
            hold_lenses(database, stored, self.options.cameras)
        delete_other_pairs(database, keys, pairs)
        verified = self._match("matching", database, keys, pairs)
        self.rotation = 0.0 if self.options.cameras is not None else rotation_share(database)
        mapped, added, retried = self._models(
            Mapped(database, stored, keys, pairs, verified, []), images, static.dropped
        )
        stored = self._keep_used(mapped.stored, images, mapped.models)
        names = sorted(item.image.name for item in stored)
        if added is not None:
            added["kept"] = len(stored) - added["of"]
        if not mapped.verified and not (retried and retried["verified_pairs"]):
            raise self._hopeless(
                f"no two of the {len(names)} images show the same thing from different places",
                _OVERLAP + ("; masks may hide too much: --masks none" if self.inputs.masks else ""),
            )
        self._check_models(mapped.models, names)
        models = mapped.models
        lenses: list[dict[str, Any]] = []
        zoomed: list[dict[str, Any]] = []
        if self.options.camera_model == AUTO and self.options.cameras is None:
            models, lenses, zoomed = self._choose_lenses(mapped)
        held = self.options.cameras is not None
        second = 0.0 if held else second_motion(mapped.database, models[0], self.options.seed)
        contradicted = 0.0 if held else contradicted_share(mapped.database, models[0])
        aligned = self._finish(models, stored)
        masks, made = sum(image.mask is not None for image in images), 0
        if (static.dropped or self.borders) and self._makes_masks(images):
            made = self._write_static_masks([item.image for item in stored], static)
        return {
            **model_facts(models[0], names),
            "lenses": lenses,
            "zoomed": zoomed,
            "georeference": aligned,
            "other_models": [other.num_reg_images() for other in models[1:]],
            "other_images": own_images(models)[1:],
            "cameras_held": held,
            "second_motion": round(second, 4),
            "contradicted_matches": round(contradicted, 4),
            "max_image_size": self.options.max_image_size,
            "rotation": round(self.rotation, 4),
            "matching": how,
            "pairs": len(mapped.pairs),
            "verified_pairs": mapped.verified,
            "matches_per_pair": float(np.median(matches_that_hold(mapped.database) or [0])),
            "added_frames": added,
            "retried": retried,
            "unreadable": unreadable,
            **static_facts,
            "borders": border_facts([item.image for item in stored]),
            "panoramas": self.prepared.panoramas,
            "upright_copies": self.prepared.upright_copies,
            "masks": masks or made,
            "static_masks": made > 0,
            "seconds": {phase: round(spent, 2) for phase, spent in self.phases.seconds.items()},
            "threads": self.threads,
            "gpu": self.gpu,
            "videos": [
                {
                    "name": name,
                    "frames": len(frames),
                    "most": self.prepared.most_frames[name],
                    "hdr": self.prepared.videos[name].colour.hdr,
                }
                for name, frames in self._frames_of_videos(stored).items()
            ],
            "versions": versions(),
        }

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
            pairs = choose_pairs(how, [item.sample for item in stored], self.options.seed)
        # The faces of a panorama are at one place, and known to each other.
        source = sources(stored)
        pairs = [(i, j) for i, j in pairs if source[i] is None or source[i] != source[j]]
        return "poses" if by_pose else how, pairs

    def _models(
        self, matched: Mapped, images: list[SfmImage], places: Places
    ) -> tuple[Mapped, dict[str, Any] | None, dict[str, Any] | None]:
        """Map what is matched, with the tries that may register more, or triangulate it where cameras are known.

        Returns the models with what they were made of, and the facts of _fill_gaps() and _retry().
        """
        database, stored = matched.database, matched.stored
        folder = self.folder / "work" / "models"
        if self.options.cameras is not None:
            model = triangulate(
                database,
                folder,
                stored,
                matched.keys,
                self.options.cameras,
                seed=self.options.seed,
                threads=self.threads,
                progress=self.phases.start("triangulation"),
            )
            return replace(matched, models=[model]), None, None
        if self.options.mapper == "global":
            # Calibration changes cameras and geometries; the next call finds those of matching.
            database = database.with_name("calibrated.db")
            shutil.copyfile(matched.database, database)
        models = self._map("mapping", database, folder, len(stored))
        mapped, added = replace(matched, database=database, models=models), None
        if self.rotation > TURNED:  # more images would bring no depth
            return mapped, None, None
        if self.inputs.is_video and not self.prepared.panoramas:
            mapped, added = self._fill_gaps(mapped, images, self._how_to_match(len(stored)), places)
        mapped, retried = self._retry(mapped)
        return self._try_fisheyes(mapped), added, retried

    def _finish(self, models: list[pycolmap.Reconstruction], stored: list[Stored]) -> dict[str, Any]:
        """Name and colour what is in the models, align the largest, and write all; return what the alignment did."""
        for model in models:
            name_and_colour(
                model,
                {item.number: item.image.name for item in stored},
                {item.number: item.colours for item in stored},
            )
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

    def _map(self, phase: str, database: Path, folder: Path, total: int) -> list[pycolmap.Reconstruction]:
        seed, progress = self.options.seed, self.phases.start(phase)
        if self.options.mapper == "global":
            calibrate(database, seed)
        if is_fisheye_model(self.options.mapped_model):
            database = with_fisheyes(database, self.options.mapped_model)
        if self.options.mapper == "global":
            return run_global_mapper(
                database, folder, seed=seed, threads=self.threads, gpu=self.gpu, total=total, progress=progress
            )
        return run_mapper(database, folder, seed=seed, threads=self.threads, total=total, progress=progress)

    def _try_fisheyes(self, mapped: Mapped) -> Mapped:
        """Map anew with fisheyes where many images are not registered; return what is used, the larger model."""
        registered = mapped.registered
        # Without a pair that holds, no lens brings an image in.
        lacking = len(joined(pairs_that_hold(mapped.database), registered) - registered)
        few = _FEW_LACKING * len(mapped.stored)
        if not self._may_be_fisheye(mapped.database) or lacking <= few:
            return mapped
        found = self._map_fisheyes(mapped, None)
        return found if len(found.registered) > len(registered) + few else mapped

    def _choose_lenses(
        self, mapped: Mapped
    ) -> tuple[list[pycolmap.Reconstruction], list[dict[str, Any]], list[dict[str, Any]]]:
        """Choose the lens of each camera of the largest model; return the models with it, and two reports.

        The second is of cameras that were zoomed, each of whose images has a lens of its own.
        """
        models, constant = mapped.models, rig_cameras(mapped.database)
        kind = {"seed": self.options.seed, "threads": self.threads}
        as_mapped = models[0]
        phase, tries_own = self.phases.start("lens"), not constant and self.options.camera_per != "image"

        def progress(done: int, total: int) -> None:
            phase(done, total + tries_own)

        models[0], lenses, before = choose_lenses(models[0], constant=constant, progress=progress, **kind)
        mapped_so = any(is_fisheye_model(fact["start"]) for fact in lenses)
        wide = wide_cameras(models[0], lenses)
        own = None
        if before is not None and tries_own:
            if not wide and not mapped_so:
                own = own_lenses(as_mapped, lenses, before, constant=constant, **kind)
            phase(ADJUSTMENTS + 1, ADJUSTMENTS + 1)
            if own is not None:
                zoomed = {fact["camera"] for fact in own[1]}
                return [own[0], *models[1:]], [fact for fact in lenses if fact["camera"] not in zoomed], own[1]
        if not wide or mapped_so or not self._may_be_fisheye(mapped.database):
            return models, lenses, []
        again = self._map_fisheyes(mapped, wide).models
        report = compared(again[0], models[0], lenses, wide, constant=constant, **kind) if again else None
        return (models, lenses, []) if report is None else (again, report, [])

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

    def _match(self, phase: str, database: Path, keys: list[str], pairs: list[Pair]) -> int:
        seed, progress = self.options.seed, self.phases.start(phase)
        return match(database, keys, pairs, seed=seed, threads=self.threads, gpu=self.gpu, progress=progress)

    def _makes_masks(self, images: list[SfmImage]) -> bool:
        """Return whether images get masks of what is not of the scene: none are given or refused."""
        return self.inputs.static_masks and not any(image.mask or image.panorama for image in images)

    def _without_borders(self, images: list[SfmImage]) -> list[SfmImage]:
        """Return the images with their black borders, unless masks are given or refused."""
        if self._makes_masks(images):
            self.borders = find_borders(images, self.threads)
        return [replace(image, border=self.borders.get(image.name, image.border)) for image in images]

    def _write_static_masks(self, images: list[SfmImage], static: StaticParts) -> int:
        """Write masks/ of borders and of what stands still in the images, which lie in images/ now; return how many."""
        there = [replace(image, path=self.folder / "images" / image.name) for image in images]
        folder, phase = self.folder / "masks", self.phases.start("masks")
        return write_static_masks(there, static.regions, folder, phase, self.threads, static.overlays)

    def _fill_gaps(
        self, first: Mapped, images: list[SfmImage], how: Matching, places: Places
    ) -> tuple[Mapped, dict[str, Any] | None]:
        """Add frames of the video between neighbours that no model has both of, and map anew.

        images: the frames that were chosen at first. places: around which features are dropped.
        Returns what is to be used, ``first`` unless the largest model registers more of these now, and the facts of the
        try, or None without gaps. All that is written lies in work/gaps/: what is kept of ``first`` stays valid.
        """
        names_by_model = [{first.name_of(number) for number in model.reg_image_ids()} for model in first.models]
        gaps = find_gaps([image.name for image in images], names_by_model)
        stretches = stretches_in(gaps, len(images))
        if not stretches:
            return first, None
        folder = self.folder / "work" / "gaps"
        folder.mkdir()
        names: list[str] = []
        phase = self.phases.start("more frames")
        for name, within in self.inputs.frame_folders.items():
            if within in stretches:
                (folder / within).mkdir(parents=True, exist_ok=True)
                more_of = write_more_frames(self.prepared.videos[name], folder / within, stretches[within], phase)
                names += [str(PurePosixPath(within, frame)) for frame in more_of]
        headers, _ = readable(SfmInput(folder, tuple(names)), max_pixels(None))
        more = [SfmImage.of(name, folder, header) for name, header in headers.items()]
        # Frames that are added have the border that all of their size have.
        common = {(image.width, image.height): image.border for image in images}
        common |= {(image.width, image.height): image.border for image in images if not any(image.border)}
        more = [replace(image, border=common.get((image.width, image.height), image.border)) for image in more]
        database = folder / "database.db"
        shutil.copyfile(first.database, database)
        shutil.copytree(first.database.with_name(COLOURS), database.with_name(COLOURS))
        # The database names images by their place in this list, so new ones are at its end.
        everything = [*images, *more]
        progress = self.phases.start("more features")
        stored, _ = extract(database, everything, self.options, threads=self.threads, gpu=self.gpu, progress=progress)
        keys = keys_of(stored, everything)
        stored = drop_stationary(database, stored, keys, places, self.options.max_image_size)
        order = sorted(range(len(stored)), key=lambda index: stored[index].image.name)
        wanted = choose_pairs(how, [stored[index].sample for index in order], self.options.seed)
        pairs = [(min(order[i], order[j]), max(order[i], order[j])) for i, j in wanted]
        new = sorted(pair for pair in pairs if pair[1] >= len(first.stored))
        verified = self._match("more matching", database, keys, new)
        models = self._map("more mapping", database, folder / "models", len(stored))
        found = Mapped(database, stored, keys, [*first.pairs, *new], verified, models)
        chosen = {item.number for item in first.stored}
        before, after = len(chosen & first.registered), len(chosen & found.registered)
        facts = {"gaps": len(gaps), "frames": len(more), "before": before, "after": after, "of": len(chosen)}
        return (found if after > before else first), facts

    def _keep_used(
        self, stored: list[Stored], images: list[SfmImage], models: list[pycolmap.Reconstruction]
    ) -> list[Stored]:
        """Leave out frames that were added to ``images`` and are in none of the models; move the others to images/."""
        used = {number for model in models for number in model.reg_image_ids()}
        chosen = {image.name for image in images}
        kept = [item for item in stored if item.image.name in chosen or item.number in used]
        for item in kept:
            if item.image.name not in chosen:
                place = self.folder / "images" / item.image.name
                place.parent.mkdir(parents=True, exist_ok=True)
                item.image.path.rename(place)
        return kept

    def _retry(self, mapped: Mapped) -> tuple[Mapped, dict[str, Any] | None]:
        """Match the images that the largest model lacks again, loosely, and map anew.

        Returns what is to be used, ``mapped`` unless the largest model registers more images now, and the facts of the
        try, or None if no image is lacking.
        """
        models, stored, keys, pairs = mapped.models, mapped.stored, mapped.keys, mapped.pairs
        registered = mapped.registered
        lacking = {index for index, item in enumerate(stored) if item.number not in registered}
        if not lacking:
            return mapped, None
        work = self.folder / "work"
        database = work / "retry.db"
        shutil.copyfile(mapped.database, database)
        again = partial(
            match_again,
            database,
            keys,
            seed=self.options.seed,
            threads=self.threads,
            gpu=self.gpu,
            progress=self.phases.start("matching again"),
        )
        tried = self._pairs_to_retry(mapped, database, lacking)
        # What images of one smaller model have in common joins them with the largest only if another pair does.
        place = {number: model for model, each in enumerate(models) for number in each.reg_image_ids()}
        inside = {pair for pair in tried if len({place.get(stored[index].number, -1 - index) for index in pair}) == 1}
        held = again([pair for pair in tried if pair not in inside])
        if held:
            held = sorted([*held, *again([pair for pair in tried if pair in inside])])
            # A registered image that holds with a lacking one needs more points for it: those it shares with others.
            beside = {index for pair in held for index in pair} - lacking
            again([(i, j) for i, j in pairs if (i in beside or j in beside) and not {i, j} & lacking])
        new_models = self._map("mapping again", database, work / "models-again", len(stored)) if held else []
        found = replace(mapped, database=database, models=new_models)
        before, after = len(registered), len(found.registered)
        facts: dict[str, Any] = {"images": len(lacking), "verified_pairs": len(held), "before": before, "after": after}
        # Where a scene repeats, looser matching joins what only looks alike, and most pairs contradict the cameras.
        if after > before and (contradicted := contradicted_share(database, new_models[0])) > CONTRADICTED:
            return mapped, {**facts, "contradicted_matches": round(contradicted, 4)}
        return (found if after > before else mapped), facts

    def _pairs_to_retry(self, mapped: Mapped, database: Path, lacking: set[int]) -> list[Pair]:
        """Return the pairs of images ``lacking`` whose descriptors match, ascending.

        Those that were never matched are matched in ``database`` as at first: the most similar ones, and no more than
        were matched at first.
        """
        stored, keys = mapped.stored, mapped.keys
        pairs = pairs_to_retry(mapped.pairs, lacking, sources(stored))
        matched = set(mapped.pairs)
        others = [pair for pair in pairs if pair not in matched]
        others = most_alike(others, [item.sample for item in stored], len(matched), self.options.seed)
        if others:
            self._match("matching more", database, keys, others)
        return pairs_with_matches(database, keys, pairs)

    def _check_models(self, models: list[pycolmap.Reconstruction], names: list[str]) -> None:
        registered = models[0].num_reg_images() if models else 0
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


def sources(stored: list[Stored]) -> list[str | None]:
    """Return for each image the panorama that it is a face of, or None."""
    return [None if item.image.panorama is None else item.image.panorama[0] for item in stored]


def keys_of(stored: list[Stored], images: list[SfmImage]) -> list[str]:
    """Return the names in the database: the places in ``images``, whose own names are distinct."""
    places = {image.name: str(place) for place, image in enumerate(images)}
    return [places[item.image.name] for item in stored]
