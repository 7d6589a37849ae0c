"""The training loss's kernels for any images: fused_ssim() and l1_ssim_loss() for autograd, mean_ssim() for scores.

The forward pass makes the gradients, too, where they are needed: one image is kept instead of three maps.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor

from splatcli.native import abi
from splatcli.native.backend import Backend, address
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer.opaque import graph_break, once_differentiable
from splatcli.rasterizer.reference import image_loss_reference, ssim_map_reference
from splatcli.rasterizer.rendering import backend_for

_log = logging.getLogger(__name__)

#: Pixels at each edge that padding="valid" leaves out: their windows reach beyond the image.
_BORDERS = {"same": 0, "valid": 5}


@graph_break
def fused_ssim(img1: Tensor, img2: Tensor, padding: Literal["same", "valid"] = "same", train: bool = True) -> Tensor:
    """Return the mean structural similarity of two stacks of images [B, C, H, W] in 0..1, a scalar tensor.

    Any B and C; windows of 11 x 11 with sigma 1.5 and zeros outside the images. Both images get gradients.
    padding: "same" counts every pixel; "valid" only those whose windows lie inside, which is all but 5 at each edge.
    train: whether to differentiate; with False the result has no gradient.

    Computed in float32 whatever autocast says, in float64 if img1 is float64 (CPU only); gradients have the dtype of
    their input. Without a compiler plain torch computes, with a warning.
    Raises ValueError for shapes that differ or leave no pixel, TypeError for images that are no floats.
    """
    return 1.0 - _image_loss(img1, img2, 1.0, padding, train=train)


@graph_break
def l1_ssim_loss(
    img1: Tensor, img2: Tensor, ssim_lambda: float = 0.2, padding: Literal["same", "valid"] = "same"
) -> Tensor:
    """Return (1 - lambda) mean |img1 - img2| + lambda (1 - SSIM), the loss of 3D Gaussian Splatting, a scalar tensor.

    img1, img2, padding: as in fused_ssim(); the mean of |img1 - img2| is over all pixels. Raises as fused_ssim() does,
    and ValueError for a lambda outside 0..1.
    """
    if not 0.0 <= ssim_lambda <= 1.0:
        raise ValueError(f"ssim_lambda is {ssim_lambda}, not in 0 to 1")
    return _image_loss(img1, img2, ssim_lambda, padding, train=True)


@torch.no_grad()
def mean_ssim(x: Tensor, y: Tensor, masked: Tensor | None) -> float:
    """Return the mean structural similarity of two images [H, W, 3] in 0..1 of one float dtype, with zero padding.

    masked: [H, W] bool, pixels that are left out of the mean, as they are in both images; NaN when all are.
    Sums over pixels are in float64. Without a compiler, and with ``masked`` on a GPU, plain torch computes.
    """
    try:
        backend = backend_for(x.device, x.dtype)
    except NoCompilerError:
        backend = None
    if backend is None or (masked is not None and backend.deferred):
        values = ssim_map_reference(x, y)
        return float((values if masked is None else values[:, ~masked]).mean())
    _, ssim = _means(backend, x.contiguous()[None], y.contiguous()[None], None, 1.0, 0, masked)
    return float(ssim)


def _image_loss(
    img1: Tensor, img2: Tensor, ssim_lambda: float, padding: str, *, train: bool, backend: Backend | None = None
) -> Tensor:
    if padding not in _BORDERS:
        raise ValueError(f"there is no padding {padding!r}; use 'same' or 'valid'")
    border = _BORDERS[padding]
    for name, image in (("img1", img1), ("img2", img2)):
        if not isinstance(image, Tensor):
            raise TypeError(f"{name} is a {type(image).__name__}, not a torch.Tensor")
        if not image.is_floating_point():
            raise TypeError(f"{name} is {image.dtype}, not a float; divide bytes by 255")
    if img1.dim() != 4 or img1.shape != img2.shape:
        raise ValueError(f"img1 has shape {tuple(img1.shape)}, img2 {tuple(img2.shape)}, not one [B, C, H, W]")
    if img1.device != img2.device:
        raise ValueError(f"img1 is on {img1.device}, img2 on {img2.device}")
    if img1.numel() == 0 or min(img1.shape[2:]) <= 2 * border:
        least = 2 * border + 1
        raise ValueError(f"no pixel of {tuple(img1.shape)} counts; padding={padding!r} needs {least}x{least} or more")
    train = train and torch.is_grad_enabled()
    dtype = torch.float64 if img1.dtype == torch.float64 else torch.float32
    try:
        backend = backend or backend_for(img1.device, dtype)
    except NoCompilerError as error:
        _log.warning("%s\nThe loss is computed in plain torch instead: right, but slower.", error)
        with torch.autocast(img1.device.type, enabled=False), torch.set_grad_enabled(train):
            return image_loss_reference(img1.to(dtype), img2.to(dtype), ssim_lambda, border)
    if not train:
        img1, img2 = img1.detach(), img2.detach()
    # torch leaves Function.apply without types.
    result: Tensor = _ImageLoss.apply(  # type: ignore[no-untyped-call]
        backend, ssim_lambda, border, img1.to(dtype), img2.to(dtype)
    )
    return result


class _ImageLoss(torch.autograd.Function):
    """A scalar whose gradients the forward pass has computed."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, ssim_lambda: float, border: int, img1: Tensor, img2: Tensor) -> Tensor:
        x, y = img1.contiguous(), img2.contiguous()
        needs = ctx.needs_input_grad[3:]
        v_x, v_y = (torch.empty_like(x) if needed else None for needed in needs)
        value = _run(backend, x, y, v_x, ssim_lambda, border)
        if v_y is not None:
            # Both terms are symmetric, so the gradient of the second image is that of the first with the two swapped.
            _run(backend, y, x, v_y, ssim_lambda, border)
        ctx.save_for_backward(v_x, v_y)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(None if v is None else v * grad for v in ctx.saved_tensors)


