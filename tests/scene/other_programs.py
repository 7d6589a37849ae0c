"""Scenes as other programs export them, written from known cameras; each writer follows that program's documentation.

A writer takes cameras, not what the readers make of them: the inverse of a reader is written a second time here.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

FLIP = np.diag([1.0, -1.0, -1.0])


@dataclass(frozen=True)
class Known:
    """A camera: name of the image, size, f, cx, cy, [3, 3] camera to world with OpenCV axes, position."""

    name: str
    width: int
    height: int
    focal: float
    cx: float
    cy: float
    rotation: NDArray[np.float64]
    center: NDArray[np.float64]


@dataclass(frozen=True)
class Distortion:
    """k1 to k4, and Brown's p1 and p2 in OpenCV's order."""

    radial: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    tangential: tuple[float, float] = (0.0, 0.0)


NONE = Distortion()


def of_colmap(model) -> list[Known]:
    """The cameras of a pycolmap.Reconstruction with a PINHOLE camera."""
    known = []
    for image in sorted(model.images.values(), key=lambda image: image.name):
        camera = model.cameras[image.camera_id]
        matrix = image.cam_from_world().matrix()
        fx, _, cx, cy = map(float, camera.params)
        rotation = matrix[:, :3].T
        known.append(Known(image.name, camera.width, camera.height, fx, cx, cy, rotation, -rotation @ matrix[:, 3]))
    return known


#: Observations: the number of a camera, that of a point, and a pixel.
Seen = Sequence[tuple[int, int, Sequence[float]]]


def copy_images(images: Path | None, folder: Path, cameras: Sequence[Known], name: Callable[[int, str], str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, camera in enumerate(cameras):
        if images is not None:
            shutil.copy(images / camera.name, folder / name(i, camera.name))


def write_points(path: Path, xyz: NDArray[np.float64], rgb: NDArray[np.uint8]) -> None:
    rows = "\n".join(f"{x!r} {y!r} {z!r} {r} {g} {b}" for (x, y, z), (r, g, b) in zip(xyz.tolist(), rgb, strict=True))
    properties = "".join(f"property double {axis}\n" for axis in "xyz")
    properties += "".join(f"property uchar {colour}\n" for colour in ("red", "green", "blue"))
    path.write_text(f"ply\nformat ascii 1.0\nelement vertex {len(xyz)}\n{properties}end_header\n{rows}\n")


def numbers(values) -> str:
    return " ".join(repr(float(value)) for value in np.ravel(values))


def metashape(
    root: Path,
    images: Path | None,
    cameras: Sequence[Known],
    lens: Distortion = NONE,
    *,
    kind: str = "frame",
    extra: str = "",
    placement: tuple[NDArray[np.float64], NDArray[np.float64], float] | None = None,
    placed_by: str = "component",
) -> None:
    """Poses in the chunk's frame, which ``placement`` (rotation, translation, scale) takes to the world."""
    turn, shift, scale = placement or (np.eye(3), np.zeros(3), 1.0)
    first = cameras[0]
    k1, k2, k3, k4 = lens.radial
    rows = []
    for i, camera in enumerate(cameras):
        matrix = np.eye(4)
        matrix[:3, :3] = turn.T @ camera.rotation
        matrix[:3, 3] = turn.T @ (camera.center - shift) / scale
        label = Path(camera.name).stem
        rows.append(
            f'<camera id="{i}" sensor_id="0" component_id="0" label="{label}">'
            f"<transform>{numbers(matrix)}</transform><orientation>1</orientation></camera>"
        )
    rows.append(f'<camera id="{len(cameras)}" sensor_id="0" label="lost"><orientation>1</orientation></camera>')
    transform = (
        f'<transform><rotation locked="true">{numbers(turn)}</rotation>'
        f'<translation locked="true">{numbers(shift)}</translation><scale locked="true">{scale!r}</scale></transform>'
    )
    size = f'<resolution width="{first.width}" height="{first.height}"/>'
    component = transform if placed_by == "component" else ""
    text = f"""<?xml version="1.0" encoding="UTF-8"?>
<document version="2.0.0"><chunk label="Chunk 1" enabled="true">
<sensors next_id="1"><sensor id="0" label="camera" type="{kind}">
{size}<calibration type="{kind}" class="initial">{size}<f>1</f></calibration>
<calibration type="{kind}" class="adjusted">{size}
<f>{first.focal!r}</f><cx>{first.cx - first.width / 2!r}</cx><cy>{first.cy - first.height / 2!r}</cy>
<k1>{k1!r}</k1><k2>{k2!r}</k2><k3>{k3!r}</k3><k4>{k4!r}</k4>
<p1>{lens.tangential[1]!r}</p1><p2>{lens.tangential[0]!r}</p2>{extra}</calibration></sensor></sensors>
<components next_id="1" active_id="0"><component id="0" label="Component 1">{component}</component></components>
<cameras next_id="99" next_group_id="1"><group id="0" label="Group 1" type="folder">{"".join(rows)}</group></cameras>
{transform if placed_by == "chunk" else ""}
</chunk></document>
"""
    root.mkdir(parents=True, exist_ok=True)
    (root / "project.xml").write_text(text)
    copy_images(images, root / "images", cameras, lambda _, name: name)


