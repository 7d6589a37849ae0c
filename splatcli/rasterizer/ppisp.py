"""PPISP: exposure, vignetting, colour correction and camera response between the image and its loss; and its gradient.

The parameters of a view are 36 numbers, all 0 where nothing changes (Deutsch et al. 2026, docs/math.md 8.6):

    0       exposure of the view, in stops
    1..8    colour correction of the view: the shift of four chromaticities (blue, red, green, white), (r, g) each
    9..23   vignetting of the camera, [3, 5] for R, G, B: the centre (x, y), and the factors of r^2, r^4, r^6
    24..35  response of the camera, [3, 4] for R, G, B: toe, shoulder, gamma and centre of its curve, before activation

The curve of a response is a table with PIECES linear pieces, so that a pixel costs a lookup and not powers. Sums and
products are single operations and the tables' functions those of reproducible.py, so that the bits depend neither on
threads nor on the instruction set.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from splatcli.rasterizer.colour_planes import colour_planes, constant, mapped, row_bands
from splatcli.reproducible import exp, log, sigmoid, softplus, tree_sum

Rows = tuple[tuple[float, ...], ...]

#: Numbers of a view, of a camera, and of those of its response.
VIEW_NUMBERS, CAMERA_NUMBERS, RESPONSE_NUMBERS = 9, 27, 12

#: Linear pieces of a response between black and white.
PIECES = 256

#: Chromaticities (r, g) of blue, red, green and white, where the colour correction shifts them.
CHROMATICITIES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0 / 3.0, 1.0 / 3.0))

#: Toe, shoulder and gamma are LEAST + softplus(number + what makes them 1 at the start); the centre is a sigmoid.
LEAST = (0.3, 0.3, 0.1)
OFFSETS = tuple(math.log(math.expm1(1.0 - least)) for least in LEAST)

#: Pixels that are processed at once, at about BAND_BYTES each; on a CPU they stay in the cache.
AT_A_TIME = {"cpu": 1 << 13, "cuda": 1 << 19}
BAND_BYTES = 400

#: Sums over the pixels, each of three channels: for the response, the matrix of the correction, exposure, vignettes.
_SUMS = 4 + 3 + 1 + 5

#: The sum of a corrected colour below which its brightness stays as it is.
DARK = 1e-6


def ppisp(image: Tensor, params: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with the colours of image after the parameters [36] of its view. Return it."""
    camera = _Camera(image, params)
    for lines in row_bands(image, AT_A_TIME):
        corrected = _Corrected(image, camera, lines)
        out[lines] = _Lookup(corrected.out).value(camera.tables).movedim(0, 2)
    return out


