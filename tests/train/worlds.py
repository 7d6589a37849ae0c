"""Small made-up scenes, engines and run folders, so that the loop can be tested without photos or kernels."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.gaussians import GROUPS, SHN_COUNTS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.step_inputs import StepInputs, SyncEngine
from splatcli.scene.camera import Camera
from splatcli.scene.images import ImageSource, LoadedImage
from splatcli.scene.points import PointCloud
from splatcli.scene.scene import Scene
from splatcli.train.trainer import Trainer


def random_gaussians(n: int, seed: int = 0, *, degree: int = 1, dtype: torch.dtype = torch.float32) -> Gaussians:
    """Gaussians around the origin with scales near 0.1 and opacities near one half."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Gaussians(
        means=0.5 * normal(n, 3),
        quats=normal(n, 4),
        log_scales=0.2 * normal(n, 3) - 2.3,
        logit_opacities=normal(n),
        sh0=normal(n, 3),
        shN=0.1 * normal(n, SHN_COUNTS[degree], 3),
    )


def random_adam(gaussians: Gaussians, seed: int = 1) -> AdamState:
    """Moments that are nowhere zero."""
    generator = torch.Generator().manual_seed(seed)
    adam = AdamState.zeros_like(gaussians)
    for moments in (adam.exp_avg, adam.exp_avg_sq):
        for _, tensor in moments.items():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    adam.step = 7
    return adam


def ring_cameras(count: int, size: int = 16, radius: float = 3.0) -> list[Camera]:
    """Cameras on a circle around the origin, looking at it, y down."""
    cameras = []
    for i in range(count):
        angle = 2.0 * np.pi * i / count
        forward = -np.array([np.sin(angle), 0.0, -np.cos(angle)])
        down = np.array([0.0, 1.0, 0.0])
        rotation = np.stack([np.cross(down, forward), down, forward])
        viewmat = np.eye(4)
        viewmat[:3, :3] = rotation
        viewmat[:3, 3] = -rotation @ (-radius * forward)
        half = size / 2
        cameras.append(Camera(f"view_{i:02d}.png", size, size, 1.2 * size, 1.2 * size, half, half, viewmat))
    return cameras


@dataclass
class MadeImages:
    """An image store over arrays; counts what was loaded."""

    pixels: list[NDArray[np.uint8]]
    loaded: list[int] = field(default_factory=list)

    masked = has_masks = alpha_is_mask = False
    sources: list[ImageSource] = field(default_factory=list, repr=False)
    background = (0, 0, 0)

    def load(self, i: int) -> NDArray[np.uint8]:
        return self.image(i).pixels

    def image(self, i: int) -> LoadedImage:
        self.loaded.append(i)
        return LoadedImage(self.pixels[i])

    def prefetch(self, i: int) -> None:
        """Everything is there already."""

    def limit(self, nbytes: int) -> None:
        """They are never dropped."""

    def max_bytes(self) -> int:
        return sum(array.nbytes for array in self.pixels)

    def has_depth(self, i: int) -> bool:
        return False

    def may_be_transparent(self, i: int) -> bool:
        return False

    def with_alpha(self) -> MadeImages:
        return self

    def has(self, i: int) -> bool:
        return 0 <= i < len(self.pixels)


class MadeScene(Scene):
    """A Scene whose photos exist in memory only."""

    def fingerprint(self) -> dict[str, str | int]:
        return {"images": len(self.cameras)}


def made_scene(
    views: int = 6,
    *,
    size: int = 16,
    points: int = 20,
    pixels: list[NDArray[np.uint8]] | None = None,
    kind: str = "colmap",
) -> Scene:
    """A ring of cameras around random points; every fifth view is held out."""
    random = np.random.default_rng(3)
    if pixels is None:
        pixels = [random.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(views)]
    xyz = random.normal(0.0, 0.4, (points, 3)).astype(np.float32)
    return MadeScene(
        root=Path("/nowhere"),
        kind=kind,  # type: ignore[arg-type]
        cameras=ring_cameras(views, size),
        images=MadeImages(pixels),  # type: ignore[arg-type]
        points=PointCloud(xyz, random.integers(0, 256, (points, 3), dtype=np.uint8)),
        train=[i for i in range(views) if i % 5],
        test=[i for i in range(views) if i % 5 == 0],
        notes=[],
    )


