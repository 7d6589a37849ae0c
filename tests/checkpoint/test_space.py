"""Raw and activated parameters are distinguished in any unit of length, and doubt is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from splatcli.checkpoint.activation_check import Space, check_opacities, check_scales, check_space
from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import with_settings
from splatcli.errors import ModelFileError

Array = NDArray[np.float32]
UNITS = [10.0**power for power in np.arange(-4, 5.5, 0.5)]


def shells(unit: float, flatness: float, bias: float, seed: int = 0, count: int = 800) -> tuple[Array, Array]:
    """Positions on three shells and log-scales about their neighbours' distances, off by ``bias`` nats.

    flatness: nats by which one axis is thinner, as it is after training.
    """
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, 3))
    points *= rng.choice([0.3, 1.0, 4.0], size=(count, 1)) / np.linalg.norm(points, axis=1, keepdims=True)
    points += rng.normal(size=(count, 3)) * 0.01
    distances = cKDTree(points).query(points, k=4)[0][:, 1:]
    logs = np.log(np.sqrt((distances**2).mean(axis=1)))[:, None] + bias + rng.normal(size=(count, 3)) * 0.4
    logs[:, 0] -= flatness
    return (points * unit).astype(np.float32), (logs + np.log(unit)).astype(np.float32)


CASES = [(unit, flatness, bias) for unit in UNITS for flatness in (0.0, 1.0, 3.0) for bias in (-1.0, 0.0, 1.0)]


def exp(logs: Array) -> Array:
    return np.exp(logs.astype(np.float64)).astype(np.float32)


def test_no_activated_scene_is_taken_for_raw_and_no_raw_one_for_activated() -> None:
    raw, activated = Counter[Space](), Counter[Space]()
    for case in CASES:
        means, logs = shells(*case)
        raw[check_scales(means, logs).space] += 1
        activated[check_scales(means, exp(logs)).space] += 1
    assert raw[Space.ACTIVATED] == 0
    assert activated[Space.RAW] == 0
    assert activated[Space.ACTIVATED] > 0.9 * len(CASES)


def test_doubt_about_raw_scenes_needs_units_in_which_everything_is_large() -> None:
    for unit, flatness, bias in CASES:
        means, logs = shells(unit, flatness, bias)
        assert check_scales(means, logs).space is Space.RAW or float(logs.min()) >= 0


def test_twice_activated_scales_are_refused() -> None:
    for unit, bias in itertools.product((1e-3, 1e-2, 0.1, 1.0), (-1.0, 0.0)):
        means, logs = shells(unit, 1.0, bias, seed=46)
        assert check_space(means, exp(exp(logs)), np.zeros(800, np.float32), declared=True).problem is not None


def test_where_positions_tell_nothing_one_negative_scale_decides() -> None:
    scales = np.full((500, 3), 3.0, np.float32)
    scales[77, 1] = -1e-6
    assert check_scales(np.zeros((500, 3), np.float32), scales).space is Space.RAW


def test_clones_on_one_spot_do_not_hide_the_distances() -> None:
    means, logs = shells(0.01, 0.0, 0.0)
    means, scales = np.repeat(means, 3, axis=0), np.repeat(exp(logs), 3, axis=0)
    assert check_scales(means, scales).space is Space.ACTIVATED


@pytest.mark.parametrize("count", [1, 2, 99])
def test_few_gaussians_leave_doubt(count: int) -> None:
    means = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    scales = np.full((count, 3), 0.01, np.float32)
    assert check_scales(means, scales).space is Space.UNSURE
    assert check_space(means, scales, np.zeros(count, np.float32), declared=False).problem is not None
    assert check_space(means, scales, np.zeros(count, np.float32), declared=True).problem is None


@pytest.mark.parametrize("means", [np.zeros((300, 3), np.float32), np.zeros((0, 3), np.float32)])
def test_degenerate_positions_do_not_crash(means: Array) -> None:
    verdict = check_scales(means, np.full((len(means), 3), 0.5, np.float32))
    assert verdict.space is (Space.UNSURE if len(means) else Space.RAW)


def test_a_few_far_gaussians_of_one_unit_are_no_pile_where_the_file_declares_its_space() -> None:
    """A young model: initial Gaussians far from all others begin at a scale of one unit, and none is a bit smaller."""
    means, logs = shells(0.05, 0.0, 0.0, count=20_000)
    rng = np.random.default_rng(3)
    far = rng.choice(len(means), 50, replace=False)
    means[far] *= 100.0
    logs[far] = rng.uniform(0.0, 0.4, size=(len(far), 3)).astype(np.float32)
    opacities = rng.normal(-2, 1, size=len(means)).astype(np.float32)
    assert check_space(means, logs, opacities, declared=True).problem is None
    problem = check_space(means, logs, opacities, declared=False).problem
    assert problem is not None
    assert "pile up just above 0" in problem
    activated = rng.choice(len(means), len(means) // 20, replace=False)
    logs[activated] = exp(logs[activated])
    assert check_space(means, logs, opacities, declared=True).problem is not None


@pytest.mark.parametrize("column", ["means", "scales", "opacities"])
@pytest.mark.parametrize("value", [-1e4, -3e38, 3e38])
def test_numbers_at_the_ends_of_float32_are_checked(column: str, value: float) -> None:
    """Their means and exponentials leave the range of float32, and of float64."""
    means, scales = shells(1.0, 0.0, 0.0)
    opacities = np.random.default_rng(0).normal(size=len(means)).astype(np.float32)
    for rows in (slice(None), slice(0, 400)):
        columns = {"means": means.copy(), "scales": scales.copy(), "opacities": opacities.copy()}
        columns[column][rows] = value
        found = check_space(columns["means"], columns["scales"], columns["opacities"], declared=True)
        if column == "opacities":
            assert found.opacities is Space.RAW


def test_the_message_holds_the_figures() -> None:
    means, logs = shells(0.01, 0.0, 0.0)
    said = check_space(means, exp(logs), np.zeros(800, np.float32), declared=True).problem
    assert said is not None
    assert "scales look already activated (all 2,400 values >= 0, median 0.00" in said
    assert "nearest-neighbour distance 0.00" in said


def test_opacities_between_0_and_1_are_activated_unless_constant() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(-2, 3, size=500).astype(np.float32)
    sigmoids = (1 / (1 + np.exp(-logits))).astype(np.float32)
    assert check_opacities(logits) is Space.RAW
    assert check_opacities(sigmoids) is Space.ACTIVATED
    assert check_opacities(np.append(sigmoids, [0, 1]).astype(np.float32)) is Space.ACTIVATED
    assert check_opacities(sigmoids[:7]) is Space.UNSURE
    assert check_opacities(np.full(500, 0.1, np.float32)) is Space.UNSURE
    assert check_opacities(np.full(500, -2.197, np.float32)) is Space.RAW  # INRIA's initial opacity
    assert check_opacities(np.zeros(500, np.float32)) is Space.RAW  # that of MCMC


def test_logits_of_bytes_are_raw_whichever_is_the_commonest() -> None:
    """A PLY that was made of a SOG, an SPZ or a .splat has them. The logit of 128/255 is nearly 2/255."""
    for often in range(1, 255):
        alphas = np.append(np.arange(1, 255), np.full(200, often)) / 255
        logits = np.log(alphas / (1 - alphas)).astype(np.float32)
        assert check_opacities(logits) is Space.RAW, often
        # Some that are the sigmoid of the commonest one are found still.
        twins = 1 / (1 + np.exp(-logits[-100:]))
        assert check_opacities(np.append(logits, twins)) is Space.ACTIVATED, often


def test_doubtful_opacities_are_refused_unless_the_file_vouches_for_them() -> None:
    means, logs = shells(0.01, 0.0, 0.0)
    constant = np.full(800, 0.1, np.float32)
    said = check_space(means, logs, constant, declared=False).problem
    assert said is not None
    assert "opacities may be activated already (all 800 values between 0 and 1, each 0.1)" in said
    assert check_space(means, logs, constant, declared=True).problem is None


def test_the_grounds_are_reported_also_for_what_is_accepted() -> None:
    means, logs = shells(0.01, 0.0, 0.0)
    found = check_space(means, logs, np.linspace(-5, 8, 800, dtype=np.float32), declared=False)
    assert (found.problem, found.space) == (None, Space.RAW)
    assert found.evidence == (
        "scales are logarithms (2,400 of 2,400 values are below 0)",
        "opacities are logits (-5 to 8)",
    )


def test_activated_scales_under_valid_digests_are_refused(
    checkpoint_of: Callable[..., Checkpoint], tamper: Callable[..., None], tmp_path: Path
) -> None:
    state = checkpoint_of(500)
    state.gaussians.means *= 0.1  # neighbours about as far apart as the Gaussians are large
    save_checkpoint(tmp_path / "a.pt", state)
    tamper(tmp_path / "a.pt", lambda d: d.update(_scaling=d["_scaling"].exp()), sign=True)
    with pytest.raises(ModelFileError, match="scales look already activated") as caught:
        load_checkpoint(tmp_path / "a.pt")
    assert caught.value.exit_code == 5


def test_activated_opacities_under_valid_digests_are_refused(saved: Path, tamper: Callable[..., None]) -> None:
    tamper(saved, lambda d: d.update(_opacity=d["_opacity"].sigmoid()), sign=True)
    with pytest.raises(ModelFileError, match="opacities look already activated"):
        load_checkpoint(saved)


def test_a_run_that_starts_with_logits_in_0_to_1_is_not_suspected(
    checkpoint_of: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    state = checkpoint_of()
    state.config = with_settings(state.config, {"model.init_opacity": 0.6})
    state.gaussians.logit_opacities = torch.linspace(0.35, 0.45, 20)
    save_checkpoint(tmp_path / "a.pt", state)
    assert load_checkpoint(tmp_path / "a.pt").step == 300


def test_a_run_in_millimetres_can_be_saved_and_loaded(checkpoint_of: Callable[..., Checkpoint], tmp_path: Path) -> None:
    """All its log-scales are positive, and the manifest's word settles the doubt."""
    state = checkpoint_of(800)
    means, logs = shells(1e3, 0.0, 0.0)
    assert float(logs.min()) > 0
    state.gaussians.means, state.gaussians.log_scales = torch.from_numpy(means), torch.from_numpy(logs)
    save_checkpoint(tmp_path / "a.pt", state)
    assert load_checkpoint(tmp_path / "a.pt").step == 300


@pytest.mark.parametrize("value", [0.3, 0.5, 1.0])
def test_equal_scales_on_a_regular_grid_are_not_taken_for_logarithms(value: float) -> None:
    """Each is one multiple of the distance to the neighbours, and so is its logarithm."""
    means = np.stack(np.meshgrid(*[np.arange(8.0)] * 3), axis=-1).reshape(-1, 3).astype(np.float32)
    assert check_scales(means, np.full((512, 3), value, np.float32)).space is not Space.RAW
