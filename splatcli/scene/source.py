"""SceneSource, the result of a reader: views as the files describe them, before images are opened."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.points import RawPoints, Reprojections


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a scene, or an entry of it such as a camera, as errors name it.

    label: of the entry ("frame 7 'a.jpg'"); empty for the file as a whole. remedy: of errors that have none of their
    own. line: where the entry is, in a file that has one entry a line.
    """

    file: Path
    label: str = ""
    remedy: str | None = None
    line: int | None = None

    def named(self, label: str) -> Entry:
        """Return another entry at this place, by its label."""
        return replace(self, label=label)

    def error(self, what: str, remedy: str | None = None) -> SceneError:
        """Return the error that names this entry."""
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return SceneError(f"{self.label}: {what}" if self.label else what, where=where, remedy=remedy or self.remedy)

    def numbers(self, values: object, count: int, name: str) -> list[float]:
        """Return the numbers of a list from JSON. Raises SceneError for all else, and for numbers beyond any double."""
        usable = isinstance(values, list) and len(values) == count and all(type(one) in (int, float) for one in values)
        try:
            found = [float(one) for one in values] if usable else []  # type: ignore[attr-defined]  # narrowed by usable
        except OverflowError:
            found = []
        if not usable or len(found) != count or not all(map(math.isfinite, found)):
            raise self.error(f"{name} is not {'a number' if count == 1 else f'{count} numbers'}")
        return found

    def number(self, value: object, name: str) -> float:
        """Return a number from JSON, as numbers() does."""
        return self.numbers([value], 1, name)[0]

    def text_number(self, text: str | None, name: str) -> float:
        """Return a finite number that is written as text. Raises SceneError for another text, and for none."""
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(text or "")):
                return value
        raise self.error(f"{name} is {text!r}, not a number")

    def text_numbers(self, text: str | None, count: int, name: str) -> list[float]:
        """Return finite numbers that white space separates. Raises SceneError for others, and for another count."""
        words = (text or "").split()
        if len(words) != count:
            raise self.error(f"{name} has {len(words)} numbers, expected {count}")
        return [self.text_number(word, name) for word in words]


class Lens(Protocol):
    """The lens of a view, and the file that describes it.

    file, label: the file, and what to call the lens in messages ("camera 3", "frame 7 'a.jpg'").
    """

    @property
    def file(self) -> Path: ...

    @property
    def label(self) -> str: ...

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        """Return the lens for a stored image of this size, which most layouts know and ignore. Raises SceneError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FixedLens:
    """A lens whose file gives its size."""

    file: Path
    label: str
    camera: pycolmap.Camera

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        return self.camera


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One view as described.

    name: path of the image relative to the image folder, forward slashes; the view's key.
    viewmat: [4, 4] float64, world to camera, OpenCV axes.
    label: what to call the view in messages ("image 7 'a.jpg'", "frame 3").
    outside: where the image is, as the file says it, when that is outside the scene's folder; else None.
    mask: where the mask is, absolute or from the scene's folder, when the file names one; else None.
    number: what the tracks of the scene's points call the view; None where there are none.
    depth: where the depth map is, absolute or from the scene's folder, when the file names one; else None.
    moved: whether the file places the image outside, where it is no more, and the scene's folder has it.
    scaled: whether the file's pose had a scale.
    """

    name: str
    lens: Lens
    viewmat: NDArray[np.float64]
    label: str
    outside: str | None = None
    mask: str | None = None
    number: int | None = None
    depth: str | None = None
    moved: bool = False
    scaled: bool = False

    @property
    def center(self) -> NDArray[np.float64]:
        """[3] the camera's position in the world."""
        return np.asarray(-self.viewmat[:3, :3].T @ self.viewmat[:3, 3])


