"""The table of a bench: mean and spread over seeds, a row a scene and setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from splatcli.bench.measure import Record

#: Column: heading, what it shows, decimals.
_COLUMNS: tuple[tuple[str, Callable[[Record], float], int], ...] = (
    ("PSNR", lambda r: r.psnr, 2),
    ("SSIM", lambda r: r.ssim, 4),
    ("Gaussians", lambda r: r.num_gaussians, 0),
    ("seconds", lambda r: r.seconds, 1),
    ("MB", lambda r: r.peak_mb, 0),
)


def markdown(records: Sequence[Record]) -> list[str]:
    """Lines of a Markdown table: each scene and setting, then each setting over all scenes that have it.

    A figure of several seeds is their mean ± their standard deviation (n - 1); of several scenes, the mean of means.
    """
    scenes = list(dict.fromkeys(r.scene for r in records))
    settings = list(dict.fromkeys(r.setting for r in records))
    heads = ["scene", "setting", "seeds", *(head for head, _, _ in _COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for scene in scenes:
        for setting in settings:
            runs = [r for r in records if (r.scene, r.setting) == (scene, setting)]
            if runs:
                cells = [_spread([of(r) for r in runs], digits) for _, of, digits in _COLUMNS]
                lines.append(_row(scene, setting, str(len(runs)), *cells))
    if len(scenes) > 1:
        for setting in settings:
            groups = [[r for r in records if (r.scene, r.setting) == (scene, setting)] for scene in scenes]
            if all(groups):
                means = [
                    f"{statistics.fmean(statistics.fmean(map(of, runs)) for runs in groups):,.{digits}f}"
                    for _, of, digits in _COLUMNS
                ]
                lines.append(_row("mean", setting, "", *means))
    return lines


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):,.{digits}f}"
