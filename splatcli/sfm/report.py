"""What came of structure from motion, in figures that tell whether to trust it: sfm.json, and lines for people."""

from __future__ import annotations

from typing import Any

from splatcli import __version__
from splatcli.scene._pycolmap import pycolmap

#: Of the photos, the share below which the result is doubtful; and mean reprojection errors above, in pixels.
_FEW, _LARGE_ERROR = 0.8, 1.5
#: Names that a line shows.
_SHOWN = 5


def model_facts(model: pycolmap.Reconstruction, names: list[str]) -> dict[str, Any]:
    """Figures of a model. names: of all photos that it was to be made of."""
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


def doubts(facts: dict[str, Any]) -> list[str]:
    """What speaks against the result, a sentence each with what may help."""
    found = []
    if facts["registered"] < _FEW * facts["total"]:
        found.append(
            f"only {facts['registered']} of {facts['total']} photos could be placed: take more photos in between, "
            "or try --matching exhaustive and a larger --max-image-size"
        )
    if not facts["reprojection_error_px"] <= _LARGE_ERROR:
        found.append(
            f"points are off by {facts['reprojection_error_px']:.2f} pixels on average: try --camera-model OPENCV, "
            "and --camera-per image if lenses were changed or zoomed"
        )
    if facts.get("other_models"):
        sizes = ", ".join(map(str, facts["other_models"]))
        found.append(f"the photos fall into pieces that nothing connects; left out were such of {sizes} photos")
    return found


def lines(facts: dict[str, Any]) -> list[str]:
    """The report as a table of two columns."""
    rows = [
        ("photos placed", f"{facts['registered']} of {facts['total']}"),
        ("reprojection error", f"{facts['reprojection_error_px']:.3f} pixels"),
        ("points", f"{facts['points']:,}, each seen in {facts['track_length']:.1f} photos"),
        *(("camera", _camera(camera)) for camera in facts["cameras"][:_SHOWN]),
        *([("masks", f"of {facts['masks']} photos; what they hide gave no features")] if facts.get("masks") else []),
        ("matching", f"{facts['matching']}, {facts['verified_pairs']:,} of {facts['pairs']:,} pairs hold"),
        ("time", f"{sum(facts['seconds'].values()):.0f} s with {facts['threads']} threads"),
    ]
    if len(facts["cameras"]) > _SHOWN:
        rows.insert(3 + _SHOWN, ("", f"and {len(facts['cameras']) - _SHOWN} more cameras"))
    for title, names in (("not placed", facts["unregistered"]), ("not readable", sorted(facts["unreadable"]))):
        if names:
            rows.append((title, ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")))
    return [f"{title:<20}{text}" for title, text in rows]


def _camera(camera: dict[str, Any]) -> str:
    focal = " and ".join(f"{value:.1f}" for value in camera["focal_px"])
    return f"{camera['model']}, {camera['width']}x{camera['height']}, focal length {focal} pixels"
