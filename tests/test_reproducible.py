"""The functions that change a run's state: right to a few units in the last place, and of one value everywhere."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splatcli import reproducible

Case = tuple[Callable[[Tensor], Tensor], Callable[[float], float], Tensor]


def spread(low: float, high: float, count: int = 4001) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


CASES: dict[str, Case] = {
    "exp": (reproducible.exp, math.exp, spread(-707.0, 708.9)),
    "expm1": (reproducible.expm1, math.expm1, torch.cat([spread(-50.0, 50.0), spread(-1e-3, 1e-3, 400)])),
    "log": (reproducible.log, math.log, torch.cat([2.0 ** spread(-1070.0, 1020.0), spread(0.5, 2.0, 400)])),
    "log1p": (reproducible.log1p, math.log1p, torch.cat([spread(-0.999, 5.0), 2.0 ** spread(-60.0, -1.0, 400)])),
    "sigmoid": (reproducible.sigmoid, lambda x: 1.0 / (1.0 + math.exp(-x)), spread(-700.0, 700.0)),
    "softplus": (reproducible.softplus, softplus, spread(-700.0, 700.0)),
    "logit": (reproducible.logit, lambda p: math.log(p) - math.log1p(-p), spread(1e-9, 0.25)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_right_to_a_few_units_in_the_last_place(name: str) -> None:
    function, exact, x = CASES[name]
    expected = torch.tensor([exact(v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(function(x), expected, rtol=2e-15, atol=0.0)


@pytest.mark.parametrize("name", CASES)
def test_a_value_depends_neither_on_its_place_nor_on_its_neighbours(name: str) -> None:
    """torch's own functions differ between the vectorised body of a tensor and its last elements."""
    function, _, x = CASES[name]
    x = x.float().repeat(20)[:70_001]  # more than one thread's share
    whole = function(x)
    for first in (0, 1, 7, 32_768 - 3):
        for count in (1, 5, 31):
            assert torch.equal(function(x[first : first + count]), whole[first : first + count])
    torch.set_num_threads(1)
    assert torch.equal(function(x), whole)


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (reproducible.exp, [-math.inf, -800.0, 0.0, 800.0, math.inf], [0.0, 0.0, 1.0, math.inf, math.inf]),
        (reproducible.expm1, [-math.inf, 0.0, math.inf], [-1.0, 0.0, math.inf]),
        (reproducible.log, [0.0, 1.0, math.inf, 5e-324], [-math.inf, 0.0, math.inf, math.log(5e-324)]),
        (reproducible.sigmoid, [-math.inf, 0.0, math.inf], [0.0, 0.5, 1.0]),
        (reproducible.softplus, [-math.inf, math.inf], [0.0, math.inf]),
        (reproducible.logit, [0.0, 0.5, 1.0], [-math.inf, 0.0, math.inf]),
    ],
)
def test_limits(function: Callable[[Tensor], Tensor], x: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(
        function(torch.tensor(x, dtype=torch.float64)), torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_nan(name: str) -> None:
    assert CASES[name][0](torch.tensor([math.nan])).isnan().all()


def test_log_of_a_negative_number_is_nan() -> None:
    assert reproducible.log(torch.tensor([-1.0, -math.inf])).isnan().all()


def test_powers_of_whole_numbers() -> None:
    exponents = torch.tensor([0, 1, 2, 17, 1000, 30_000])
    expected = torch.tensor([0.9**k for k in exponents.tolist()], dtype=torch.float64)
    torch.testing.assert_close(reproducible.power(0.9, exponents), expected, rtol=1e-12, atol=0.0)


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    x = reproducible.normal(200_001, 3, generator=torch.Generator().manual_seed(0))
    assert x.shape == (200_001, 3)
    n = x.numel()
    for moment, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(float((x**moment).mean()) - expected) < 5.0 * math.sqrt(variance / n)
    below = float((x < 1.0).double().mean())
    assert abs(below - 0.8413447) < 5.0 * math.sqrt(0.8413 * 0.1587 / n)
    # Neighbours in the tensor, and the two numbers of one draw, are independent.
    flat = x.flatten()
    for one, other in ((flat[:-1], flat[1:]), (flat[: n // 2], flat[n - n // 2 :])):
        assert abs(float((one * other).mean())) < 5.0 / math.sqrt(len(one))


def test_a_rotation_turns_as_the_matrix_of_its_quaternion_does() -> None:
    generator = torch.Generator().manual_seed(1)
    quats = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    vectors = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    w, x, y, z = torch.nn.functional.normalize(quats, dim=1).unbind(1)
    matrix = torch.stack(
        [
            *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
            *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
            *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
        ],
        dim=1,
    ).view(-1, 3, 3)
    torch.testing.assert_close(reproducible.rotate(quats, vectors), (matrix @ vectors[:, :, None])[:, :, 0])


PROGRAM = """
import hashlib, torch
from splatcli import reproducible as a
x = (torch.arange(40_001) - 20_000).float() / 1000  # linspace rounds differently by itself
g = torch.Generator().manual_seed(0)
parts = [a.exp(x), a.expm1(x), a.log(x.abs()), a.log1p(x.abs()), a.sigmoid(x), a.softplus(x), a.logit(x.abs() / 21)]
parts += [a.normal(40_001, generator=g), a.power(0.9, torch.arange(40_001))]
parts += [a.sqrt(x.abs()), a.rotate(x[:40_000].view(-1, 4), x[:30_000].view(-1, 3))]
print(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
"""


def test_other_instruction_sets_of_torch_give_the_same_bits() -> None:
    digests = set()
    # A set that the processor lacks would be an illegal instruction.
    best = {"AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)
    for capability, mkl in (("default", "SSE4_2"), ("avx2", "AVX2"), ("avx512", "AVX512"))[: best + 1]:
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "MKL_ENABLE_INSTRUCTIONS": mkl}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == len(hashlib.sha256().hexdigest())