class PlainEngine(SyncEngine):
    """A StepEngine that draws nothing: its gradients are a smooth function of parameters, photo and background.

    Cheap, deterministic, and sensitive to every input of a step, so that a lost piece of state changes the bits.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        target, background, sh_degree, stats = inputs.target, inputs.background, inputs.sh_degree, inputs.stats
        self.calls.append(
            {
                "view": inputs.camera.name,
                "lrs": inputs.lrs,
                "sh_degree": sh_degree,
                "background": background.clone(),
                "regularisation": inputs.regularisation,
                "alpha_lambda": inputs.alpha_lambda,
                "mask_lambda": inputs.mask_lambda,
            }
        )
        push = float(target.float().mean()) / 255.0 - 0.5 + float(background.sum()) + 0.1 * sh_degree
        row = torch.arange(len(gaussians), dtype=torch.float32)
        grads = gaussians.map(lambda t: torch.sin(3.0 * t + row.reshape(-1, *[1] * (t.dim() - 1))) * push)
        adam.apply_reference(gaussians, grads, inputs.lrs)
        if stats is not None:
            stats.grad2d += 1.7e-4 * grads.means[:, 1].abs()
            stats.count += (gaussians.means[:, 0] > -0.3).float()
        view_params = inputs.view_params
        if view_params is not None:
            pose = torch.from_numpy(inputs.camera.viewmat) * push if view_params.pose else None
            view_params.apply_grad(pose, None if view_params.colours is None else view_params.colours.cos() * push)
        return float(sum(getattr(grads, name).abs().sum() for name in GROUPS))


def plain_renderer(gaussians: Gaussians, camera: Camera, *, background: Tensor, antialiased: bool) -> Tensor:
    """One colour that depends on the parameters."""
    color = gaussians.sh0.mean(dim=0).sigmoid() + 0.0 * background
    return color.expand(camera.height, camera.width, 3).clone()


class MemoryRun:
    """A run folder that keeps everything in memory, as deep copies."""

    def __init__(self) -> None:
        self.path = Path("run")
        self.saved: dict[int, Checkpoint] = {}
        self.metrics: list[dict[str, object]] = []
        self.configs: list[Config] = []
        self.reports: dict[str, dict[str, Any]] = {}
        self.rewound: list[int] = []

    def save(self, checkpoint: Checkpoint) -> Path:
        self.saved[checkpoint.step] = copied(checkpoint)
        return Path(f"ckpt_{checkpoint.step:06d}.pt")

    def has(self, step: int) -> bool:
        return step in self.saved

    def newest_path(self) -> Path | None:
        return Path(f"ckpt_{max(self.saved):06d}.pt") if self.saved else None

    def newest(self) -> Checkpoint | None:
        return copied(self.saved[max(self.saved)]) if self.saved else None

    def probe_room(self, checkpoint: Checkpoint) -> None:
        return None

    def room_for(self, checkpoint: Checkpoint, count: int) -> int:
        return 1_000_000

    def rewind(self, step: int) -> None:
        self.rewound.append(step)

    def write_config(self, config: Config) -> None:
        self.configs.append(config)

    def write_report(self, name: str, record: dict[str, Any]) -> Path:
        json.dumps(record, allow_nan=False)
        self.reports[name] = record
        return self.path / name

    def append_metrics(self, record: dict[str, object], *, again: bool = False) -> None:
        same = [one for one in self.metrics if all(one[key] == record[key] for key in ("event", "step"))]
        for one in same if again else ():
            self.metrics.remove(one)
        self.metrics.append(record)


def copied(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint that shares no tensor with ``checkpoint``."""
    assert checkpoint.moments is not None
    return Checkpoint(
        step=checkpoint.step,
        gaussians=checkpoint.gaussians.detach_clone(),
        moments={name: (a.clone(), b.clone()) for name, (a, b) in checkpoint.moments.items()},
        adam_step=checkpoint.adam_step,
        sh_last_step=None if checkpoint.sh_last_step is None else checkpoint.sh_last_step.clone(),
        active_sh_degree=checkpoint.active_sh_degree,
        strategy={k: v.clone() if isinstance(v, Tensor) else v for k, v in checkpoint.strategy.items()},
        rng={k: v.clone() for k, v in checkpoint.rng.items()},
        sampler=dict(checkpoint.sampler),
        config=checkpoint.config,
        cameras=list(checkpoint.cameras),
        train=list(checkpoint.train),
        test=list(checkpoint.test),
        dataset=checkpoint.dataset,
        views={k: v.clone() for k, v in checkpoint.views.items()},
        columns=checkpoint.columns.map(Tensor.clone),
        loss=checkpoint.loss,
    )


def short_config(iterations: int = 40, **sections: dict[str, object]) -> Config:
    """A run in which everything happens within 40 steps: refines at 10, 15, ... 35, resets at 12 and 24."""
    values: dict[str, dict[str, object]] = {
        "model": {"sh_degree": 2},
        "optim": {"means_size_power": 0.5},
        "schedule": {
            "refine_start": 6,
            "refine_stop": 37,
            "refine_every": 5,
            "reset_every": 12,
            "prune_huge_start": 12,
            "sh_degree_interval": 9,
            "lr_steps": iterations,
        },
        "strategy": {"grow_grad2d": 2e-4, "grow_scale3d": 0.06, "prune_scale3d": 0.1},
        "train": {"iterations": iterations, "background": "random", "dropout": 0.0},
        "save": {"steps": ()},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return Config.model_validate(values)


def start_plain(config: Config, run: Any, engine: PlainEngine | None = None, **more: Any) -> Trainer:
    """A trainer on a made scene with a plain engine and renderer; the clock stands still unless ``more`` has one."""
    more = {"clock": lambda: 0.0, **more}
    engine = engine or PlainEngine()
    return Trainer.start(config, made_scene(), run_dir=run, engine=engine, renderer=plain_renderer, **more)


def resume_plain(checkpoint: Checkpoint, run: Any, **more: Any) -> Trainer:
    """The trainer of a checkpoint of start_plain()'s."""
    world = {"engine": PlainEngine(), "renderer": plain_renderer, "clock": lambda: 0.0, **more}
    return Trainer.resume(checkpoint, made_scene(), run_dir=run, **world)