def realitycapture(
    root: Path, images: Path | None, cameras: Sequence[Known], lens: Distortion = NONE, *, newer: bool = False
) -> None:
    """Angles in degrees: heading clockwise from north, pitch up from looking straight down, roll about the view."""
    head = ["#name", "x", "y", "alt", "heading", "pitch", "roll", "f", "px", "py", "k1", "k2", "k3", "k4", "t1", "t2"]
    if newer:
        head[4], head[7:10] = "yaw", ["f_35mm", "px_norm", "py_norm"]
    root.mkdir(parents=True, exist_ok=True)
    with (root / "registration.csv").open("w", newline="") as file:
        table = csv.writer(file)
        if newer:
            file.write(f"#cameras {len(cameras)}\n")
        table.writerow(head)
        for camera in cameras:
            heading, pitch, roll = Rotation.from_matrix(camera.rotation @ FLIP).as_euler("ZXY", degrees=True)
            side = max(camera.width, camera.height)
            offset = [(camera.cx - camera.width / 2) / side, (camera.cy - camera.height / 2) / side]
            angles = [-heading, pitch, roll]
            tangential = lens.tangential[::-1]
            table.writerow(
                [camera.name, *camera.center, *angles, camera.focal / side * 36, *offset, *lens.radial, *tangential]
            )
    copy_images(images, root / "images", cameras, lambda _, name: name)


def realitycapture_opencv(root: Path, images: Path | None, cameras: Sequence[Known], lens: Distortion = NONE) -> None:
    """x = R X + t, R row by row, and pixels; t2 and t1 are OpenCV's p1 and p2."""
    rotation = [f"R{row}{column}" for row in range(3) for column in range(3)]
    head = ["#name", "tx", "ty", "tz", *rotation, "f_pix", "px_pix", "py_pix", "k1", "k2", "t2", "t1", "k3", "k4"]
    root.mkdir(parents=True, exist_ok=True)
    k1, k2, k3, k4 = lens.radial
    with (root / "opencv.csv").open("w", newline="") as file:
        table = csv.writer(file)
        for remark in ("OpenCV-compliant Internal/External Camera Parameters", "", "R = [Rij] in row major ordering"):
            file.write(f"# {remark}\n" * 2)
        table.writerow(head)
        for camera in cameras:
            shift = -camera.rotation.T @ camera.center
            pixels = [camera.focal, camera.cx, camera.cy]
            distortion = [k1, k2, *lens.tangential, k3, k4]
            table.writerow([camera.name, *shift, *camera.rotation.T.ravel(), *pixels, *distortion])
    copy_images(images, root / "images", cameras, lambda _, name: name)