def _run(backend: Backend, x: Tensor, y: Tensor, v_x: Tensor | None, ssim_lambda: float, border: int) -> Tensor:
    """Return the loss of planes [B, C, H, W], a scalar of their dtype; fill v_x, its gradient in x."""
    planes, of_planes = (t.flatten(0, 1).unsqueeze(3) for t in (x, y))
    v_planes = None if v_x is None else v_x.flatten(0, 1).unsqueeze(3)
    l1, ssim = _means(backend, planes, of_planes, v_planes, ssim_lambda, border)
    return ((1.0 - ssim_lambda) * l1 + ssim_lambda * (1.0 - ssim)).to(x.dtype)


def _means(
    backend: Backend,
    x: Tensor,
    y: Tensor,
    v_x: Tensor | None,
    ssim_lambda: float,
    border: int,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean L1 and SSIM of images [B, H, W, 1 or 3], float64 scalars; fill v_x, the loss's gradient in x.

    masked: [H, W] bool, of a single image on the CPU, pixels that are left out of the mean SSIM.
    """
    images, height, width, channels = x.shape
    means = torch.empty(2, dtype=torch.float64, device=x.device)
    job = abi.Loss(
        width=width,
        height=height,
        channels=channels,
        images=images,
        border=border,
        ssim_lambda=ssim_lambda,
        image=backend.pointer(x, *x.shape),
        target=backend.pointer(y, *x.shape),
        v_image=None if v_x is None else backend.pointer(v_x, *x.shape),
        means=backend.pointer(means, 2, dtype=torch.float64),
    )
    if masked is not None:
        mask = masked.contiguous()
        job.mask = backend.pointer(mask, height, width, dtype=torch.bool)
    workspace = torch.empty(backend.call("loss_bytes", job), dtype=torch.uint8, device=x.device)
    job.workspace = address(workspace)
    backend.call("loss", job)
    if not backend.deferred:
        means = means.new_tensor([job.l1, job.ssim])
    l1, ssim = means.unbind()
    return l1, ssim
