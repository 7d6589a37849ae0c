"""Models of which a part is activated, and raw ones in any unit of length: which are refused.

Real models, and some that are trained here, in units from 1e-6 to 1e7; of each, 1 to 99 % of the rows are activated, in
scales and opacities, in scales alone and in opacities alone, and each axis of the scales alone. A failure is a raw
model that is refused, and one that passes with all of an axis, a tenth of the rows' scales or half of the opacities
activated. The details count what passes below that: a hundredth of the rows, in units in which a scale is about as
large as its own logarithm, changes the distribution by less than models differ.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.foreign.imported import Columns, ImportedModel
from splatcli.formats.registry import import_model
from tests.checkpoint.foreign.made import activated
from tests.torture.harness import Figure, Tally, enough, main
from tests.torture.space_matrix import DATA, accepted, real_models, scaled

UNITS = [*(10.0**power for power in range(-6, 8)), 3.0, 30.0, 300.0]
SHARES = (0.01, 0.05, 0.1, 0.5, 0.9, 0.99)
SCENE = Path(__file__).resolve().parents[2] / "data" / "samples" / "courtyard"
#: Name -> scene and words of a short training; the beginning of each run is a model as well.
RUNS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "courtyard": (SCENE, ("-n", "400")),
    "courtyard, mcmc": (SCENE, ("-n", "400", "--strategy", "mcmc", "--cap-max", "20000")),
    "fox": (DATA / "fox", ("-n", "400")),
    "lego": (DATA / "lego", ("-n", "400")),
    "lego, mcmc": (DATA / "lego", ("-n", "500", "--strategy", "mcmc", "--cap-max", "60000")),
}
#: The least share whose passing is a failure.
CLEAR = {"rows": 0.1, "scales": 0.1, "opacities": 0.5}


def trained(folder: Path, name: str) -> Iterator[tuple[str, Columns]]:
    """A run's model before its first step and after its last."""
    scene, words = RUNS[name]
    run = folder / name.replace(", ", "-")
    command = [sys.executable, "-m", "splatcli", "train", str(scene), "-o", str(run), "-r", "4", "-q", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path in sorted((run / "ckpts").glob("*.pt")):
        found = load_checkpoint(path).gaussians
        colours = (found.sh0, found.shN)
        yield (
            f"{name} {path.stem}",
            Columns(found.means, found.quats, found.log_scales, found.logit_opacities, *colours),
        )


def models(folder: Path) -> Iterator[tuple[str, Columns]]:
    """All that is at hand, raw."""
    for name, _, tables in real_models():
        yield name, tables
    bundle = DATA / "import_samples" / "playbot_sog" / "6_0" / "meta.json"
    if bundle.is_file():
        yield "playbot", import_model(bundle).columns
    for name, (scene, _) in RUNS.items():
        if scene.is_dir():
            yield from trained(folder, name)


def mixed(raw: Columns, rows: torch.Tensor, what: str) -> Columns:
    """The model with ``rows`` activated, bool [N]; what: "rows", "scales" or "opacities"."""
    whole = activated(raw, scales=1, opacities=1)
    scales = torch.where(rows[:, None], whole.scales.clamp_max(3e38), raw.scales)
    opacities = torch.where(rows, whole.opacities, raw.opacities)
    return raw._replace(
        scales=raw.scales if what == "opacities" else scales, opacities=raw.opacities if what == "scales" else opacities
    )


def one_axis(raw: Columns, axis: int) -> Columns:
    scales = raw.scales.clone()
    scales[:, axis] = scales[:, axis].double().exp().float().clamp_max(3e38)
    return raw._replace(scales=scales)


def try_model(name: str, tables: Columns, units: list[float], tally: Tally) -> None:
    """A raw model, and what may be wrong with it, in several units."""

    def count(word: str, unit: float, model: Columns, *, raw: bool = False, clear: bool = True) -> None:
        passed = accepted(ImportedModel("model", model))
        if passed is not raw and clear:
            tally.failures.append((len(tally.failures), f"{name}, unit {unit:g}: {word}"))
        else:
            tally.words[f"{word}, passed" if passed and not raw else word] += 1

    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(len(tables.means), generator=rng)
    for unit in units:
        raw = scaled(tables, unit)
        count("raw", unit, raw, raw=True)
        count("all", unit, raw._replace(scales=activated(raw, scales=1).scales.clamp_max(3e38)))
        for axis in range(3):
            count("axis", unit, one_axis(raw, axis))
        for share in SHARES:
            rows = torch.zeros(len(order), dtype=torch.bool)
            rows[order[: max(1, int(share * len(order)))]] = True
            for what in ("rows", "scales") if unit != 1.0 else ("rows", "scales", "opacities"):
                count(f"{what} {share:.0%}", unit, mixed(raw, rows, what), clear=share >= CLEAR[what])


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: of the units, the first so many."""
    start, tally = time.monotonic(), Tally()
    with tempfile.TemporaryDirectory(prefix="splat-torture-") as folder:
        for name, tables in models(Path(folder)):
            if not enough(start):
                try_model(name, tables, UNITS[:count], tally)
    what = (
        "a raw model in units of 1e-6 to 1e7 comes in: it passes; or one with an axis, a tenth or more of the rows' "
        "scales, or half or more of the opacities activated: it is refused (the details count smaller shares)"
    )
    return {"space_parts": tally.figure(what, time.monotonic() - start)}


if __name__ == "__main__":
    main(figures, len(UNITS))
