"""Accuracy of `splat edit --align-to` without cameras, on two trainings of one scene.

    splat train SCENE -n 3000 -r 4 --max-gaussians 20000 --seed 42 -o runs/SCENE-42     # and once more with --seed 7
    PYTHONPATH=. python benchmarks/align.py runs/fox-42 runs/fox-7 runs/building-42 runs/building-7 ... --out FILE

Runs of one scene are in one frame, by their cameras. One of them is turned, scaled by 3 and moved, both are cut as
PARTS says, and the alignment of their Gaussians is compared with the way back. Runs of different scenes follow, each
with the next; these should be refused. offset: of the median Gaussian, as a share of the median distance from the
middle. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation

import splatcli
from benchmarks.origin import origin
from splatcli.edit.align import AlignmentError, align
from splatcli.edit.simplify import simplify
from splatcli.edit.transform import Similarity, move_gaussians
from splatcli.gaussians import Gaussians

MOVE = Similarity(3.0, shift=np.array([5.0, -2.0, 7.0])).after(Similarity.euler([70, -110, 35]))
BACK = Similarity(1 / 3, MOVE.rotation.T, -MOVE.rotation.T @ MOVE.shift / 3)

Cut = Callable[[Gaussians], Gaussians]


def whole(gaussians: Gaussians) -> Gaussians:
    return gaussians


def below(share: float) -> Cut:
    """Return the cut that keeps a share of the Gaussians, those of small x; a negative one those of large x."""

    def cut(gaussians: Gaussians) -> Gaussians:
        x = gaussians.means[:, 0] * math.copysign(1.0, share)
        return gaussians.map(lambda tensor: tensor[x <= x.quantile(abs(share))])

    return cut


def middle(gaussians: Gaussians) -> Gaussians:
    """Keep the half that is nearest to the median."""
    away = (gaussians.means - gaussians.means.median(dim=0).values).norm(dim=1)
    return gaussians.map(lambda tensor: tensor[away <= away.median()])


PARTS: dict[str, tuple[Cut, Cut]] = {
    "both whole": (whole, whole),
    "each without 15 % at opposite ends of x": (below(0.85), below(-0.85)),
    "each without 30 %": (below(0.7), below(-0.7)),
    "the middle half of one": (middle, whole),
    "one simplified to a quarter": (lambda gaussians: simplify(gaussians, len(gaussians) // 4, []), whole),
}


def measure(one: Gaussians, other: Gaussians) -> dict[str, object]:
    moved = move_gaussians(one, MOVE)
    start = time.process_time()
    try:
        found = align(moved, other)
    except AlignmentError as reason:
        return {"refused": str(reason), "seconds": round(time.process_time() - start, 1)}
    seconds = time.process_time() - start
    after = move_gaussians(moved, found.similarity).means
    spread = (one.means - one.means.median(dim=0).values).norm(dim=1).median()
    return {
        "degrees": round(math.degrees(Rotation.from_matrix(found.similarity.rotation @ MOVE.rotation).magnitude()), 3),
        "scale_off": round(abs(found.similarity.scale / BACK.scale - 1), 5),
        "offset": round(float((after - one.means).norm(dim=1).median() / spread), 5),
        "share": round(found.share, 2),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="two of each scene")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    models = [splatcli.Model.load(path).gaussians for path in given.runs]
    pairs = list(zip(models[::2], models[1::2], strict=True))
    names = [f"{one.name} {other.name}" for one, other in zip(given.runs[::2], given.runs[1::2], strict=True)]
    result = {
        **origin(),
        "parts": {
            part: {name: measure(cut(one), keep(other)) for name, (one, other) in zip(names, pairs, strict=True)}
            for part, (cut, keep) in PARTS.items()
        },
        "different": [measure(pairs[row][0], pairs[(row + 1) % len(pairs)][1]) for row in range(len(pairs))],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