@dataclass(slots=True)
class SceneSource:
    """A scene as described.

    file: the file that describes the views, for messages.
    image_folders: where the images may be, the likeliest first.
    train, test: names of the split that the layout itself makes; None leaves it to the settings.
    tolerant: views without an image are dropped (when most have one) without being asked.
    resized_folders: whether ``<folder>_2``, ``_4``, ``_8`` beside the image folder hold smaller copies.
    depth_scale: scene units that 1 in a depth map is, where the layout says so.
    alternatives: what else could be read instead, for messages ("--model sparse/1 has 180 images").
    incidental: programs leave these files beside images: where a COLMAP model is too, they need not agree with it.
    reprojections: of some points, where the reader knows observations.
    place: latitude, longitude, height (EPSG:4979) of the origin, of a scene in metres, x east, y north and z up of it.
    """

    root: Path
    file: Path
    views: list[View]
    image_folders: list[Path]
    points: RawPoints | None = None
    train: set[str] | None = None
    test: set[str] | None = None
    tolerant: bool = False
    resized_folders: bool = True
    depth_scale: float | None = None
    alternatives: str | None = None
    incidental: bool = False
    reprojections: Reprojections | None = None
    place: tuple[float, float, float] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reader:
    """A layout of scenes. One of another package is an entry point in the group ``splatcli.readers``.

    name: what ``--format`` takes.
    files: what makes a folder such a scene, for messages ("transforms.json").
    matches: whether a folder is such a scene, at little cost. Raises OSError only.
    read: the scene as the folder's files describe it. Views that are wrong are left out and added to the Problems;
        what leaves nothing to read raises SceneError. It opens no images.
    """

    name: str
    files: str
    matches: Callable[[Path], bool]
    read: Callable[[Path, DataConfig, Problems], SceneSource]


def path_key(name: str) -> str:
    """Return the name of an image as it is compared: without ending and case."""
    return str(PurePosixPath(name).with_suffix("")).casefold()


#: Problems that a message lists; more are counted.
LISTED = 20


class SceneProblems(SceneError):
    """Several things are wrong with one scene.

    root: the scene's folder.
    problems: the first LISTED of them, in the order found.
    total: how many there are.
    """

    def __init__(self, root: Path, problems: list[SceneError], total: int) -> None:
        self.root = root
        self.problems = tuple(problems)
        self.total = total
        super().__init__(f"{total:,} problems", where=root)

    def as_dict(self) -> dict[str, object]:
        listed = [{"what": p.what, "where": p.where, "help": p.remedy} for p in self.problems]
        return {**super().as_dict(), "problems": listed, "num_problems": self.total}

    def lines(self) -> list[str]:
        """Return a heading, then each problem with its place; a remedy that several in a row share follows the last."""
        cut = f", the first {len(self.problems)}" if self.total > len(self.problems) else ""
        lines = [f"error[{self.code}]: {self.total:,} problems in {self.root}{cut}:"]
        for i, problem in enumerate(self.problems):
            place = "" if problem.where is None else f"{_below(problem.where, self.root)}: "
            lines.append(f"  {i + 1}. {place}{problem.what}")
            following = self.problems[i + 1].remedy if i + 1 < len(self.problems) else None
            if problem.remedy is not None and problem.remedy != following:
                lines.append(f"     help: {problem.remedy}")
        if cut:
            lines.append(f"  ... and {self.total - len(self.problems):,} more")
        return lines


class Problems:
    """Collects SceneErrors while a scene is examined.

    What is wrong is left out of what is examined next, so that no problem is the consequence of another.
    ``raise_any`` ends the examination.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.total = 0
        self._first: list[SceneError] = []
        self._seen: set[str] = set()

    def add(self, problem: SceneError) -> None:
        """Add a problem; the very same one, met again at the next view, counts once."""
        if str(problem) in self._seen:
            return
        self._seen.add(str(problem))
        self.total += 1
        if len(self._first) < LISTED:
            self._first.append(problem)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add a SceneError raised inside, and go on with what follows the block."""
        try:
            yield
        except SceneError as problem:
            self.add(problem)

    def raise_any(self) -> None:
        """Raise the one problem as it is, several as SceneProblems; return when there is none."""
        if self.total == 1:
            raise self._first[0]
        if self.total:
            raise SceneProblems(self.root, self._first, self.total)


def _below(where: str, root: Path) -> str:
    """Return a place inside the scene, relative to its folder."""
    return where.removeprefix(f"{root}{os.sep}")
