"""The matrix of activated parameters: which models are taken for raw ones, and which are refused.

``python -m tests.torture.space_matrix`` prints the figures as JSON. A false accept is a model with activated scales or
opacities that passes: there must be none. A false refusal is a raw one that does not: the price, which is published.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.foreign.imported import Columns, ImportedModel, ImportOptions, to_gaussians
from splatcli.config import Config, DataConfig
from splatcli.errors import ModelFileError
from splatcli.formats.registry import import_model
from splatcli.scene.read import read_scene
from splatcli.train.init import gaussians_from_points
from tests.checkpoint.foreign.made import WRITERS, activated, write
from tests.checkpoint.test_space import shells
from tests.torture.harness import Figure, circumstances

DATA = Path(__file__).resolve().parents[2] / "../shared/data"
UNITS = [10.0**power for power in range(-4, 6)]
SUBSETS = [subset for subset in itertools.product((0, 1), repeat=3) if any(subset)]
#: Raw, and each subset of (scales, quats, opacities) activated once and twice.
VARIANTS = [(0, (0, 0, 0)), *itertools.product((1, 2), SUBSETS)]


@dataclass
class Count:
    """How models of one kind fared."""

    raw: int = 0
    false_refusals: int = 0
    activated: int = 0
    false_accepts: int = 0
    #: Raw in all but its quaternions, which are normalised: harmless, to be taken as raw ones are.
    normalised: int = 0
    normalised_refused: int = 0
    refused_by_unit: Counter[str] = field(default_factory=Counter)

    def add(self, subset: tuple[int, int, int], accepted: bool, unit: float) -> None:
        scales, quats, opacities = subset
        if scales or opacities:
            self.activated += 1
            self.false_accepts += accepted
        elif quats:
            self.normalised += 1
            self.normalised_refused += not accepted
        else:
            self.raw += 1
            self.false_refusals += not accepted
            if not accepted:
                self.refused_by_unit[f"{unit:g}"] += 1

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


def accepted(stored: ImportedModel) -> bool:
    """Whether a model passes the gate; nothing but a refusal may stop it."""
    try:
        to_gaussians(stored, ImportOptions(), Path("model"))
    except ModelFileError:
        return False
    return True


def synthetic(quick: bool) -> Iterator[tuple[float, Columns]]:
    """(unit, raw model) over units, flatness, bias of the sizes, and kinds of opacities."""
    shapes = [(1.0, 0.0)] if quick else list(itertools.product((0.0, 1.0, 3.0), (-1.0, 0.0, 1.0)))
    units = UNITS[::2] if quick else UNITS
    for number, (unit, (flatness, bias)) in enumerate(itertools.product(units, shapes)):
        means, logs = shells(unit, flatness, bias, seed=number)
        rng = torch.Generator().manual_seed(number)
        count = len(means)
        # Trained; as the original program starts; as MCMC starts.
        opacities = (
            2 * torch.randn(count, generator=rng) - 1,
            torch.full((count,), math.log(0.1 / 0.9)),
            torch.zeros(count),
        )[number % 3]
        yield (
            unit,
            Columns(
                means=torch.from_numpy(means),
                quats=torch.randn(count, 4, generator=rng),
                scales=torch.from_numpy(logs),
                opacities=opacities,
                sh0=torch.randn(count, 3, generator=rng),
                shN=torch.zeros(count, 0, 3),
            ),
        )


def through_files(quick: bool) -> dict[str, Count]:
    """Synthetic models written as each program writes them, and read back from the file."""
    counts: dict[str, Count] = defaultdict(Count)
    with tempfile.TemporaryDirectory() as folder:
        for unit, tables in synthetic(quick):
            for times, subset in VARIANTS:
                scales, quats, opacities = (times * chosen for chosen in subset)
                changed = activated(tables, scales=scales, quats=quats, opacities=opacities)
                for kind in WRITERS:
                    stored = import_model(write(kind, changed, Path(folder)))
                    counts[kind].add(subset, accepted(stored), unit)
    return dict(counts)


def real_models() -> Iterator[tuple[str, list[float], Columns]]:
    """(name, units to try, raw model) of what lies beside the project; nothing without it."""
    trained = DATA / "import_samples/inria_ply/point_cloud_iter7000_9080.ply"
    if trained.is_file():
        yield "trained by the original program", UNITS, import_model(trained).columns
    edited = DATA / "import_samples/biker/biker.compressed.ply"
    if edited.is_file():
        yield "edited scan, from a compressed PLY", [1e-2, 1.0, 1e2], compressed_tables(edited)
    for name in ("fox", "miku"):
        if (DATA / name).is_dir():
            points = read_scene(DATA / name, DataConfig()).points
            assert points is not None
            xyz = np.unique(points.xyz, axis=0)
            start = gaussians_from_points(xyz, np.full(xyz.shape, 0.4, np.float32), Config())
            yield (
                f"initial, from the points of {name}",
                UNITS,
                Columns(start.means, start.quats, start.log_scales, start.logit_opacities, start.sh0, start.shN),
            )


def compressed_tables(path: Path) -> Columns:
    """The raw parameters of PlayCanvas' compressed PLY without harmonics; enough of the format for this purpose."""
    data = plyfile.PlyData.read(str(path))
    chunks, rows = data["chunk"].data, data["vertex"].data
    of_row = np.arange(len(rows)) // 256

    def unpack(packed: NDArray[np.uint32], low: str, high: str, names: str) -> NDArray[np.float32]:
        """11, 10 and 11 bits between a chunk's bounds."""
        steps = [(packed >> 21) / 2047, (packed >> 11 & 1023) / 1023, (packed & 2047) / 2047]
        bounds = [(chunks[f"{low}{name}"][of_row], chunks[f"{high}{name}"][of_row]) for name in names]
        return np.stack(
            [a + step * (b - a) for step, (a, b) in zip(steps, bounds, strict=True)], axis=1, dtype=np.float32
        )

    alpha = np.clip((rows["packed_color"] & 255) / 255, 1 / 512, 1 - 1 / 512)
    count = len(rows)
    return Columns(
        means=torch.from_numpy(unpack(rows["packed_position"], "min_", "max_", "xyz")),
        quats=torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(count, 1),  # not judged
        scales=torch.from_numpy(unpack(rows["packed_scale"], "min_scale_", "max_scale_", "xyz")),
        opacities=torch.from_numpy(np.log(alpha / (1 - alpha)).astype(np.float32)),
        sh0=torch.zeros(count, 3),
        shN=torch.zeros(count, 0, 3),
    )


