"""StepEngine: one training step on one view, without autograd; the fused native one, and how an engine is chosen."""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.build import NoCompilerError
from splatcli.native.call import Backend
from splatcli.raster.adam import AdamState
from splatcli.raster.frame import Arena, Frame, view_of
from splatcli.raster.reference_engine import ReferenceEngine
from splatcli.raster.stats import GrowthStats
from splatcli.scene.camera import Camera

_log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """What the trainer drives."""

    def step(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        camera: Camera,
        target: Tensor,
        *,
        lrs: dict[str, float],
        sh_degree: int,
        background: Tensor,
        ssim_lambda: float,
        antialiased: bool,
        stats: GrowthStats | None,
    ) -> float:
        """One view's loss, after its gradient has moved ``gaussians`` and ``adam`` in place; adds to ``stats``.

        target: [H, W, 3] uint8. background: [3]. lrs: learning rate of each group, by its name in GROUPS.
        """
        ...


class NativeEngine:
    """Project, blend, loss, backward and Adam in native code, the gradients never leaving the cache.

    Memory beyond the parameters and moments: see raster/frame.py. Nothing is allocated once the largest view was seen.
    """

    def __init__(self, backend: Backend, *, budget: int | None = None) -> None:
        self._backend = backend
        self.frame = Frame(backend, budget=budget)
        self._arena = Arena()

    def step(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        camera: Camera,
        target: Tensor,
        *,
        lrs: dict[str, float],
        sh_degree: int,
        background: Tensor,
        ssim_lambda: float,
        antialiased: bool,
        stats: GrowthStats | None,
    ) -> float:
        frame = self.frame
        view = view_of(camera, sh_degree=sh_degree, antialiased=antialiased, with_depth=False)
        arrays = frame.project(view, gaussians)
        frame.bin(view, arrays)
        image, v_image, alpha = self._images(camera)
        frame.blend(view, background, image, alpha, None)
        loss = self.loss(image, target, v_image, ssim_lambda)
        frame.blend_vjp(
            view, background, frame.images(view, image, alpha, None), frame.images(view, v_image, None, None)
        )
        frame.project_vjp(
            view,
            arrays,
            adam=self._next_update(adam, lrs),
            grad2d=None if stats is None else stats.grad2d,
            count=None if stats is None else stats.count,
        )
        adam.step += 1
        return loss

    def loss(self, image: Tensor, target: Tensor, v_image: Tensor | None, ssim_lambda: float) -> float:
        """(1 - lambda) L1 + lambda (1 - SSIM) of image [H, W, 3] against target, uint8 or of the image's dtype.

        v_image: [H, W, 3], filled with the gradient, or None.
        """
        height, width, _ = image.shape
        is_u8 = target.dtype == torch.uint8
        pointer = self._backend.pointer
        job = abi.Loss(
            width=width,
            height=height,
            target_is_u8=is_u8,
            ssim_lambda=ssim_lambda,
            image=pointer(image, height, width, 3),
            target=pointer(target, height, width, 3, dtype=torch.uint8 if is_u8 else None),
            v_image=None if v_image is None else pointer(v_image, height, width, 3),
        )
        size = self._backend.call("loss_bytes", job)
        job.workspace = self._arena.take("loss", size, torch.uint8).data_ptr()
        self._backend.call("loss", job)
        return float((1.0 - ssim_lambda) * job.l1 + ssim_lambda * (1.0 - job.ssim))

    def _images(self, camera: Camera) -> tuple[Tensor, Tensor, Tensor]:
        """Image, its gradient, and alpha, in memory that the next step uses again."""
        h, w = camera.height, camera.width
        dtype = self._backend.dtype
        image = self._arena.take("image", h * w * 3, dtype)[: h * w * 3].view(h, w, 3)
        v_image = self._arena.take("v_image", h * w * 3, dtype)[: h * w * 3].view(h, w, 3)
        alpha = self._arena.take("alpha", h * w, dtype)[: h * w].view(h, w)
        return image, v_image, alpha

    def _next_update(self, adam: AdamState, lrs: dict[str, float]) -> abi.Adam:
        return abi.Adam(
            step=adam.step + 1,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            lr=(ctypes.c_double * 6)(*(lrs[name] for name in GROUPS)),
            exp_avg=self._backend.arrays(adam.exp_avg),
            exp_avg_sq=self._backend.arrays(adam.exp_avg_sq),
        )


def engine_for(device: str = "cpu") -> StepEngine:
    """The engine of a device: native, or plain torch with a warning where no compiler is.

    Raises ResourceError for a device that this version has no kernels for, and when building them fails.
    """
    if torch.device(device).type != "cpu":
        raise ResourceError(f"there is no engine for {device} in this version", remedy="use --device cpu")
    try:
        return NativeEngine(Backend.cpu())
    except NoCompilerError as error:
        _log.warning("%s\nTraining in plain torch instead: right, but hundreds of times slower.", error)
        return ReferenceEngine()
