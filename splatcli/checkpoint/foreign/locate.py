"""The newest model in the folder of a run of another program."""

from __future__ import annotations

import re
from pathlib import Path

#: Where the programs put what they train: a pattern below the run's folder, and the step in the match.
_PLACES = (
    ("point_cloud/iteration_*/point_cloud.ply", re.compile(r"point_cloud/iteration_(\d+)/")),
    ("chkpnt*.pth", re.compile(r"chkpnt(\d+)\.pth")),
    ("ckpts/ckpt_*_rank*.pt", re.compile(r"ckpts/ckpt_(\d+)_rank\d+\.pt")),
    ("ckpt_*_rank*.pt", re.compile(r"ckpt_(\d+)_rank\d+\.pt")),
    ("nerfstudio_models/step-*.ckpt", re.compile(r"nerfstudio_models/step-(\d+)\.ckpt")),
    ("step-*.ckpt", re.compile(r"step-(\d+)\.ckpt")),
)


def newest_foreign(folder: Path) -> Path | None:
    """The PLY or checkpoint of the highest step below ``folder``, None without any.

    The PLY where both are of that step; of a model in several shards the first.
    """
    found = []
    for order, (pattern, name) in enumerate(_PLACES):
        for path in sorted(folder.glob(pattern)):
            if match := name.match(path.relative_to(folder).as_posix()):
                found.append((int(match[1]), -order, path))
    # Of equals the first wins, which is rank 0.
    return max(found, key=lambda entry: entry[:2])[2] if found else None
