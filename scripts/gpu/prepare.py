"""Prepare what is carried to a machine without a network: wheels and small scenes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from gpu import ROOT
from gpu.report import write_json


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


#: What the machine runs: CPython and the manylinux names that pip knows wheels by.
TARGET = ("3.12", ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"))

#: Wheels by the part that needs them. pydantic-core is of the version that pydantic asks for; of typer the machine may
#: have one that splatcli.cli cannot be imported with.
WHEELS = {
    "check": ("pydantic", "annotated-types", "typing-inspection", "typing-extensions", "plyfile", "pycolmap", "typer"),
    "speed": ("gsplat==1.5.3",),
}

#: MiB of all that travels: it has to stay below 64.
MOST_MIB = 62.0


def prepare(folder: Path) -> int:
    """Fetch wheels, cut scenes, and say what to run."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, names in WHEELS.items():
        shutil.rmtree(folder / part, ignore_errors=True)
        fetch([name if "==" in name else pinned(name) for name in names], folder / part)
    core = required(next((folder / "check").glob("pydantic-[0-9]*.whl")), "pydantic-core")
    fetch([core], folder / "check")
    shutil.rmtree(folder / "scene", ignore_errors=True)
    write_scenes(folder / "scene")
    tree, status = tracked_mib(), 0
    for part in WHEELS:
        carried = [path for path in (folder / part, folder / "scene") if path.is_dir()]
        total = tree + sum(mib(path) for path in carried)
        print(f"\n{part}: {total:.1f} MiB, of which {tree:.1f} are the checkout; take along, in the same places:")
        print("".join(f"    {os.path.relpath(path, ROOT)}  {mib(path):.1f} MiB\n" for path in carried), end="")
        if total > MOST_MIB:
            print(f"gpu_check: for {part} this is more than {MOST_MIB:.0f} MiB", file=sys.stderr)
            status = 1
        print(f"and run there, in the root of the checkout:\n    {call(part, folder)}")
    return status


def call(part: str, carried: Path) -> str:
    """The command line on the machine with the GPU."""
    where = os.path.relpath(carried, ROOT)
    return f'python3 scripts/gpu_check.py --part {part} --carried {where} --out "$OUT"'


def pinned(name: str) -> str:
    """The version that is installed here, and so is tested; any where it is not."""
    version = version_of(name)
    return name if version == "missing" else f"{name}=={version}"


def fetch(requirements: list[str], folder: Path) -> None:
    python, platforms = TARGET
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    done = subprocess.run([*command, "--dest", str(folder), *requirements], check=False)
    if done.returncode != 0:
        raise SystemExit(f"gpu_check: pip could not download {' '.join(requirements)}")


def required(wheel: Path, name: str) -> str:
    """The version of another package that a wheel asks for, as ``name==version``."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        found = re.search(rf"^Requires-Dist: {name}\s*==\s*(\S+)$", archive.read(path).decode(), re.M)
    if found is None:
        raise SystemExit(f"gpu_check: {wheel.name} does not say which {name} it needs")
    return f"{name}=={found[1]}"


def write_scenes(folder: Path) -> None:
    """The sample scene's cameras, and a real scene at half its size where there is one beside the project."""
    write_views(ROOT / "data" / "samples" / "courtyard", folder / "courtyard", copy=False)
    real = ROOT.parent / "shared" / "data" / "fox"
    if real.is_dir():
        halve(real, folder / "fox")
        write_views(folder / "fox", folder / "fox", copy=True)
    else:
        print(f"gpu_check: {real} is not there: training is measured on the sample scene alone", file=sys.stderr)


def halve(scene: Path, folder: Path) -> None:
    """A COLMAP scene of PINHOLE cameras with images and cameras at half the size, as text and without tracks."""
    from PIL import Image

    from splatcli.scene._pycolmap import pycolmap

    reconstruction = pycolmap.Reconstruction(str(scene / "sparse" / "0"))
    model = folder / "sparse" / "0"
    model.mkdir(parents=True)
    (folder / "images").mkdir()
    for camera in reconstruction.cameras.values():
        camera.rescale(camera.width // 2, camera.height // 2)
    lines = []
    for number, image in reconstruction.images.items():
        camera, pose = reconstruction.cameras[image.camera_id], image.cam_from_world()
        x, y, z, w = pose.rotation.quat
        place = " ".join(repr(float(value)) for value in (w, x, y, z, *pose.translation))
        lines += [f"{number} {place} {image.camera_id} {image.name}", ""]
        with Image.open(scene / "images" / image.name) as full_size:
            small = full_size.convert("RGB").resize((camera.width, camera.height), Image.Resampling.LANCZOS)
            small.save(folder / "images" / image.name, quality=92)
    (model / "images.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [
        f"{number} PINHOLE {camera.width} {camera.height} {' '.join(repr(float(p)) for p in camera.params)}"
        for number, camera in reconstruction.cameras.items()
    ]
    (model / "cameras.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = []
    for number, point in reconstruction.points3D.items():
        place = " ".join(f"{value:.6g}" for value in point.xyz)
        track = " ".join(f"{element.image_id} {element.point2D_idx}" for element in point.track.elements)
        lines.append(f"{number} {place} {' '.join(map(str, point.color))} {point.error!r} {track}")
    (model / "points3D.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_views(scene: Path, folder: Path, *, copy: bool) -> None:
    """Write the scene for load_views(). copy: its images too; else they are read from the checkout."""
    import numpy as np

    from splatcli.config import DataConfig
    from splatcli.scene.read import read_scene

    found = read_scene(scene, DataConfig())
    assert found.points is not None, f"{scene} has no points"
    views = [
        {**{name: getattr(camera, name) for name in ("name", "width", "height", "fx", "fy", "cx", "cy")},
         "viewmat": camera.viewmat.tolist()}
        for camera in found.cameras
    ]  # fmt: skip
    images = "" if copy else (scene / "images").relative_to(ROOT).as_posix()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "views.json", {"images": images, "views": views, "train": found.train, "test": found.test})
    rgb = np.asarray(found.points.rgb, dtype=np.float64) / 255
    np.savez(folder / "points.npz", xyz=np.asarray(found.points.xyz, dtype=np.float32), rgb=rgb.astype(np.float32))


def mib(path: Path) -> float:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 2**20


def tracked_mib() -> float:
    """Return the MiB of a checkout without what git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file()) / 2**20


def fits_python(wheel: str) -> bool:
    """Return whether this Python can import what a wheel of this name holds."""
    python, abi, _ = wheel.removesuffix(".whl").split("-")[-3:]
    return "py3" in python.split(".") or abi == "abi3" or f"cp{sys.version_info[0]}{sys.version_info[1]}" in python


def unpack(part: str, carried: Path, site: Path) -> list[str]:
    """Unpack the wheels of a part where Python finds them, before what is installed; return their names.

    Wheels for another version of Python are left out: one would hide a package that is installed and works.
    """
    names = []
    for wheel in sorted((carried / part).glob("*.whl")):
        if not fits_python(wheel.name):
            print(f"left out, for another Python: {wheel.name}", file=sys.stderr)
            continue
        with zipfile.ZipFile(wheel) as archive:  # none of them has scripts or data beside its packages
            archive.extractall(site)
        names.append(wheel.name)
    return names
