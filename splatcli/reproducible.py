"""Elementary functions, normal samples and sums whose bits depend only on their arguments.

torch's exp, log, sigmoid, softplus and pow take a vectorised path for most of a tensor and the scalar library for its
end. The two differ in the last bit, and where the end of a chunk lies depends on the number of threads; the vectorised
path depends on the instruction set, and so does the order of torch's sums. Everything that changes the state of a run
outside the kernels therefore uses the functions below. They are made of single additions, subtractions,
multiplications and divisions in float64 and of sqrt(), all of which IEEE 754 rounds in one way, so a run has the same
bits with any number of threads and on any instruction set. Relative errors are a few units in the last place of
float64; NaN stays NaN.

The rasterizer's own activations are in cuda/math/activation.h. Rendering and export, which change no state, use torch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

#: log(2) in two parts: the first has 32 bits, so that its product with an exponent is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10

#: 2^x is normal from -1022 to 1023.
_LEAST_POWER, _MOST_POWER = -1022, 1023

#: Coefficients of the series; the arguments are reduced so far that the next term is below 2^-53.
_EXPM1 = [1.0 / math.factorial(k) for k in range(14, 0, -1)]
_ATANH = [1.0 / (2 * k + 1) for k in range(11, 0, -1)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]


def exp(x: Tensor) -> Tensor:
    """Return e^x in float64; 0 below -708, infinity above 709."""
    part, power = _expm1_reduced(x.double())
    return _saturated(x, (part + 1.0) * power, below=0.0)


def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1 in float64, without cancellation near 0; -1 below -708, infinity above 709."""
    part, power = _expm1_reduced(x.double())
    return _saturated(x, part * power + (power - 1.0), below=-1.0)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm in float64: -infinity at 0, NaN below, infinity at infinity."""
    x = x.double()
    tiny = x < 2.0**-1022
    bits = torch.where(tiny, x * 2.0**54, x).view(torch.int64)
    # x = 2^exponent * mantissa, the mantissa between sqrt(1/2) and sqrt(2).
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    e = exponent.double() - torch.where(tiny, 54.0, 0.0)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = _horner(square, _ATANH) * square
    result = e * _LN2_HIGH + (2.0 * s + (2.0 * s * series + e * _LN2_LOW))
    result = torch.where(x > 0.0, result, torch.where(x == 0.0, -math.inf, math.nan))
    return torch.where(x == math.inf, x, result)


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x) in float64, without cancellation near 0; finite x above -1, else as log()."""
    x = x.double()
    u = 1.0 + x
    return log(u) + torch.where(u > 0.0, (x - (u - 1.0)) / u, 0.0)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) in float64."""
    return 1.0 / (1.0 + exp(-x.double()))


def logit(p: Tensor) -> Tensor:
    """Return log(p / (1 - p)) in float64, the inverse of sigmoid(); infinite at 0 and 1."""
    p = p.double()
    return log(p) - log1p(-p)


def logit_of(p: float) -> float:
    """Return log(p / (1 - p)) of a number; minus infinity at 0."""
    return math.log(p / (1.0 - p)) if p > 0 else -math.inf


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) in float64."""
    x = x.double()
    return torch.where(x > 0.0, x, 0.0) + log1p(exp(-x.abs()))


def sqrt(x: Tensor) -> Tensor:
    """Return the square root in the dtype of x, rounded as IEEE 754 says, which torch's on the CPU (MKL's) is not."""
    if x.device.type != "cpu":
        return x.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.numpy()))


def power(base: float, exponents: Tensor) -> Tensor:
    """Return base^n in float64 for each whole n >= 0 of ``exponents``, an integer tensor; by repeated squaring."""
    result = torch.ones_like(exponents, dtype=torch.float64)
    left, factor = exponents, base
    while bool((left > 0).any()):
        result = torch.where(left % 2 == 1, result * factor, result)
        left, factor = left // 2, factor * factor
    return result


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Return normal numbers of mean 0, variance 1 [*shape], float64 on the CPU, by the method of Box and Muller.

    generator: on the CPU; two uniform numbers are drawn for each two.
    """
    count = math.prod(shape)
    uniform = torch.rand(2, -(-count // 2), generator=generator, dtype=torch.float64)
    radius = sqrt(-2.0 * log(1.0 - uniform[0]))
    # An angle of 2 pi u is `quarter` quarter turns and a rest of at most an eighth.
    quarter = (4.0 * uniform[1]).round()
    rest = (4.0 * uniform[1] - quarter) * (0.5 * math.pi)
    square = rest * rest
    cosine, sine = _horner(square, _COS), _horner(square, _SIN) * rest
    odd = quarter % 2.0 == 1.0
    x, y = torch.where(odd, -sine, cosine), torch.where(odd, cosine, sine)
    half = (quarter == 2.0) | (quarter == 3.0)
    both = torch.cat([radius * torch.where(half, -x, x), radius * torch.where(half, -y, y)])
    return both[:count].view(shape)


def rotate(quats: Tensor, vectors: Tensor) -> Tensor:
    """Return ``vectors`` [N, 3] rotated by unnormalised quaternions [N, 4] (w, x, y, z), float64."""
    w, x, y, z = quats.double().unbind(dim=1)
    norm = sqrt((w * w + x * x) + (y * y + z * z)).clamp(min=1e-12)
    w, x, y, z = (w / norm, x / norm, y / norm, z / norm)
    a, b, c = vectors.double().unbind(dim=1)
    # v + 2 w (u x v) + 2 u x (u x v), the rotation of v by the unit quaternion (w, u).
    d, e, f = y * c - z * b, z * a - x * c, x * b - y * a
    turned = (
        a + 2.0 * (w * d + (y * f - z * e)),
        b + 2.0 * (w * e + (z * d - x * f)),
        c + 2.0 * (w * f + (x * e - y * d)),
    )
    return torch.stack(turned, dim=1)


def tree_sum(x: Tensor) -> Tensor:
    """Return [...], the sum of x [..., K] over K, in the dtype of x: halves are added until one is left."""
    while (count := x.shape[-1]) > 1:
        half = count // 2
        halves = x[..., :half] + x[..., half : 2 * half]
        if count % 2:
            halves[..., 0] += x[..., -1]
        x = halves
    return x.sum(dim=-1)


def _expm1_reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^r - 1 and 2^n for x = r + n log 2 with |r| at most half of log 2."""
    n = (x * (1.0 / math.log(2.0))).round().clamp(_LEAST_POWER, _MOST_POWER)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    whole = torch.where(n == n, n, 0.0).to(torch.int64)
    return _horner(r, _EXPM1) * r, ((whole + 1023) << 52).view(torch.float64)


def _saturated(x: Tensor, result: Tensor, below: float) -> Tensor:
    result = torch.where(x < -708.0, below, result)
    return torch.where(x > 709.0, math.inf, result)


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    """Return the polynomial in x with ``coefficients``, that of the highest power first."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total.mul_(x).add_(coefficient)
    return total
