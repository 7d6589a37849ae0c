"""The report of structure from motion: figures of a model, and what a user reads of them: table, notes, doubts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from splatcli import __version__
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.borders import listed_borders
from splatcli.scene.find_images import unread_note
from splatcli.scene.inspect import few_notes
from splatcli.sfm.images import copies_note, edits_note
from splatcli.sizes import counted, listed

#: Points whose parallax is measured; a median needs no more.
_PARALLAX_POINTS = 2_000
#: Of the images, the share below which the result is doubtful; and mean reprojection errors above, in pixels.
_FEW, _LARGE_ERROR = 0.8, 1.5
#: Share of the matches that a second motion explains in most pairs, from which the first one is doubted: 0 to 1 % in
#: real captures and repeated patterns, 14 and 15 % where a figure bends the cameras, 9.5 % where one does not.
_SECOND_MOTION = 0.1
#: Share of the matches that are in pairs which contradict the cameras, from which images may be in wrong places: 0 to
#: 0.29 where they are right, 0.51 to 0.82 in scenes that repeat and were solved wrongly.
CONTRADICTED = 0.4
#: Observations per image, and degrees of parallax, below which the result is doubtful. The mapper registers an image
#: from 30 observations. It finds no pair to begin with below about 4 degrees (tests/sfm/test_captures.py); a walk
#: through a room that trains well has 6.2, the other real scenes tried 19 to 48.
_FEW_OBSERVATIONS, _LITTLE_PARALLAX = 100, 4.5
#: Share of a pair's matches that a rotation alone explains (consistency.py), in the median of the pairs, from which
#: the camera stayed at one place: 0.98 and more for crops of panoramas, 0.2 at most for real captures, 0.62 for one
#: straight down from a height.
TURNED = 0.9
#: The end of the remedy for images in wrong places.
_SMALLER_STEPS = "and with more of what stands around it; look at the cameras: splat info --plot"
#: Names that a line shows, and cameras.
_MAX_LISTED, _SHOWN = 8, 5


def model_facts(model: pycolmap.Reconstruction, names: list[str]) -> dict[str, Any]:
    """Return figures of a model. names: of all images that it was to be made of."""
    registered = {model.image(image_id).name for image_id in model.reg_image_ids()}
    used = {model.image(image_id).camera_id for image_id in model.reg_image_ids()}
    return {
        "registered": len(registered),
        "total": len(names),
        "unregistered": [name for name in names if name not in registered],
        "points": int(model.num_points3D()),
        "reprojection_error_px": float(model.compute_mean_reprojection_error()),
        "track_length": float(model.compute_mean_track_length()),
        "observations_per_image": float(model.compute_mean_observations_per_reg_image()),
        "parallax_degrees": parallax(model),
        "cameras": [camera_facts(model.camera(number)) for number in sorted(used)],
    }


def camera_facts(camera: pycolmap.Camera) -> dict[str, Any]:
    """Return model, size in pixels, focal lengths in pixels, and all parameters in COLMAP's order."""
    return {
        "model": camera.model_name,
        "width": int(camera.width),
        "height": int(camera.height),
        "focal_px": [float(camera.params[index]) for index in camera.focal_length_idxs()],
        "params": [float(value) for value in camera.params],
    }


