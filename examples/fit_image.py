"""Fit Gaussians to one image by gsplat's calls: python examples/fit_image.py IMAGE OUTPUT.png [STEPS [COUNT [WIDTH]]].

The only change to a program for gsplat is the import.
"""

from __future__ import annotations

import sys

import imageio.v3 as imageio
import torch
from PIL import Image

import splatcli as gsplat
from splatcli.render.images import to_uint8
from splatcli.scene.images import REDUCE


def main(image: str, output: str, steps: str = "500", count: str = "5000", width: str = "256") -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    photo = Image.open(image).convert("RGB")
    w, h = int(width), round(int(width) * photo.height / photo.width)
    pixels = torch.frombuffer(bytearray(photo.resize((w, h), REDUCE).tobytes()), dtype=torch.uint8)
    target = pixels.view(h, w, 3).to(device) / 255.0

    # A camera at z = -w looks at Gaussians in a box of the image's shape around the origin.
    n = int(count)
    viewmat = torch.eye(4, device=device)
    viewmat[2, 3] = float(w)
    K = torch.tensor([[w, 0.0, w / 2], [0.0, w, h / 2], [0.0, 0.0, 1.0]], device=device)
    box = torch.tensor([w, h, 0.1 * w], device=device)
    trained = {
        "means": (torch.rand(n, 3, device=device) - 0.5) * box,
        "quats": torch.randn(n, 4, device=device),
        "scales": torch.full((n, 3), 0.5 * (w * h / n) ** 0.5, device=device).log(),
        "opacities": torch.zeros(n, device=device),
        "colors": torch.zeros(n, 3, device=device),
    }
    rates = {"means": 0.002 * w, "quats": 0.01, "scales": 0.02, "opacities": 0.05, "colors": 0.05}
    optimizer = torch.optim.Adam([{"params": [trained[name].requires_grad_()], "lr": rates[name]} for name in trained])
    rendered = target
    for step in range(int(steps)):
        images, _, _ = gsplat.rasterization(
            trained["means"],
            trained["quats"],
            trained["scales"].exp(),
            trained["opacities"].sigmoid(),
            trained["colors"].sigmoid(),
            viewmat[None],
            K[None],
            w,
            h,
        )
        rendered = images[0]
        loss = (rendered - target).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 0 or step == int(steps) - 1:
            print(f"step {step}: PSNR {-10.0 * float(loss.detach().log10()):.2f} dB")
    imageio.imwrite(output, to_uint8(torch.cat([target, rendered], dim=1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