def realitycapture_xmp(
    root: Path, images: Path | None, cameras: Sequence[Known], lens: Distortion = NONE, *, folder: str = "images"
) -> None:
    """A file beside each image; x = R (X - position), R row by row, as attributes or as elements.

    As the KB article has it: pixel = f x / z * side + side * principal point + size / 2, f = FocalLength35mm / 36.
    """
    (root / folder).mkdir(parents=True, exist_ok=True)
    copy_images(images, root / folder, cameras, lambda _, name: name)
    for i, camera in enumerate(cameras):
        side = max(camera.width, camera.height)
        u, v = (camera.cx - camera.width / 2) / side, (camera.cy - camera.height / 2) / side
        rotation, position = numbers(camera.rotation.T), numbers(camera.center)
        coefficients = numbers([*lens.radial, *lens.tangential[::-1]])
        inside = (
            f"<xcr:Rotation>{rotation}</xcr:Rotation><xcr:Position>{position}</xcr:Position>"
            f"<xcr:DistortionCoeficients>{coefficients}</xcr:DistortionCoeficients>"
        )
        written = f'xcr:Rotation="{rotation}" xcr:Position="{position}" xcr:DistortionCoeficients="{coefficients}"'
        (root / folder / camera.name).with_suffix(".xmp").write_text(
            f"""<x:xmpmeta xmlns:x="adobe:ns:meta/">
  <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
    <rdf:Description xcr:Version="3" xcr:PosePrior="initial" xcr:Coordinates="absolute"
       xcr:DistortionModel="brown4t2" xcr:FocalLength35mm="{camera.focal / side * 36!r}" xcr:Skew="0"
       xcr:AspectRatio="1" xcr:PrincipalPointU="{u!r}" xcr:PrincipalPointV="{v!r}" xcr:CalibrationPrior="initial"
       xmlns:xcr="http://www.capturingreality.com/ns/xcr/1.1#" {written if i % 2 else ""}>
      {"" if i % 2 else inside}
    </rdf:Description>
  </rdf:RDF>
</x:xmpmeta>
"""
        )


def opf(
    root: Path,
    images: Path | None,
    cameras: Sequence[Known],
    lens: Distortion = NONE,
    *,
    internals: dict[str, object] | None = None,
    points: tuple[NDArray[np.float64], NDArray[np.uint8]] | None = None,
    frame: dict[str, object] | None = None,
    seen: Seen | None = None,
    uri: Callable[[str], str] = lambda name: f"photos/{name}",
    list_file: str = "camera-list.json",
) -> None:
    first = cameras[0]
    # Numbers of 64 bits, as hashes of the images are.
    numbered = list(enumerate(cameras, (1 << 63) + 1000))
    (root / list_file).parent.mkdir(parents=True, exist_ok=True)
    resources = {
        "camera_list": ("application/opf-camera-list+json", list_file),
        "input_cameras": ("application/opf-input-cameras+json", "input-cameras.json"),
        "calibration": ("application/opf-calibrated-cameras+json", "calibration/calibrated-cameras.json"),
    }
    items = [
        {"id": name, "type": name, "sources": [], "resources": [{"uri": file, "format": form}]}
        for name, (form, file) in resources.items()
    ]
    (root / "calibration").mkdir(exist_ok=True)
    if points is not None:
        items[-1]["resources"].append({"uri": "calibration/tracks.gltf", "format": "model/gltf+json"})
        _write_gltf(root / "calibration", *points, seen, [i for i, _ in numbered])

    if frame is not None:
        resources["scene_reference_frame"] = ("application/opf-scene-reference-frame+json", "frame.json")
        items.append({"id": "f", "type": "scene_reference_frame", "sources": [], "resources": []})
        items[-1]["resources"].append({"uri": "frame.json", "format": resources["scene_reference_frame"][0]})

    def put(name: str, **content) -> None:
        form, file = resources[name]
        (root / file).write_text(json.dumps({"format": form, "version": "1.0", **content}))

    sensor = (1 << 62) + 5
    listed = [{"id": i, "uri": uri(camera.name)} for i, camera in numbered]
    put("camera_list", cameras=[*listed, {"id": 7, "uri": "photos/lost.jpg"}, {"id": 8, "uri": "depth.tiff"}])
    captures = [{"cameras": [{"id": i, "sensor_id": sensor}]} for i in [*(i for i, _ in numbered), 7]]
    put("input_cameras", sensors=[{"id": sensor, "image_size_px": [first.width, first.height]}], captures=captures)
    internals = internals or {
        "type": "perspective",
        "principal_point_px": [first.cx, first.cy],
        "focal_length_px": first.focal,
        "radial_distortion": list(lens.radial[:3]),
        "tangential_distortion": list(lens.tangential),
    }
    calibrated = [
        {
            "id": i,
            "sensor_id": sensor,
            "position": camera.center.tolist(),
            "orientation_deg": Rotation.from_matrix(camera.rotation @ FLIP).as_euler("XYZ", degrees=True).tolist(),
        }
        for i, camera in numbered
    ]
    put("calibration", sensors=[{"id": sensor, "internals": internals}], cameras=calibrated)
    if frame is not None:
        put("scene_reference_frame", **frame)
    project = {"format": "application/opf-project+json", "version": "1.0", "items": items}
    (root / "project.opf").write_text(json.dumps(project))
    copy_images(images, root / "photos", cameras, lambda _, name: name)


