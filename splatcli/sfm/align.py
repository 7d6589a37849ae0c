"""Alignment: a model gets metres, and a place on Earth, from control points, a known distance, or GPS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.control_points import ControlPoints, fit_control_points
from splatcli.scene.georeference import PositionsError, georeference, position_of, write_sidecar
from splatcli.sfm.flight_log import Place
from splatcli.sfm.images import SfmInput
from splatcli.sfm.mapping import centers_of
from splatcli.sfm.options import SfmOptions
from splatcli.similarity import Similarity


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the model of these images is aligned.

    folder: of the scene; receives what readers need to go back to the Earth, see write_sidecar().
    panoramas: the files whose faces are images of the model.
    recorded: positions of frames of videos, by their names.
    """

    inputs: SfmInput
    options: SfmOptions
    folder: Path
    panoramas: Sequence[str]
    recorded: Mapping[str, Place] = field(default_factory=dict)

    def apply(self, model: pycolmap.Reconstruction) -> dict[str, Any]:
        """Give the model metres, and a place where GPS or control points say so; return what was done, or why not."""
        if self.options.cameras is not None:
            return {"applied": False, "reason": "the cameras are held"}
        if self.options.control_points is not None:
            return self._control(model, ControlPoints.from_dict(self.options.control_points))
        if self.options.scale_from is not None:
            return self._scale(model)
        if self.options.georeference == "off":
            return {"applied": False, "reason": "off"}
        if self.inputs.is_video and not self.recorded and self.options.georeference != "on":
            return {"applied": False, "reason": "videos have no GPS"}
        try:
            centers = {self._source(name): center for name, center in centers_of(model).items()}
            found = georeference(centers, self.recorded if self.inputs.is_video else self._exif(centers))
        except PositionsError as reason:
            if self.options.georeference == "on":
                raise SceneError(
                    f"the model cannot be aligned with GPS: {reason}",
                    where=self.inputs.path,
                    remedy="leave out --georeference on; --scale-from A,B,LENGTH gives it metres",
                ) from None
            return {"applied": False, "reason": str(reason)}
        if self.options.georeference == "auto" and not found.fit.is_good:
            reason_ = (
                f"GPS is too coarse for the size of the scene: it leaves the scale uncertain by "
                f"{100 * found.fit.scale_error:.0f} % and the tilt by {found.fit.tilt_error:.0f} degrees"
            )
            return {"applied": False, "reason": reason_, **found.facts()}
        model.transform(pycolmap.Sim3d(found.fit.similarity.matrix()[:3]))
        write_sidecar(self.folder, found.document())
        return {"applied": True, "origin": list(found.origin), **found.facts()}

    def _exif(self, names: Iterable[str]) -> dict[str, Place]:
        return {name: place for name in names if (place := position_of(self.inputs.path / name)) is not None}

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
        similarity = Similarity(length / apart)
        model.transform(pycolmap.Sim3d(similarity.matrix()[:3]))
        facts = {"metres_per_unit": similarity.scale, "scale_from": self.options.scale_from}
        write_sidecar(self.folder, {"version": 1, "frame": "metres, axes as they came", **facts})
        sources = [self._source(name) for name in centers]
        unused = sum(name in self.recorded for name in sources) or len(self._exif(sources))
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
        found = fit_control_points(model, control)
        model.transform(pycolmap.Sim3d(found.fit.similarity.matrix()[:3]))
        write_sidecar(self.folder, found.document())
        place = {} if found.origin is None else {"origin": list(found.origin)}
        return {"applied": True, **place, **found.facts()}