def ppisp_vjp(image: Tensor, params: Tensor, v_out: Tensor, v_image: Tensor, v_params: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_params [36] from the gradient of ppisp()'s result, v_out [H, W, 3]."""
    camera, bands = _Camera(image, params), row_bands(image, AT_A_TIME)
    sums = image.new_empty(_SUMS, len(bands), 3)
    for band, lines in enumerate(bands):
        corrected, v_planes = _Corrected(image, camera, lines), colour_planes(v_out[lines])
        lookup, terms = _Lookup(corrected.out), image.new_empty(_SUMS, 3, *v_planes.shape[1:])
        for number, table in enumerate(camera.slopes.unbind(1)):
            torch.mul(v_planes, lookup.inside(table), out=terms[number])
        v_image[lines] = corrected.vjp(v_planes * lookup.slope(camera.tables), terms[4:]).movedim(0, 2)
        sums[:, band] = tree_sum(terms.flatten(2))
    response, matrix, exposure, vignetting = torch.split(tree_sum(sums.movedim(1, 2)), [4, 3, 1, 5])
    v_params[0] = math.log(2.0) * tree_sum(exposure[0])
    v_params[1:9] = _correction_vjp(camera.params[1:9], matrix)
    vignetting[:2] *= -2.0
    v_params[9:24] = vignetting.T.flatten()
    v_params[24:] = response.T.flatten()


def prior_gradient(params: Tensor, mean: Tensor) -> Tensor:
    """Return [36] the gradient of the prior of a view's parameters, float64; math.md 8.6 gives its terms.

    mean: [9], of the numbers of all views: brightness and tint that all share belong to the model.
    """
    gradient = torch.zeros_like(params)
    gradient[:VIEW_NUMBERS] = mean
    vignetting, into = params[9:24].view(3, 5), gradient[9:24].view(3, 5)
    into[:, :2] = 0.02 * vignetting[:, :2]
    into[:, 2:] = 0.01 * (vignetting[:, 2:] > 0.0)
    into += 0.1 * (vignetting - vignetting.mean(dim=0))
    response = params[24:].view(3, 4)
    gradient[24:] = (0.1 * (response - response.mean(dim=0)) + 0.01 * response).flatten()
    return gradient


def in_unit(camera: Tensor, unit: float) -> Tensor:
    """Return the numbers of a camera [27] for images whose longer side spans 1 / ``unit`` of the former.

    Vignettes are given in units of that side.
    """
    numbers = camera.clone()
    vignetting = numbers[: CAMERA_NUMBERS - RESPONSE_NUMBERS].view(3, 5)
    vignetting[:, :2] *= unit
    vignetting[:, 2:] /= torch.tensor([unit**2, unit**4, unit**6], dtype=numbers.dtype)
    return numbers


class _Camera:
    """The effects of the parameters [36] of a view on images of one size.

    gain: [1]. dx: [3, 1, W], dy: [3, H, 1] from the centres of the vignettes, in units of the image's longer side.
    factors: three of [3, 1, 1]. matrix: [3, 3]. tables, slopes: see _tables().
    """

    def __init__(self, image: Tensor, params: Tensor) -> None:
        self.params = params.to(image)
        self.gain = exp(self.params[:1] * math.log(2.0)).to(image)
        height, width, _ = image.shape
        x, y = (_from_centre(n, max(height, width), image.dtype, image.device) for n in (width, height))
        vignetting = self.params[9:24].view(3, 5, 1, 1)
        self.dx, self.dy = x - vignetting[:, 0], y[:, None] - vignetting[:, 1]
        self.factors = vignetting[:, 2:].unbind(1)
        self.matrix = _correction(self.params[1:9]).to(image)
        self.tables, self.slopes = _tables(self.params)


class _Corrected:
    """Some lines of an image after exposure, vignetting and colour correction, as planes ``out`` [3, h, W]."""

    def __init__(self, image: Tensor, camera: _Camera, lines: slice) -> None:
        self.camera = camera
        self.colours = colour_planes(image[lines])
        self.dx, self.dy = camera.dx, camera.dy[:, lines]
        self.radius = self.dx * self.dx + self.dy * self.dy
        first, second, third = camera.factors
        falloff = 1.0 + self.radius * (first + self.radius * (second + self.radius * third))
        self.falloff = falloff.clamp(0.0, 1.0)
        self.dims = self.falloff == falloff
        self.lit = self.colours * camera.gain * self.falloff
        self.turned = mapped(camera.matrix, self.lit)
        self.sum, self.turned_sum = _total(self.lit), _total(self.turned)
        self.bright = self.turned_sum > DARK
        self.scale = torch.where(self.bright, self.sum / self.turned_sum.masked_fill(~self.bright, 1.0), 1.0)
        self.out = self.turned * self.scale

    def vjp(self, v_out: Tensor, terms: Tensor) -> Tensor:
        """Return [3, h, W] the gradient of the image; fill ``terms`` [9, 3, h, W], whose sums over the pixels are those
        of the matrix (3), of the exposure (1), over log 2, and of the vignettes (5), the first two over -2.
        """
        shared = _total(v_out * self.turned)
        per_sum = torch.where(self.bright, shared / self.turned_sum.masked_fill(~self.bright, 1.0), 0.0)
        v_turned = v_out * self.scale - per_sum * self.scale
        v_lit = mapped(self.camera.matrix.T, v_turned) + per_sum
        torch.mul(v_turned[:, None], self.lit, out=terms[:3])
        v_gained = v_lit * self.camera.gain
        v_falloff = v_gained * self.colours
        torch.mul(v_falloff, self.falloff, out=terms[3])
        v_falloff.mul_(self.dims)
        first, second, third = self.camera.factors
        r2 = self.radius
        v_radius = v_falloff * (first + r2 * (2.0 * second + r2 * (3.0 * third)))
        torch.mul(v_radius, self.dx, out=terms[4])
        torch.mul(v_radius, self.dy, out=terms[5])
        for term in terms[6:]:
            torch.mul(v_falloff, r2, out=term)
            v_falloff = term
        return v_gained.mul_(self.falloff)


class _Lookup:
    """Where colours [3, H, W] lie in tables of PIECES linear pieces; beyond black and white a curve has slope 1."""

    def __init__(self, colours: Tensor) -> None:
        within = colours.clamp(0.0, 1.0)
        self.beyond = colours - within
        place = within * PIECES
        # A NaN has no piece; its value stays NaN.
        self.piece = place.to(torch.int64).clamp_(0, PIECES - 1).flatten(1)
        self.part = place.flatten(1) - self.piece
        self.shape = colours.shape

    def inside(self, table: Tensor) -> Tensor:
        """Return [3, H, W] the values of ``table`` [3, PIECES + 1] at the colours, clamped to 0..1."""
        low = table.gather(1, self.piece)
        return (low + self.part * (table.gather(1, self.piece + 1) - low)).view(self.shape)

    def value(self, table: Tensor) -> Tensor:
        """Return [3, H, W] the curves of ``table`` at the colours."""
        return self.inside(table) + self.beyond

    def slope(self, table: Tensor) -> Tensor:
        """Return [3, H, W] the slopes of the curves at the colours."""
        return torch.where(self.beyond == 0.0, (table.diff(dim=1) * PIECES).gather(1, self.piece).view(self.shape), 1.0)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _from_centre(pixels: int, longer: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [pixels] how far each is from the middle, in units of the longer side; made once, since a copy waits."""
    return ((torch.arange(pixels, dtype=torch.float64) + 0.5 - 0.5 * pixels) / longer).to(device, dtype)


def _tables(params: Tensor) -> tuple[Tensor, Tensor]:
    """Return the responses [3, PIECES + 1] at equal steps from black to white, and their slopes [3, 4, PIECES + 1] by
    the numbers of params[24:]."""
    raw = params[24:].double().view(3, 4)
    offsets = constant(OFFSETS, raw)
    toe, shoulder, gamma = (softplus(raw[:, :3] + offsets) + constant(LEAST, raw)).unbind(1)
    toe, shoulder, gamma, c = (one[:, None] for one in (toe, shoulder, gamma, sigmoid(raw[:, 3])))
    x = torch.arange(PIECES + 1, dtype=torch.float64, device=raw.device) / PIECES
    blend = toe + c * (shoulder - toe)
    a = shoulder * c / blend
    b = 1.0 - a
    a_toe, a_shoulder, a_c = (
        -shoulder * c * (1.0 - c) / blend**2,
        c * toe * (1.0 - c) / blend**2,
        shoulder * toe / blend**2,
    )
    low = x <= c
    u = torch.where(low, x / c, (1.0 - x) / (1.0 - c))
    positive = u > 0.0
    log_u = log(torch.where(positive, u, 1.0))
    power = torch.where(positive, exp(log_u * torch.where(low, toe, shoulder)), 0.0)
    y = torch.where(low, a * power, 1.0 - b * power)
    y_toe = power * torch.where(low, a_toe + a * log_u, a_toe)
    y_shoulder = power * torch.where(low, a_shoulder, a_shoulder - b * log_u)
    y_c = power * torch.where(low, a_c - a * toe / c, a_c - b * shoulder / (1.0 - c))
    positive = y > 0.0
    log_y = log(torch.where(positive, y, 1.0))
    value = torch.where(positive, exp(log_y * gamma), 0.0)
    per_y = torch.where(positive, gamma * value / torch.where(positive, y, 1.0), 0.0)
    steep = sigmoid(raw[:, :3] + offsets)[:, :, None]
    slopes = [
        per_y * y_toe * steep[:, 0],
        per_y * y_shoulder * steep[:, 1],
        value * log_y * steep[:, 2],
        per_y * y_c * (c * (1.0 - c)),
    ]
    return value.to(params), torch.stack(slopes, dim=1).to(params)


class _Homography(NamedTuple):
    """The map of chromaticities: its targets [3, 3] (columns blue, red, green), white [3], and the weights [3]."""

    targets: Tensor
    white: Tensor
    weights: Tensor


#: Columns: blue, red and green as (r, g, 1); its inverse; and (R, G, B) -> (R, G, R + G + B) with its inverse.
_TO_WEIGHTS = ((-1.0, -1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
_TO_RGI = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, 1.0))
_FROM_RGI = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (-1.0, -1.0, 1.0))


def _homography(shifts: Tensor) -> _Homography:
    """Return the map that moves the four chromaticities by ``shifts`` [8], float64."""
    at = shifts.double().view(4, 2)
    at = at + constant(CHROMATICITIES, at)
    columns = torch.cat([at, torch.ones_like(at[:, :1])], dim=1)
    blue, red, green, white = columns
    # Cramer's rule: what the targets count in white; 3 makes each 1 at the start.
    weights = 3.0 * torch.stack([_det(white, red, green), _det(blue, white, green), _det(blue, red, white)])
    return _Homography(columns[:3].T, white, weights)


def _correction(shifts: Tensor) -> Tensor:
    """Return [3, 3], the colour correction of (R, G, B), apart from the brightness, which stays."""
    shape = _homography(shifts)
    left, right = (constant(part, shape.white) for part in (_FROM_RGI, _rows(_TO_WEIGHTS, _TO_RGI)))
    return _product(_product(left, shape.targets * shape.weights), right)


def _correction_vjp(shifts: Tensor, v_matrix: Tensor) -> Tensor:
    """Return [8] the gradient of the shifts from that of _correction()'s matrix [3, 3]."""
    shape = _homography(shifts)
    left, right = (constant(part, shape.white) for part in (_FROM_RGI, _rows(_TO_WEIGHTS, _TO_RGI)))
    v_scaled = _product(_product(left.T, v_matrix.double()), right.T)
    v_blue, v_red, v_green = (v_scaled * shape.weights).T
    of_blue, of_red, of_green = (3.0 * _sum3(v_scaled * shape.targets, 0)).unbind()
    (blue, red, green), white = shape.targets.T, shape.white
    v_white = of_blue * _cross(red, green) + of_red * _cross(green, blue) + of_green * _cross(blue, red)
    v_blue = v_blue + of_red * _cross(white, green) + of_green * _cross(red, white)
    v_red = v_red + of_blue * _cross(green, white) + of_green * _cross(white, blue)
    v_green = v_green + of_blue * _cross(white, red) + of_red * _cross(blue, white)
    return torch.stack([v_blue, v_red, v_green, v_white])[:, :2].flatten().to(shifts)


def _rows(a: Rows, b: Rows) -> Rows:
    """Return the product of two matrices of whole numbers."""
    return tuple(
        tuple(sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)) for row in a
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices [3, 3] in one order of sums on any machine."""
    return _sum3(a[:, :, None] * b[None], 1)


def _sum3(x: Tensor, axis: int) -> Tensor:
    first, second, third = x.unbind(axis)
    return (first + second) + third


def _cross(a: Tensor, b: Tensor) -> Tensor:
    (a0, a1, a2), (b0, b1, b2) = a.unbind(), b.unbind()
    return torch.stack([a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0])


def _det(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return _sum3(a * _cross(b, c), 0)


def _total(planes: Tensor) -> Tensor:
    return (planes[0] + planes[1]) + planes[2]
