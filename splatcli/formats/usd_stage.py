"""The process that opens a USD stage: ``python -m splatcli.formats.usd_stage STAGE OUT SIZE``; arrays in OUT, as .npz.

It is a process of its own because the library that reads USD makes no promise about damaged files: whatever happens
to it there, the parent can report it. It also loads no torch, whose address space would not fit the memory limit. At
the end it writes one line of JSON with the facts, or with the fault.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: What a stage may take: so many bytes and seconds, and so much more for each byte of the file.
_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 40
_SECONDS, _SECONDS_PER_BYTE = 60, 1e-6

#: Ours -> the schema's attribute, and how many numbers a row of it has; twins of halves end in "h".
_TABLES = {
    "means": ("positions", 3),
    "quats": ("orientations", 4),
    "scales": ("scales", 3),
    "opacities": ("opacities", 1),
    "harmonics": ("radiance:sphericalHarmonicsCoefficients", 3),
}
_DEGREE = "radiance:sphericalHarmonicsDegree"
#: Where the name of the colour space is, of a prim or of one above it.
_COLOUR_SPACE = "colorSpace:name"
#: What marks the volumes that NVIDIA's programs stored Gaussians in before USD had a schema for them.
_NUREC, _NUREC_FIELD = "omni:nurec:isNuRecVolume", "OmniNuRecFieldAsset"
_EXPORT = "export the Gaussians alone, as ParticleField3DGaussianSplat or as a PLY"
_TRANSCODE = f"{_EXPORT}; NVIDIA's 3DGRUT converts such a file (threedgrut.export.scripts.transcode)"


class Refused(Exception):
    """The reason why a stage cannot be read, and what to do; None for a damaged one."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.remedy = remedy


def library() -> Any:
    """Return the package of usd-core, with the modules that are used. Raises ImportError with the fault."""
    try:
        import pxr
        from pxr import Usd, UsdGeom, UsdUtils, UsdVol, Vt  # noqa: F401, they become attributes of the package
    except ImportError:
        raise ImportError("USD is written and read by the package usd-core, which is not installed") from None
    if not hasattr(UsdVol, "ParticleField3DGaussianSplat"):
        raise ImportError("usd-core is installed, but older than 26.3, the first that knows Gaussians")
    return pxr


def read_stage(usd: Any, path: str) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return (facts, arrays) of the only Gaussians of a stage, as they are there. Raises Refused."""
    stage = usd.Usd.Stage.Open(path)
    found = [prim for prim in stage.Traverse() if prim.IsA(usd.UsdVol.ParticleField3DGaussianSplat)]
    if not found and any(_is_nurec(prim) for prim in stage.Traverse()):
        raise Refused("its Gaussians are a NuRec volume, which is not read", _TRANSCODE)
    if len(found) != 1:
        raise Refused(f"{len(found)} sets of Gaussians (ParticleField3DGaussianSplat); one is read", _EXPORT)
    (prim,) = found
    # Where values change with time, the first ones.
    time = usd.Usd.TimeCode.EarliestTime()
    arrays, half = {}, []
    for name, (attribute, width) in _TABLES.items():
        value = prim.GetAttribute(attribute).Get(time)
        if value is None:
            value = prim.GetAttribute(attribute + "h").Get(time)
        if value is None:
            raise Refused(f"{prim.GetPath()} has no {attribute}")
        table = np.array(value)
        if table.dtype.kind != "f" or table.size != len(table) * width:
            raise Refused(f"{attribute} of {prim.GetPath()} has {table.dtype} of {table.shape}; rows of {width} floats")
        half += [name] if table.dtype == np.float16 else []
        with np.errstate(all="ignore"):
            arrays[name] = table.reshape(-1, width).astype(np.float32)
    degree = prim.GetAttribute(_DEGREE).Get(time)
    matrix = usd.UsdGeom.XformCache(time).GetLocalToWorldTransform(prim)
    facts = {
        "degree": degree if isinstance(degree, int) else None,
        "up": str(usd.UsdGeom.GetStageUpAxis(stage)),
        "matrix": [[float(value) for value in row] for row in np.array(matrix).T],
        "half": half,
        "colour_space": _colour_space(prim),
    }
    return facts, arrays


def _is_nurec(prim: Any) -> bool:
    return prim.GetTypeName() == _NUREC_FIELD or bool(prim.GetAttribute(_NUREC).Get())


def _colour_space(prim: Any) -> str | None:
    """Return the name of the colour space of a prim; None where neither it nor a prim above it has one."""
    while prim:
        name = prim.GetAttribute(_COLOUR_SPACE).Get()
        if name:
            return str(name)
        prim = prim.GetParent()
    return None


def _limit(size: int) -> None:
    """Limit memory (where the system can) and time to those of a stage in ``size`` bytes."""
    limits = {resource.RLIMIT_CPU: _SECONDS + int(_SECONDS_PER_BYTE * size)}
    if sys.platform != "darwin":  # whose kernel refuses every limit of memory
        limits[resource.RLIMIT_AS] = _MEMORY + _MEMORY_PER_BYTE * size
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Read the stage and write one line of JSON."""
    path, out, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # What libraries print must not come into the line: it gets stderr.
    line = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    reply: dict[str, Any] = {}
    try:
        usd = library()
    except ImportError as error:
        reply = {"missing": str(error)}
    else:
        _limit(size)
        try:
            facts, arrays = read_stage(usd, path)
            np.savez(out, **arrays)  # type: ignore[arg-type]
            reply = {"facts": facts}
        except Refused as error:
            reply = {"refused": str(error), "remedy": error.remedy}
        except MemoryError:
            reply = {"refused": "it takes more memory than a scene of its size can need"}
        except Exception as error:  # what the library calls an error
            reply = {"refused": f"usd-core cannot read it ({_words(error)})"}
    line.write(json.dumps(reply))
    line.flush()
    os._exit(0)  # without the library's own end, which may not survive a damaged file


def _words(error: Exception) -> str:
    """Return the first line of usd-core's message, without its places in C++."""
    try:
        text = str(error)
    except UnicodeDecodeError:  # it quotes the file
        return "it holds text that is not UTF-8"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return first.rpartition(" : ")[2].strip(" '")[:200]


if __name__ == "__main__":
    main()