def _write_gltf(
    folder: Path, xyz: NDArray[np.float64], rgb: NDArray[np.uint8], seen: Seen | None, uids: Sequence[int]
) -> None:
    """Two clouds, each about a middle of its own, as the format does to keep single precision.

    Matches of a point are a range of those of its cloud, in 40 bits and 24: three of no point come first, and one of a
    camera that is not calibrated ends each range.
    """
    nodes, meshes, accessors, views, buffers = [], [], [], [], []
    for part in range(2):
        some, colours = xyz[part::2], rgb[part::2]
        middle = some.mean(axis=0)
        rgba = np.concatenate([colours, np.full((len(some), 1), 255, np.uint8)], axis=1)
        files = [
            (f"positions{part}.bin", (some - middle).astype("<f4"), 5126, "VEC3"),
            (f"colors{part}.bin", rgba, 5121, "VEC4"),
        ]
        at = len(accessors)
        extensions = {}
        if seen is not None:
            mine = [[one for one in seen if one[1] == 2 * row + part] for row in range(len(some))]
            lengths = [len(one) + 1 for one in mine]
            ranges = [3 + sum(lengths[:row]) | length << 40 for row, length in enumerate(lengths)]
            flat = [one for row in mine for one in (*row, (len(uids), 0, (1.0, 1.0)))]
            ids = np.array([0, 0, 0, *(camera for camera, _, _ in flat)], "<u4")
            pixels = np.array([(9.0, 9.0)] * 3 + [pixel for _, _, pixel in flat], "<f4")
            files += [
                (f"ids{part}.bin", ids, 5125, "SCALAR"),
                (f"ranges{part}.bin", np.array(ranges, "<u8").view("<u4").reshape(-1, 2), 5125, "VEC2"),
                (f"pixels{part}.bin", pixels, 5126, "VEC2"),
            ]
            matches = {"cameraUids": [*uids, 7], "cameraIds": at + 2, "pointIndexRanges": at + 3}
            matches["imagePoints"] = {"pixelCoordinates": at + 4, "featureIds": at + 4, "scales": at + 2}
            extensions["OPF_mesh_primitive_matches"] = matches
        for name, data, kind, width in files:
            data.tofile(folder / name)
            accessors.append({"bufferView": len(views), "componentType": kind, "count": len(data), "type": width})
            views.append({"buffer": len(buffers), "byteLength": data.nbytes})
            buffers.append({"uri": name, "byteLength": data.nbytes})
        attributes = {"POSITION": at, "COLOR_0": at + 1}
        meshes.append({"primitives": [{"mode": 0, "attributes": attributes, "extensions": extensions}]})
        # As in the example of the specification: points are stored with z up, and glTF's y is up.
        matrix = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])
        matrix[:3, 3] = matrix[:3, :3] @ middle
        nodes.append({"mesh": part, "matrix": matrix.T.ravel().tolist()})
    document = {"asset": {"version": "2.0"}, "nodes": nodes, "meshes": meshes, "accessors": accessors}
    (folder / "tracks.gltf").write_text(json.dumps({**document, "bufferViews": views, "buffers": buffers}))


