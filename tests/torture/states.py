"""A small run's state, as a trainer leaves it: what harnesses save, kill, spoil and compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from splatcli.checkpoint.state import Checkpoint, DatasetInfo
from splatcli.config import Config
from splatcli.scene.camera import Camera
from splatcli.train.state import TRAINING_STREAMS, stream_generator
from tests.rasterizer.scenes import normal_gaussians


def small_checkpoint(count: int, degree: int = 1, *, step: int = 300, seed: int = 0, **config: Any) -> Checkpoint:
    """``count`` Gaussians, their moments and statistics, three cameras; can be saved, loaded and resumed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gaussians = normal_gaussians(count, degree, generator)
    return Checkpoint(
        step=step,
        gaussians=gaussians,
        moments={name: (normal(*t.shape), normal(*t.shape).square()) for name, t in gaussians.items()},
        adam_step=step,
        sh_last_step=torch.randint(step + 1, (count,), generator=generator, dtype=torch.int32),
        active_sh_degree=degree,
        strategy={"grad2d": normal(count).square(), "count": normal(count).square()},
        rng={name: stream_generator(seed, name).get_state() for name in TRAINING_STREAMS},
        sampler={"epoch": 2, "position": 1},
        config=Config.model_validate(config),
        cameras=[Camera(f"view {i}.jpg", 64, 48, 50.0 + i, 50.5, 32.0, 24.0, np.eye(4)) for i in range(3)],
        train=[1, 2],
        test=[0],
        dataset=DatasetInfo(root="/data/scene", kind="colmap", extent=1.1, fingerprint={"images": 3}),
    )