def scaled(tables: Columns, unit: float) -> Columns:
    """The same scene measured in another unit of length."""
    scales: Tensor = tables.scales + math.log(unit)
    return tables._replace(means=tables.means * unit, scales=scales)


def in_memory() -> dict[str, Count]:
    """Real models over units of length, through the same gate, without the detour over files."""
    counts: dict[str, Count] = defaultdict(Count)
    for name, units, tables in real_models():
        for unit in units:
            for times, subset in VARIANTS:
                scales, quats, opacities = (times * chosen for chosen in subset)
                changed = activated(scaled(tables, unit), scales=scales, quats=quats, opacities=opacities)
                counts[name].add(subset, accepted(ImportedModel("PLY", changed)), unit)
    return dict(counts)


def figures(quick: bool = False) -> dict[str, Any]:
    """The whole matrix; ``quick`` leaves out most synthetic scenes and all real models."""
    synthetic_counts, real = through_files(quick), {} if quick else in_memory()
    every = [*synthetic_counts.values(), *real.values()]
    return {
        "activated_models": sum(count.activated for count in every),
        "false_accepts": sum(count.false_accepts for count in every),
        "raw_models": sum(count.raw for count in every),
        "false_refusals": sum(count.false_refusals for count in every),
        "normalised_models": sum(count.normalised for count in every),
        "normalised_refused": sum(count.normalised_refused for count in every),
        "units": UNITS,
        "synthetic_by_format": {kind: count.as_dict() for kind, count in synthetic_counts.items()},
        "real": {name: count.as_dict() for name, count in real.items()},
    }


def main() -> int:
    """The command line: the whole matrix on stdout, or as a figure, with the matrix in it, into a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start, run = time.monotonic(), circumstances()
    found = figures(options.quick)
    if options.json is None:
        print(json.dumps(found, indent=2))
    else:
        counts = {name: value for name, value in found.items() if isinstance(value, int)}
        what = "a model with activated scales or opacities comes in: it is refused (the details count false refusals)"
        seconds = round(time.monotonic() - start, 1)
        run["command"] = f"python -m tests.torture.space_matrix{' --quick' if options.quick else ''}"
        figure = Figure(what, found["activated_models"], found["false_accepts"], seconds, counts, run=run)
        text = json.dumps({"space_matrix": {**asdict(figure), "matrix": found}}, indent=2)
        options.json.write_text(text + "\n")
    return 1 if found["false_accepts"] else 0


if __name__ == "__main__":
    sys.exit(main())