def polycam(root: Path, images: Path | None, cameras: Sequence[Known], *, corrected: bool = True) -> None:
    prefix = "corrected_" if corrected else ""
    folder = root / "keyframes" / f"{prefix}cameras"
    folder.mkdir(parents=True)
    for i, camera in enumerate(cameras):
        matrix = np.concatenate([camera.rotation @ FLIP, camera.center[:, None]], axis=1)
        facts = {f"t_{row}{column}": float(matrix[row, column]) for row in range(3) for column in range(4)}
        facts |= {"fx": camera.focal, "fy": camera.focal, "cx": camera.cx, "cy": camera.cy}
        facts |= {"width": camera.width, "height": camera.height, "blur_score": 100.0}
        (folder / f"{5000 + i}.json").write_text(json.dumps(facts))
    copy_images(images, root / "keyframes" / f"{prefix}images", cameras, lambda i, _: f"{5000 + i}.jpg")


def record3d(root: Path, images: Path | None, cameras: Sequence[Known], *, own: bool = False) -> None:
    first = cameras[0]
    poses = []
    for camera in cameras:
        quaternion = Rotation.from_matrix(camera.rotation @ FLIP).as_quat()
        poses.append([*quaternion.tolist(), *camera.center.tolist()])
    facts = {
        "w": first.width,
        "h": first.height,
        "fps": 60,
        "K": [first.focal, 0, 0, 0, first.focal, 0, first.cx, first.cy, 1],
        "poses": poses,
    }
    if own:
        facts["K"] = [1, 0, 0, 0, 1, 0, 1, 1, 1]
        facts["perFrameIntrinsicCoeffs"] = [[camera.focal, camera.focal, camera.cx, camera.cy] for camera in cameras]
    root.mkdir(parents=True, exist_ok=True)
    (root / "metadata.json").write_text(json.dumps(facts))
    copy_images(images, root / "rgb", cameras, lambda i, _: f"{i}.jpg")


def opensfm(
    root: Path,
    images: Path | None,
    cameras: Sequence[Known],
    lens: Distortion = NONE,
    *,
    kind: str = "brown",
    extra: dict[str, float] | None = None,
    place: str = "reconstruction.json",
    points: tuple[NDArray[np.float64], NDArray[np.uint8]] | None = None,
    gps: Sequence[NDArray[np.float64]] | None = None,
    reference: dict[str, float] | None = None,
    seen: Seen | None = None,
) -> None:
    """Lengths in units of the longer side, the principal point from the middle. A smaller reconstruction is first.

    extra: coefficients that other programs' lenses have not. gps: metres east, north and up of the reference.
    """
    first = cameras[0]
    side = max(first.width, first.height)
    k1, k2, k3, k4 = lens.radial
    camera = {"projection_type": kind, "width": first.width, "height": first.height, "k1": k1, "k2": k2}
    if kind in ("perspective", "fisheye", "dual"):
        camera["focal"] = first.focal / side
    else:
        camera |= {"focal_x": first.focal / side, "focal_y": first.focal / side}
        camera |= {"c_x": (first.cx - first.width / 2) / side, "c_y": (first.cy - first.height / 2) / side}
        camera |= {"k3": k3, "p1": lens.tangential[0], "p2": lens.tangential[1]}
        camera |= {"k4": k4} if kind.startswith("fisheye") else {}
    camera |= extra or {}
    shots = {
        camera.name: {
            "rotation": Rotation.from_matrix(camera.rotation.T).as_rotvec().tolist(),
            "translation": (-camera.rotation.T @ camera.center).tolist(),
            "camera": "v2 maker model",
            "gps_dop": 999999.0 if gps is None else 5.0,
            "gps_position": [0.0, 0.0, 0.0] if gps is None else gps[number].tolist(),
            "orientation": 1,
        }
        for number, camera in enumerate(cameras)
    }
    xyz, rgb = points or (np.zeros((0, 3)), np.zeros((0, 3), np.uint8))
    rows = {
        str(i): {"color": colour.astype(float).tolist(), "coordinates": position.tolist()}
        for i, (position, colour) in enumerate(zip(xyz, rgb, strict=True))
    }
    lenses = {"v2 maker model": camera}
    stray = {"cameras": lenses, "shots": dict(list(shots.items())[:1]), "points": {}}
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    whole = {"cameras": lenses, "shots": shots, "points": rows}
    whole |= {} if reference is None else {"reference_lla": reference}
    (root / place).write_text(json.dumps([stray, whole]))
    if seen is not None:  # image, track, feature, x, y, scale, R G B, segmentation, instance
        middle = np.array([first.width, first.height]) / 2
        rows = [(cameras[i].name, point, *((pixel - middle) / side).tolist()) for i, point, pixel in seen]
        rows += [("lost.jpg", 0, 0.1, 0.1), (cameras[0].name, 999, 0.0, 0.0)]
        lines = [f"{name}\t{point}\t5\t{x!r}\t{y!r}\t0.01\t0\t0\t0\t1\t1" for name, point, x, y in rows]
        (root / place).with_name("tracks.csv").write_text("\n".join(["OPENSFM_TRACKS_VERSION_v2", *lines, ""]))
    copy_images(images, root / "images", cameras, lambda _, name: name)


