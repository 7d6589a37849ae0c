"""A small run's state, and ways to tamper with its file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splatcli.checkpoint.file import save_checkpoint
from splatcli.checkpoint.state import Checkpoint, DatasetInfo
from splatcli.config import Config
from splatcli.gaussians import Gaussians
from splatcli.scene.camera import Camera
from tests.rasterizer.scenes import normal_gaussians


def random_gaussians(count: int, degree: int = 3, seed: int = 0) -> Gaussians:
    return normal_gaussians(count, degree, torch.Generator().manual_seed(seed))


def random_checkpoint(count: int = 20, degree: int = 1, *, step: int = 300, seed: int = 0) -> Checkpoint:
    gaussians = random_gaussians(count, degree, seed)
    rng = torch.Generator().manual_seed(seed + 1)
    viewmat = np.eye(4)
    viewmat[:3, 3] = [0.1 + 0.2, -1e-300, 1e300]
    return Checkpoint(
        step=step,
        gaussians=gaussians,
        moments={
            name: (torch.randn(t.shape, generator=rng), torch.rand(t.shape, generator=rng))
            for name, t in gaussians.items()
        },
        adam_step=step,
        sh_last_step=torch.randint(step + 1, (count,), generator=rng, dtype=torch.int32),
        active_sh_degree=0,
        strategy={
            "grad2d": torch.rand(count, generator=rng),
            "count": torch.arange(count, dtype=torch.int64),
            "refined": 7,
            "ratio": 1.0,
            "tiny": 5e-324,
            "name": "default",
            "on": True,
        },
        rng={"sampler": torch.Generator().manual_seed(3).get_state()},
        sampler={"epoch": 2, "position": 5},
        config=Config(),
        cameras=[
            Camera(f"dir/ä {i}.jpg", 64, 48, 50.1 + i, 50.2, 32.0, 1 / 3, viewmat * (i + 1), 0.01 + i / 7)
            for i in range(3)
        ],
        train=[1, 2],
        test=[0],
        dataset=DatasetInfo(
            root="/data/scene", kind="colmap", extent=1.1 * 3, fingerprint={"images": 3, "sha256": "ab"}
        ),
    )


@pytest.fixture
def gaussians_of() -> Callable[..., Gaussians]:
    return random_gaussians


@pytest.fixture
def checkpoint_of() -> Callable[..., Checkpoint]:
    return random_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A sound checkpoint file."""
    path = tmp_path / "ckpt_000300.pt"
    save_checkpoint(path, random_checkpoint())
    return path


@pytest.fixture
def tamper() -> Callable[..., None]:
    """Load with plain torch, edit, store with plain torch: what a user's own script does.

    sign: also put right every digest, shape and size in the manifest, as a modified tool would.
    """

    def rewrite(
        path: Path,
        edit: Callable[[dict[str, Any]], object] = lambda stored: None,
        *,
        manifest: Callable[[dict[str, Any]], object] = lambda data: None,
        sign: bool = False,
    ) -> None:
        stored = torch.load(path, weights_only=True)
        edit(stored)
        if sign:
            data = json.loads(stored["manifest"])
            for spec in data["tensors"]:
                if (tensor := stored.get(spec["name"])) is not None and tensor.is_contiguous():
                    spec["sha256"] = hashlib.sha256(tensor.reshape(-1).numpy().tobytes()).hexdigest()
                    spec.update(shape=list(tensor.shape), dtype=str(tensor.dtype)[6:], nbytes=tensor.nbytes)
            manifest(data)
            stored["manifest"] = json.dumps(data)
            stored["manifest_sha256"] = hashlib.sha256(stored["manifest"].encode()).hexdigest()
        torch.save(stored, path)

    return rewrite