def parallax(model: pycolmap.Reconstruction) -> float:
    """Return the median over points of the widest angle in degrees between the rays to the cameras that see one."""
    centers = {image_id: model.image(image_id).projection_center() for image_id in model.reg_image_ids()}
    points = list(model.points3D.values())
    angles = []
    for point in points[:: max(1, len(points) // _PARALLAX_POINTS)]:
        rays = np.stack([centers[element.image_id] for element in point.track.elements]) - point.xyz
        rays /= np.maximum(np.linalg.norm(rays, axis=1, keepdims=True), 1e-300)
        angles.append(float(np.degrees(np.arccos(np.clip((rays @ rays.T).min(), -1.0, 1.0)))))
    return float(np.median(angles)) if angles else 0.0


def versions() -> dict[str, str]:
    """Return the versions of the programs that make a model."""
    return {"splatcli": __version__, "pycolmap": pycolmap.__version__}


def notes(facts: dict[str, Any]) -> list[str]:
    """Return what became of the images that are not in the model, a sentence each."""
    found = []
    if missing := facts["unregistered"]:
        found.append(
            f"{facts['registered']} of {facts['total']} images are registered; left out: {listed(missing, _MAX_LISTED)}"
        )
    if copies := facts.get("copies"):
        found.append(copies_note(copies))
    if edits := facts.get("edits"):
        found.append(f"{edits_note(edits)}; one of them is used where the other form is moved away")
    if copies := facts.get("upright_copies"):
        found.append(
            f"EXIF turns or mirrors {counted(len(copies), 'image')}, which programs pass over where the shape stays: "
            f"images/ has upright copies of {listed(copies, _MAX_LISTED)}"
        )
    others = zip(facts.get("other_images", []), facts.get("other_models", []), strict=False)
    for fact in facts.get("borders") or []:
        found.append(
            f"{fact['images']} images of {fact['width']}x{fact['height']} pixels have black borders "
            f"({listed_borders(fact['pixels'])} pixels): masks/ hides them from training"
        )
    for fact in facts.get("overlays") or []:
        found.append(
            f"{fact['images']} images of {fact['width']}x{fact['height']} pixels show the same at {_places(fact)}, as "
            "a date, a logo or a watermark: masks/ hides it from training"
        )
    for number, (names, count) in enumerate(others, start=1):
        shared = f", with {count - len(names)} of a larger model" if count > len(names) else ""
        found.append(
            f"{counted(len(names), 'image forms', 'images form')} a model of {'its' if len(names) == 1 else 'their'} "
            f"own{shared}, kept as sparse/{number}: "
            f"{listed(names, _MAX_LISTED)}; sparse/0, the largest, is used"
        )
    for fact in facts.get("zoomed") or []:
        found.append(
            f"the focal length changes from image to image, between {fact['focal_px'][0]:.0f} and "
            f"{fact['focal_px'][1]:.0f} pixels: each of {fact['images']} images has a lens of its own, which is off by "
            f"{fact['error_px']:.2f} instead of {fact['error_px_shared']:.2f} pixels on held-out points; "
            "splat sfm --camera-per image maps with such lenses from the start"
        )
    placed = facts.get("georeference") or {}
    for name, reason in list(placed.get("control_points_not_placed", {}).items())[:_SHOWN]:
        found.append(f"control point {name} is not used: {reason}")
    if "control_points" in placed and placed["left_out"]:
        found.append(
            f"control points that disagree with the others are left out: {listed(placed['left_out'], _MAX_LISTED)}"
        )
    return found


def doubts(facts: dict[str, Any]) -> list[str]:
    """Return doubts about the result, a sentence each with what may help."""
    found = []
    held = bool(facts.get("cameras_held"))
    sides = [max(camera["width"], camera["height"]) for camera in facts.get("cameras", [])]
    larger = ["a larger --max-image-size"] * (max(sides, default=math.inf) > facts.get("max_image_size", 0))
    observations, turned = facts.get("observations_per_image", math.inf), facts.get("rotation", 0.0) > TURNED
    if facts["registered"] < _FEW * facts["total"] and not turned:
        tries = ["--matching exhaustive"] * (facts["matching"] != "exhaustive") + larger
        found.append(
            f"only {facts['registered']} of {facts['total']} images could be registered: take more images in between"
            + (f", or try {' and '.join(tries)}" if tries else "")
        )
    if not facts["reprojection_error_px"] <= _LARGE_ERROR and facts.get("cameras_held"):
        found.append(
            f"points are off by {facts['reprojection_error_px']:.2f} pixels on average with these cameras: splat train "
            "--pose-opt refines their poses, or splat sfm IMAGES estimates others"
        )
    elif not facts["reprojection_error_px"] <= _LARGE_ERROR:
        lenses = {camera["model"] for camera in facts["cameras"]}
        model = "another --camera-model than OPENCV" if lenses == {"OPENCV"} else "--camera-model OPENCV"
        lens = "other lens models do not help; try " if facts.get("lenses") else f"try {model}, and "
        found.append(
            f"points are off by {facts['reprojection_error_px']:.2f} pixels on average: {lens}"
            "--camera-per image if lenses were changed or zoomed"
        )
    if turned:
        found.append(
            f"a rotation alone explains {100 * facts['rotation']:.0f} % of what two images have in common, in the "
            "median, so the camera stayed at one place: depths and positions of cameras are made up, and other views "
            "will look wrong. Step sideways between images, around the subject, instead of turning on the spot"
        )
    else:
        found += few_notes(facts["registered"], facts["points"], cameras_held=held)
    if observations < _FEW_OBSERVATIONS and not turned:
        uncertain = "the start is weak" if held else "poses are uncertain"
        found.append(
            f"an image has only {observations:.0f} points on average, so {uncertain}: take "
            "sharper images with more texture and overlap" + (f", or try {larger[0]}" if larger else "")
        )
    if (second := facts.get("second_motion", 0.0)) > _SECOND_MOTION:
        lengths = sorted({round(length) for camera in facts["cameras"] for length in camera["focal_px"]})
        named = listed([str(length) for length in lengths], _MAX_LISTED)
        found.append(
            f"{100 * second:.0f} % or more of the matches of most image pairs follow another motion than the cameras: "
            f"something that moves fills a part of the images, and poses and focal length ({named} pixels) may be its "
            "own: hide it with masks (splat sfm --masks DIR), or leave images of it out"
        )
    if (contradicted := facts.get("contradicted_matches", 0.0)) > CONTRADICTED and not turned:
        found.append(
            f"{100 * contradicted:.0f} % of the matches between images contradict the cameras: images may be in wrong "
            "places, as where things repeat and steps between images are large. Take images in smaller steps, of 10 "
            f"degrees around the subject, {_SMALLER_STEPS}"
        )
    elif (ambiguous := facts.get("ambiguous")) and not ambiguous["used"] and not turned:
        found.append(
            f"the matches of neighbours in name order contradict the cameras at {ambiguous['contradicted_before']} of "
            f"{ambiguous['steps']} steps: images may be in wrong places, as where sides of an object look alike. Take "
            f"images in smaller steps, of 10 degrees around the subject, {_SMALLER_STEPS}"
        )
    if facts.get("parallax_degrees", math.inf) < _LITTLE_PARALLAX and not turned:
        found.append(
            f"points are seen under {facts['parallax_degrees']:.1f} degrees of parallax in the median, so depths are "
            "uncertain: step sideways between images, around the subject, instead of turning or zooming"
        )
    if unreadable := facts.get("unreadable"):
        first, kind = min(unreadable), "video" if facts.get("videos") else "image"
        one = f"1 {kind} cannot be read and is left out: {first} {unreadable[first]}"
        several = f"{len(unreadable)} {kind}s cannot be read and are left out; the first, {first}, {unreadable[first]}"
        found.append(one if len(unreadable) == 1 else several)
    if unread := facts.get("not_read"):
        found.append(unread_note(unread))
    if videos := facts.get("videos_left_out"):
        are = "1 video among the images is" if len(videos) == 1 else f"{len(videos)} videos among the images are"
        found.append(
            f"{are} left out, {videos[0]}: name it alone instead; or put frames of it among the images, which lie in "
            "images/ of the folder that splat sfm makes of it"
        )
    for fact in facts.get("stationary") or []:
        found.append(
            f"features do not move in the {fact['images']} images of {fact['width']}x{fact['height']} pixels, mostly "
            f"at {_places(fact)}, as in a watermark, on a part of the vehicle or behind a turntable: cameras are "
            "estimated without them"
            + (
                ", and masks/ hides such regions from training; look at some, splat train --masks none does without"
                if facts.get("static_masks")
                else "; hide these pixels with masks, or training puts them into the scene"
            )
        )
    if facts.get("other_models") and not turned:
        own = sum(map(len, facts["other_images"])) if "other_images" in facts else math.inf
        shared = sum(facts["other_models"]) > own
        found.append(
            f"the images fall into {1 + len(facts['other_models'])} models that "
            f"{'too little' if shared else 'nothing'} connects: take images that "
            "lead from one to another, a step apart; or if they show different places, put these into folders of their "
            "own"
        )
    return found


def _places(fact: dict[str, Any]) -> str:
    """Return where something is in the images, in words."""
    return "; ".join("x {} to {}, y {} to {}".format(*(box[i] for i in (0, 2, 1, 3))) for box in fact["boxes"])


#: What masks are, by whether they were made here.
_MASKS = {False: "what they hide gave no features", True: "made of what is not of the scene"}


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the report as a table of two columns."""
    cameras = _cameras(facts["cameras"])
    rows = [
        ("images registered", f"{facts['registered']} of {facts['total']}"),
        ("reprojection error", f"{facts['reprojection_error_px']:.3f} pixels"),
        ("points", f"{facts['points']:,}, each seen in {facts['track_length']:.1f} images"),
        *(("camera", text) for text in cameras[:_SHOWN]),
        *(("lens", _lens(lens)) for lens in facts.get("lenses", [])[:_SHOWN]),
        *([] if facts.get("panoramas") else _dropped(facts.get("videos") or [])),
        *_videos(facts.get("videos") or []),
        *([("panoramas", f"{len(facts['panoramas'])}, each cut into faces")] if facts.get("panoramas") else []),
        *(
            [("masks", f"of {facts['masks']} images; {_MASKS[bool(facts.get('static_masks'))]}")]
            if facts.get("masks")
            else []
        ),
        *_aligned(facts.get("georeference") or {}),
        ("matching", f"{facts['matching']}, {facts['verified_pairs']:,} of {facts['pairs']:,} pairs hold"),
        *_added(facts.get("added_frames")),
        *_retried(facts.get("retried")),
        *_ambiguous(facts.get("ambiguous")),
        ("time", f"{sum(facts['seconds'].values()):.0f} s with {facts['threads']} threads"),
    ]
    if len(cameras) > _SHOWN:
        rows.insert(3 + _SHOWN, ("", f"and {len(cameras) - _SHOWN} more cameras"))
    for title, names in (("not registered", facts["unregistered"]), ("not readable", sorted(facts["unreadable"]))):
        if names:
            rows.append((title, listed(names, _MAX_LISTED)))
    return [f"{title:<20}{text}" for title, text in rows]


def _dropped(videos: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a row on frames that were not chosen since others show the same."""
    frames, most = (sum(video.get(key, 0) for video in videos) for key in ("frames", "most"))
    text = f"{frames} of up to {most}: the others show the same, as where the camera stands"
    return [("frames", text)] if frames < most else []


def _videos(videos: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a row on several videos, or on one of HDR."""
    kinds = sorted({video["hdr"] for video in videos if video["hdr"]})
    hdr = f"HDR ({' and '.join(kinds)}), converted to sRGB" if kinds else ""
    if len(videos) == 1:
        return [("video", hdr)] if hdr else []
    if not videos:
        return []
    count = sum(bool(video["hdr"]) for video in videos)
    shares = listed([f"{video['frames']} of {video['name']}" for video in videos], _MAX_LISTED)
    return [("videos", f"frames: {shares}" + (f"; {count} of them {hdr}" if hdr else ""))]


def _added(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not facts:
        return []
    better = facts["after"] > facts["before"]
    change = f"{facts['after']} instead of {facts['before']}" if better else "no more"
    tried = f"{facts['frames']} more between neighbours that were not joined"
    return [("more frames", f"{tried}, {facts['kept']} kept: {change} of the first {facts['of']} registered")]


def _retried(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not facts:
        return []
    change = f"{facts['after']} instead of {facts['before']}" if facts["after"] > facts["before"] else "no more"
    if share := facts.get("contradicted_matches"):
        change = f"not used, {100 * share:.0f} % of the matches contradict its cameras: {change}"
    return [("second try", f"{facts['images']} images matched again, with a looser test: {change} registered")]


def _ambiguous(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return a row on pairs that were left out because they only look alike."""
    if not facts:
        return []
    wrong = (
        f"matches contradicted the cameras at {facts['contradicted_before']} of {facts['steps']} steps between images"
    )
    if not facts["used"]:
        return [("ambiguous pairs", f"{wrong}; neighbours alone register {facts['after']} images, and are not used")]
    return [("ambiguous pairs", f"{facts['left_out']:,} left out that only look alike: {wrong}")]


def _lens(facts: dict[str, Any]) -> str:
    """Return how a camera's lens model was chosen: errors of held-out observations before, after, and of others."""
    others = ", ".join(
        f"{trial['model']} {'refused' if 'refused' in trial else format(trial['error_px'], '.3f')}"
        for trial in facts["tried"]
        if trial["model"] != facts["model"]
    )
    kept = f" ({facts['kept']})" if "kept" in facts else ""
    before = f"{facts['start']} {facts['error_px_start']:.3f}"
    if facts["model"] == facts["start"]:
        return f"{before} pixels on held-out points is kept{kept}; tried {others}"
    return f"{facts['model']} {facts['error_px']:.3f} pixels on held-out points, {before}; tried {others}"


def _aligned(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows on metres and place; none where no image has a position."""
    if facts.get("applied") and "origin" in facts:
        lat, lon, _ = facts["origin"]
        off = math.sqrt(sum(value**2 for value in facts["residual_m"].values()))
        some = f", {len(facts['left_out'])} of {facts['positions']} left out" if facts["left_out"] else ""
        what = f"{facts['positions']} control points are" if "control_points" in facts else "GPS is"
        return [("georeference", f"metres east, north, up of {lat:.6f}, {lon:.6f}; {what} off by {off:.2f} m{some}")]
    if facts.get("applied") and "control_points" in facts:
        off = math.sqrt(sum(value**2 for value in facts["residual_m"].values()))
        return [("control points", f"metres in their axes; {facts['positions']} are off by {off:.3g} m")]
    if facts.get("applied"):
        count = facts.get("unused_positions")
        unused = f"; the GPS positions of {count} images are not used" if count else ""
        return [("scale", f"metres, {facts['metres_per_unit']:.4g} to a unit before{unused}")]
    reason = str(facts.get("reason", ""))
    return [("georeference", f"none: {reason}")] if reason and not reason.startswith(_SILENT) else []


#: Reasons against an alignment with GPS that go without saying.
_SILENT = ("off", "videos", "no image has")


def _cameras(cameras: list[dict[str, Any]]) -> list[str]:
    """Return a line for each kind of camera, as the six faces of a panorama are of one."""
    counts = Counter(
        f"{camera['model']}, {camera['width']}x{camera['height']}, focal length "
        f"{' and '.join(f'{value:.1f}' for value in camera['focal_px'])} pixels"
        for camera in cameras
    )
    return [f"{text}; {count} cameras" if count > 1 else text for text, count in counts.items()]