_OPENMVG_LENSES = {
    "pinhole": (None, lambda lens: []),
    "pinhole_radial_k1": ("disto_k1", lambda lens: lens.radial[:1]),
    "pinhole_radial_k3": ("disto_k3", lambda lens: lens.radial[:3]),
    "pinhole_brown_t2": ("disto_t2", lambda lens: [*lens.radial[:3], *lens.tangential]),
    "fisheye": ("fisheye", lambda lens: lens.radial),
}


def openmvg(
    root: Path,
    images: Path | None,
    cameras: Sequence[Known],
    lens: Distortion = NONE,
    *,
    kind: str = "pinhole_brown_t2",
    points: tuple[NDArray[np.float64], NDArray[np.uint8]] | None = None,
    seen: Seen | None = None,
) -> None:
    """As cereal writes maps and pointers: a type is named once, by a number that has its highest bit set there.

    OpenMVG's pixels are counted from the centre of the first one, `Known`'s from the corner of the image.
    """
    first = cameras[0]
    key, coefficients = _OPENMVG_LENSES[kind]
    facts = {
        "width": first.width,
        "height": first.height,
        "focal_length": first.focal,
        "principal_point": [first.cx - 0.5, first.cy - 0.5],
    }
    content = {"value0": facts} if kind != "pinhole" else facts
    if key is not None:
        content[key] = list(coefficients(lens))
    new = 1 << 31
    intrinsics = [
        {
            "key": number,
            "value": {
                **({"polymorphic_id": new + 1, "polymorphic_name": kind} if number == 0 else {"polymorphic_id": 1}),
                "ptr_wrapper": {"id": new + 100 + number, "data": content},
            },
        }
        for number in (0, 1)
    ]
    views = [
        {
            "local_path": "",
            "filename": camera.name,
            "width": camera.width,
            "height": camera.height,
            "id_view": number,
            "id_intrinsic": number % 2,
            "id_pose": number,
        }
        for number, camera in enumerate(cameras)
    ]
    lost = {**views[0], "filename": "lost.jpg", "id_view": 99, "id_pose": 99}
    document = {
        "sfm_data_version": "0.3",
        "root_path": "/elsewhere/images",
        "views": [
            {
                "key": view["id_view"],
                "value": {"polymorphic_id": 1 << 30, "ptr_wrapper": {"id": new + 1 + number, "data": view}},
            }
            for number, view in enumerate([*views, lost])
        ],
        "intrinsics": intrinsics,
        "extrinsics": [],
        "structure": [],
        "control_points": [],
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / "sfm_data.json").write_text(json.dumps(document, indent=4))
    document["extrinsics"] = [
        {"key": number, "value": {"rotation": camera.rotation.T.tolist(), "center": camera.center.tolist()}}
        for number, camera in enumerate(cameras)
    ]
    xyz = points[0] if points is not None else np.zeros((0, 3))
    document["structure"] = [
        {
            "key": 10 * number,
            "value": {
                "X": position.tolist(),
                "observations": [
                    {"key": camera, "value": {"id_feat": 5, "x": [value - 0.5 for value in pixel]}}
                    for camera, point, pixel in (*(seen or ()), (99, number, (1.0, 1.0)))
                    if point == number
                ],
            },
        }
        for number, position in enumerate(xyz)
    ]
    (root / "sfm_data_expanded.json").write_text(json.dumps(document, indent=4))
    copy_images(images, root / "images", cameras, lambda _, name: name)
