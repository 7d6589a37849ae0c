"""Models as other programs store them, with whatever is to be wrong about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import torch
from torch import Tensor, nn

from splatcli.checkpoint.foreign.imported import Columns
from splatcli.gaussians import SHN_COUNTS


def tables_of(count: int = 200, degree: int = 1, seed: int = 0) -> Columns:
    """Raw parameters of Gaussians in a ball of radius 0.3, about as large as the distances between them."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    return Columns(
        means=0.1 * normal(count, 3),
        quats=normal(count, 4) + torch.tensor([1.0, 0, 0, 0]),
        scales=0.4 * normal(count, 3) - 4,
        opacities=2 * normal(count) - 1,
        sh0=normal(count, 3),
        shN=0.1 * normal(count, SHN_COUNTS[degree], 3),
    )


def activated(tables: Columns, *, scales: int = 0, quats: int = 0, opacities: int = 0) -> Columns:
    """The same with each activation applied that many times."""
    changed = tables._asdict()
    for _ in range(scales):
        changed["scales"] = changed["scales"].double().exp().float()
    for _ in range(quats):
        changed["quats"] = nn.functional.normalize(changed["quats"], dim=1)
    for _ in range(opacities):
        changed["opacities"] = changed["opacities"].double().sigmoid().float()
    return Columns(**changed)


def write_inria(tables: Columns, path: Path, edit: Callable[[list[Any]], object] = lambda values: None) -> Path:
    """chkpntN.pth with optimizer state, trained for a step; its sizes and rates come from numpy, as in real files."""
    groups = {
        "xyz": tables.means,
        "f_dc": tables.sh0[:, None],
        "f_rest": tables.shN,
        "opacity": tables.opacities[:, None],
        "scaling": tables.scales,
        "rotation": tables.quats,
    }
    parameters = {name: nn.Parameter(table.clone()) for name, table in groups.items()}
    optimizer = torch.optim.Adam(
        [{"params": [one], "lr": np.float64(0.0), "name": name} for name, one in parameters.items()], eps=1e-15
    )
    sum(one.sum() for one in parameters.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    count = len(tables.means)
    values = [1, *(parameters[name] for name in ("xyz", "f_dc", "f_rest", "scaling", "rotation", "opacity"))]
    values += [torch.zeros(count), torch.zeros(count, 1), torch.zeros(count, 1), optimizer.state_dict(), np.float32(3)]
    edit(values)
    torch.save((tuple(values), 7000), path)
    return path


def write_gsplat(
    tables: Columns, path: Path, edit: Callable[[dict[str, Any]], object] = lambda stored: None, step: int = 6999
) -> Path:
    """ckpt_S_rankR.pt of gsplat's example trainer."""
    named = tables._asdict() | {"sh0": tables.sh0[:, None]}
    splats = nn.ParameterDict({name: nn.Parameter(table.clone()) for name, table in named.items()})
    stored: dict[str, Any] = {"step": step, "splats": splats.state_dict()}
    edit(stored)
    torch.save(stored, path)
    return path


def write_nerfstudio(
    tables: Columns,
    path: Path,
    edit: Callable[[dict[str, Any]], object] = lambda stored: None,
    prefix: str = "_model.gauss_params.",
) -> Path:
    """step-*.ckpt of nerfstudio, with schedulers whose rates come from numpy, as in real files."""
    state = {
        "means": tables.means,
        "scales": tables.scales,
        "quats": tables.quats,
        "features_dc": tables.sh0,
        "features_rest": tables.shN,
        "opacities": tables.opacities[:, None],
    }
    pipeline: dict[str, Any] = {f"{prefix}{name}": table.clone() for name, table in state.items()}
    pipeline["_model.camera_optimizer.pose_adjustment"] = torch.zeros(3, 6)
    schedulers = {"means": {"base_lrs": [1e-4], "_last_lr": [np.float64(1e-5)], "milestones": Counter([7])}}
    stored: dict[str, Any] = {"step": 29999, "pipeline": pipeline, "schedulers": schedulers, "scalers": {}}
    edit(stored)
    torch.save(stored, path)
    return path


def write_ply(tables: Columns, path: Path, edit: Callable[[dict[str, Any]], object] = lambda columns: None) -> Path:
    """point_cloud.ply as the original program writes it: no comment tells the space."""
    count = len(tables.means)
    columns: dict[str, Any] = dict(zip("xyz", tables.means.T.numpy(), strict=True))
    columns |= {name: np.zeros(count, np.float32) for name in ("nx", "ny", "nz")}
    columns |= {f"f_dc_{i}": tables.sh0[:, i].numpy() for i in range(3)}
    rest = tables.shN.transpose(1, 2).reshape(count, int(np.prod(tables.shN.shape[1:])))
    columns |= {f"f_rest_{i}": rest[:, i].numpy() for i in range(rest.shape[1])}
    columns["opacity"] = tables.opacities.numpy()
    columns |= {f"scale_{i}": tables.scales[:, i].numpy() for i in range(3)}
    columns |= {f"rot_{i}": tables.quats[:, i].numpy() for i in range(4)}
    edit(columns)
    rows = np.empty(count, dtype=[(name, np.asarray(values).dtype) for name, values in columns.items()])
    for name, values in columns.items():
        rows[name] = values
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")]).write(str(path))
    return path


#: Format -> (how to write it, the name that its program gives a file).
WRITERS: dict[str, tuple[Callable[..., Path], str]] = {
    "ply": (write_ply, "point_cloud.ply"),
    "inria": (write_inria, "chkpnt7000.pth"),
    "gsplat": (write_gsplat, "ckpt_6999_rank0.pt"),
    "nerfstudio": (write_nerfstudio, "step-000029999.ckpt"),
}


def write(kind: str, tables: Columns, folder: Path) -> Path:
    writer, name = WRITERS[kind]
    return writer(tables, folder / name)
