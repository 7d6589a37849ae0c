"""PSNR of held-out views at equal bytes: what splat export --target-size chooses, beside merging alone and degree 0.

    PYTHONPATH=. python benchmarks/target_size.py RUN [RUN ...] [--sizes 300kB,120kB] > target_size.json

RUN is a folder of `splat train`. Files are SOG, SPZ and compressed PLY, read back before they are rendered.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import splatcli
from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.edit.fit_size import Fitted, SizedFile, fit_size
from splatcli.edit.simplify import contributions
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import FORMATS, import_model
from splatcli.formats.selection import select
from splatcli.gaussians import Gaussians
from splatcli.sizes import parse_size

NAMES = ("sog", "spz", "compressed.ply")


def psnr(gaussians: Gaussians, model: splatcli.Model, scene: splatcli.Scene) -> float:
    """The mean over the held-out views, with colours of 8 bits."""
    shown = splatcli.Model(gaussians, settings=model.settings)
    found = []
    for index in scene.test:
        image = shown.render(scene.cameras[index]).image
        wanted = torch.as_tensor(scene.images.image(index).pixels).double() / 255
        error = ((image.double().clamp(0, 1) * 255).round() / 255 - wanted).square().mean()
        found.append(-10 * float(error.log10()))
    return sum(found) / len(found)


def measure(run: Path, sizes: list[str]) -> dict[str, object]:
    """The files of one run."""
    model = splatcli.Model.load(run)
    data = json.loads((run / "config.json").read_text())["data"]
    settings = {key: data[key] for key in ("resolution", "test_every") if data.get(key) is not None}
    scene = splatcli.Scene.open(data["scene"], **settings)
    gaussians = model.gaussians
    whole = psnr(gaussians, model, scene)
    masses = contributions(gaussians, [model.cameras[index] for index in scene.train])
    flat = select(gaussians, sh_degree=0)[0]
    known = {each.name: each for each in FORMATS}
    rows = []

    def described(fitted: Fitted, suffix: str) -> dict[str, object]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"x{suffix}"
            path.write_bytes(fitted.encoded.payload)
            back = to_gaussians(import_model(path), ImportOptions(), path)[0]
        made = fitted.gaussians
        facts = {"bytes": fitted.size, "gaussians": len(made), "sh_degree": made.sh_degree, "entries": fitted.entries}
        return {**facts, "lost_db": round(whole - psnr(back, model, scene), 2)}

    for name in NAMES:
        plain = replace(known[name], write_with_palette=None, coarser=())
        for size in sizes:
            target = int(str(parse_size(size, least=1000)))
            best, simple = (SizedFile(kind, ExportMetadata(), target) for kind in (known[name], plain))
            variants = {
                "chosen": fit_size(gaussians, best, lambda: masses),
                "merged": fit_size(gaussians, simple, lambda: masses, keep_degree=True),
                "degree 0": fit_size(flat, simple, lambda: masses, keep_degree=True),
            }
            found = {variant: described(fitted, known[name].suffix) for variant, fitted in variants.items()}
            rows.append({"format": name, "size": size, **found})
    facts = {"scene": Path(data["scene"]).name, "gaussians": len(gaussians), "psnr": round(whole, 2)}
    return {**facts, "files": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--sizes", default="300kB,120kB")
    arguments = parser.parse_args()
    print(json.dumps([measure(run, arguments.sizes.split(",")) for run in arguments.runs], indent=1))


if __name__ == "__main__":
    main()
