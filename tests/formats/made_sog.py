"""Writes SOG of version 1 as the first programs for it did: ranges by channel, and a palette of harmonics."""

from __future__ import annotations

import io
import json
import math
import zipfile
from typing import Any

import numpy as np
from PIL import Image

from splatcli.gaussians import Gaussians

PALETTE_ROW = 64


def sog_1(gaussians: Gaussians) -> dict[str, bytes]:
    """The files by name, meta.json first; a square number of Gaussians, which is all that those programs wrote."""
    count, side = len(gaussians), math.isqrt(len(gaussians))
    assert side**2 == count
    members: dict[str, bytes] = {}
    meta: dict[str, Any] = {}
    means = gaussians.means.double().numpy()
    codes, low, high = _quantised(np.sign(means) * np.log(np.abs(means) + 1), 65535)
    members["means_l.webp"] = _image((codes % 256).reshape(side, side, 3))
    members["means_u.webp"] = _image((codes // 256).reshape(side, side, 3))
    meta["means"] = _entry([count, 3], low, high, "means_l.webp", "means_u.webp")
    codes, low, high = _quantised(gaussians.log_scales.double().numpy(), 255)
    members["scales.webp"] = _image(codes.reshape(side, side, 3))
    meta["scales"] = _entry([count, 3], low, high, "scales.webp")
    members["quats.webp"] = _image(_rotations(gaussians.quats.double().numpy()).reshape(side, side, 4))
    meta["quats"] = {
        "shape": [count, 4],
        "dtype": "uint8",
        "encoding": "quaternion_packed",
        "files": ["quats.webp"],
    }
    both = np.column_stack([gaussians.sh0.double().numpy(), gaussians.logit_opacities.double().numpy()])
    codes, low, high = _quantised(both, 255)
    members["sh0.webp"] = _image(codes.reshape(side, side, 4))
    meta["sh0"] = _entry([count, 1, 4], low, high, "sh0.webp")
    if gaussians.sh_degree:
        shN = gaussians.shN.double().numpy()
        rows = -(-count // PALETTE_ROW)  # of a palette with an entry for each Gaussian, in reverse
        low, high = shN.min(), shN.max()
        palette = np.zeros((rows * PALETTE_ROW, *shN.shape[1:]))
        palette[:count] = np.round((shN[::-1] - low) / (high - low) * 255)
        members["shN_centroids.webp"] = _image(palette.reshape(rows, PALETTE_ROW * shN.shape[1], 3))
        labels = np.arange(count)[::-1].reshape(side, side)
        members["shN_labels.webp"] = _image(np.stack([labels % 256, labels // 256, 0 * labels], axis=2))
        meta["shN"] = _entry([count, 3 * shN.shape[1]], low, high, "shN_centroids.webp", "shN_labels.webp")
        meta["shN"]["quantization"] = 8
    return {"meta.json": json.dumps(meta, indent=2).encode(), **members}


def bundled(members: dict[str, bytes]) -> bytes:
    """The files in a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _quantised(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = values.min(axis=0), values.max(axis=0)
    return np.round((values - low) / (high - low) * most).astype(int), low, high


def _entry(shape: list[int], low: np.ndarray, high: np.ndarray, *files: str) -> dict[str, Any]:
    ranges = {"mins": low.tolist(), "maxs": high.tolist()}
    return {"shape": shape, "dtype": "float32", **ranges, "files": list(files)}


def _rotations(quats: np.ndarray) -> np.ndarray:
    """[N, 4]: the other components in order, times sqrt(2), and 252 plus the place of the largest."""
    codes = np.zeros((len(quats), 4), int)
    for row, quat in enumerate(quats / np.linalg.norm(quats, axis=1, keepdims=True)):
        place = int(np.abs(quat).argmax())
        rest = np.delete(quat * np.sign(quat[place]), place) * math.sqrt(2)
        codes[row] = [*np.round((rest + 1) / 2 * 255), 252 + place]
    return codes


def _image(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()
