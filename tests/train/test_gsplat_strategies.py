"""gsplat's strategies: each decision row by row, with moments and statistics; and a loop as gsplat writes it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import splatcli
from splatcli import DefaultStrategy, MCMCStrategy
from splatcli.config import Schedule
from splatcli.errors import UsageError
from splatcli.reproducible import logit_of
from splatcli.train.densify import gsplat_edits
from splatcli.train.densify.gsplat_strategies import Strategy
from splatcli.train.densify.mcmc import compute_relocation
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.test_rasterization import seen_by
from tests.train.worlds import random_gaussians, ring_cameras


def trained(n: int = 12, *, degree: int = 1) -> tuple[Any, dict[str, torch.optim.Adam]]:
    """Parameters as gsplat's trainer has them, and an Adam for each whose moments are the row numbers, from 1."""
    g = random_gaussians(n, degree=degree)
    columns = {
        "means": g.means,
        "scales": g.log_scales,
        "quats": g.quats,
        "opacities": g.logit_opacities,
        "sh0": g.sh0[:, None],
        "shN": g.shN,
    }
    params = nn.ParameterDict({name: nn.Parameter(column.clone()) for name, column in columns.items()})
    optimizers = {name: torch.optim.Adam([params[name]], lr=1e-3) for name in columns}
    for name, optimizer in optimizers.items():
        params[name].grad = torch.ones_like(params[name])
        optimizer.step()
        with torch.no_grad():
            params[name].copy_(columns[name])
            for moment in ("exp_avg", "exp_avg_sq"):
                rows = torch.arange(1.0, n + 1).view(-1, *[1] * (params[name].dim() - 1))
                optimizer.state[params[name]][moment].copy_(rows.expand_as(params[name]))
        optimizer.zero_grad()
    return params, optimizers


def moments(params: Any, optimizers: dict[str, torch.optim.Adam], name: str = "means") -> list[int]:
    """The row numbers that the first moments hold; 0 for a fresh row."""
    held = optimizers[name].state[params[name]]["exp_avg"]
    return [int(value) for value in held.reshape(len(held), -1)[:, 0]]


def info_of(gradient: Tensor, radii: Tensor, *, absgrad: bool = False) -> dict[str, Any]:
    """The report of one view of 100 x 50 pixels."""
    means2d = torch.zeros_like(gradient, requires_grad=True)
    (means2d * gradient).sum().backward()
    if absgrad:
        means2d.absgrad = 3.0 * gradient.abs()  # type: ignore[attr-defined]
    return {"means2d": means2d, "radii": radii, "width": 100, "height": 50, "n_cameras": 1, "gaussian_ids": None}


def test_statistics_are_means_of_gradients_in_ndc_packed_or_not() -> None:
    params, optimizers = trained(3)
    gradient = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [0.0, 5.0]]])
    radii = torch.tensor([[[4, 5], [2, 2], [0, 0]]], dtype=torch.int32)
    strategy = DefaultStrategy(refine_scale2d_stop_iter=10)
    states = []
    for packed in (False, True):
        state = strategy.initialize_state(scene_scale=2.0)
        info = info_of(gradient, radii)
        if packed:
            info = {**info_of(gradient[0, :2], radii[0, :2]), "gaussian_ids": torch.tensor([0, 1])}
        for _ in range(2):
            strategy.step_post_backward(params, optimizers, state, 1, info, packed=packed)
        states.append(state)
    for state in states:
        assert_close(state["grad2d"], torch.tensor([2 * math.hypot(3 * 50, 4 * 25), 2 * 50.0, 0.0]))
        assert_close(state["count"], torch.tensor([2.0, 2.0, 0.0]))
        assert_close(state["radii"], torch.tensor([0.05, 0.02, 0.0]))
    strategy = DefaultStrategy(absgrad=True)
    state = strategy.initialize_state()
    strategy.step_post_backward(params, optimizers, state, 1, info_of(gradient, radii, absgrad=True))
    assert_close(state["grad2d"], 3.0 * torch.tensor([math.hypot(3 * 50, 4 * 25), 50.0, 0.0]))


def prepared(strategy: DefaultStrategy, step: int) -> tuple[Any, dict[str, torch.optim.Adam], dict[str, Any]]:
    """Six rows: stays, duplicated, split, faint, huge, both duplicated and faint; after ``step``."""
    params, optimizers = trained(6)
    with torch.no_grad():
        params["scales"].fill_(math.log(0.005))
        params["scales"][2, 1] = math.log(0.05)
        params["scales"][4, 0] = math.log(0.5)
        params["opacities"].fill_(0.0)
        params["opacities"][3] = params["opacities"][5] = logit_of(0.004)
    gradient = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
    radii = torch.ones(1, 6, 2, dtype=torch.int32)
    state = strategy.initialize_state(scene_scale=1.0)
    strategy.step_post_backward(params, optimizers, state, step, info_of(gradient, radii))
    return params, optimizers, state


def test_each_row_is_duplicated_split_or_removed() -> None:
    params, optimizers, state = prepared(DefaultStrategy(), 600)
    # Huge ones stay until the first reset. Row 2 has two children; 3, 5 and 5's copy are faint.
    assert moments(params, optimizers) == [1, 2, 5, 0, 0, 0]
    assert moments(params, optimizers, "shN") == [1, 2, 5, 0, 0, 0]
    before = random_gaussians(6)
    assert_close(params["means"][[0, 1, 2, 3]].detach(), before.means[[0, 1, 4, 1]])
    assert_close(params["scales"][4:].detach().exp(), torch.tensor([[0.005, 0.05, 0.005]] * 2) / 1.6)
    assert float((params["means"][4:].detach() - before.means[2]).norm(dim=1).max()) < 5 * 0.05
    assert not torch.equal(params["means"][4], params["means"][5])
    assert_close(params["quats"][4:].detach(), before.quats[[2, 2]])
    assert state["grad2d"] is None
    for name, optimizer in optimizers.items():
        (held,) = optimizer.param_groups[0]["params"]
        assert held is params[name]
        assert held.requires_grad
        assert list(optimizer.state) == [held]


def test_huge_gaussians_are_removed_after_the_first_reset_and_by_their_radius() -> None:
    params, optimizers, _ = prepared(DefaultStrategy(), 3100)
    assert moments(params, optimizers) == [1, 2, 0, 0, 0]
    large = DefaultStrategy(refine_scale2d_stop_iter=4000, grow_scale2d=0.005, prune_scale2d=0.005)
    # All are split, and small ones of high gradient duplicated first; children and copies of faint rows go.
    params, optimizers, _ = prepared(large, 600)
    assert moments(params, optimizers) == [0] * (1 + 2 * 6 - 4)
    assert_close(params["means"][0].detach(), random_gaussians(6).means[1])
    assert_close(params["scales"][0].detach().exp(), torch.full((3,), 0.005))
    assert len(prepared(large, 3100)[0]["means"]) == 0


def test_revised_opacity_keeps_what_shines_through() -> None:
    params, _, _ = prepared(DefaultStrategy(revised_opacity=True), 600)
    split = params["opacities"][4:].detach().sigmoid()
    assert_close((1 - split[0]) * (1 - split[1]), torch.tensor(0.5))
    assert_close(params["opacities"][:4].detach(), torch.zeros(4))


def test_a_reset_lowers_opacities_and_begins_their_moments_anew() -> None:
    strategy = DefaultStrategy(refine_start_iter=10_000)
    params, optimizers, state = prepared(strategy, 3000)
    assert_close(params["opacities"].detach().sigmoid(), torch.tensor([0.01, 0.01, 0.01, 0.004, 0.01, 0.004]))
    assert moments(params, optimizers, "opacities") == [0] * 6
    assert moments(params, optimizers) == [1, 2, 3, 4, 5, 6]
    assert state["count"] is not None


@pytest.mark.parametrize(
    ("fields", "step"),
    [({}, 650), ({}, 500), ({}, 15_000), ({"pause_refine_after_reset": 200}, 3100), ({"refine_every": 7}, 600)],
)
def test_nothing_changes_outside_the_window(fields: dict[str, Any], step: int) -> None:
    params, optimizers, _ = prepared(DefaultStrategy(**fields), step)
    assert moments(params, optimizers) == [1, 2, 3, 4, 5, 6]


def test_mcmc_relocates_and_grows_as_the_equations_say() -> None:
    torch.manual_seed(3)
    params, optimizers = trained(40)
    with torch.no_grad():
        params["opacities"].fill_(-20.0)
        params["opacities"][7] = 2.0  # the only one alive: every copy is of it
    before = {name: value.detach().clone() for name, value in params.items()}
    strategy = MCMCStrategy(cap_max=41, noise_lr=0.0)
    strategy.step_post_backward(params, optimizers, strategy.initialize_state(), 600, {}, lr=1e-3)
    assert len(params["means"]) == 41
    # 39 copies share with it, and the one that is added shares once more with one of these 40.
    logits, shrink = compute_relocation(torch.tensor([2.0]), torch.tensor([40]))
    twice, more = compute_relocation(logits, torch.tensor([2]))
    values = params["opacities"].detach()
    shared = torch.isclose(values, twice)
    assert int(shared.sum()) == 2
    assert_close(values[~shared], logits.expand(39))
    assert_close(params["scales"][~shared].detach(), (before["scales"][7] + shrink).expand(39, 3))
    assert_close(params["scales"][shared].detach(), (before["scales"][7] + shrink + more).expand(2, 3))
    for name in ("means", "quats", "sh0", "shN"):
        assert_close(params[name].detach(), before[name][7].expand_as(params[name]))
    assert set(moments(params, optimizers)) == {0}


def test_mcmc_makes_its_settings_once_and_follows_changed_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def schedule(**fields: int) -> Schedule:
        made.append(fields["refine_every"])
        return Schedule(**fields)

    monkeypatch.setattr("splatcli.train.densify.gsplat_strategies.Schedule", schedule)
    params, optimizers = trained(40)
    strategy = MCMCStrategy(cap_max=50, refine_every=7)
    for step in (1, 2, 3):
        strategy.step_post_backward(params, optimizers, {}, step, {}, lr=1e-3)
    strategy.refine_start_iter, strategy.refine_every = 0, 4
    strategy.step_post_backward(params, optimizers, {}, 4, {}, lr=1e-3)
    assert (made, len(params["means"])) == ([7, 4], 42)


def test_noise_has_the_covariance_of_the_gaussian_and_fades_with_opacity() -> None:
    torch.manual_seed(5)
    count = 40_000
    g = random_gaussians(2)
    params = {
        "means": torch.zeros(2 * count, 3),
        "scales": g.log_scales.repeat_interleave(count, 0),
        "quats": g.quats.repeat_interleave(count, 0),
        "opacities": torch.tensor([logit_of(0.005), logit_of(0.05)]).repeat_interleave(count),
    }
    strategy = MCMCStrategy(noise_lr=100.0)
    strategy.step_post_backward(params, {}, {}, 1, {}, lr=0.5)
    for row, opacity in ((0, 0.005), (1, 0.05)):
        w, x, y, z = (g.quats[row] / g.quats[row].norm()).double().tolist()
        rotation = torch.tensor(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
                [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
                [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
            ]
        )
        covariance = rotation @ torch.diag((2 * g.log_scales[row]).exp()) @ rotation.T
        strength = 50.0 / (1.0 + math.exp(100.0 * (opacity - 0.005)))
        expected = strength**2 * covariance @ covariance
        moved = params["means"][row * count : (row + 1) * count]
        got = moved.T @ moved / count
        assert_close(got, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    untouched = params["means"].clone()
    MCMCStrategy(noise_injection_stop_iter=5).step_post_backward(params, {}, {}, 5, {}, lr=0.5)
    assert torch.equal(params["means"], untouched)


@pytest.mark.parametrize("strategy", [DefaultStrategy(), MCMCStrategy()])
def test_check_sanity_names_what_is_wrong(strategy: DefaultStrategy | MCMCStrategy) -> None:
    params, optimizers = trained()
    strategy.check_sanity(params, optimizers)
    with pytest.raises(UsageError, match="differ: shN"):
        strategy.check_sanity(params, {name: one for name, one in optimizers.items() if name != "shN"})
    with pytest.raises(UsageError, match="no 'quats'"):
        strategy.check_sanity({name: one for name, one in params.items() if name != "quats"}, optimizers)
    swapped = {**optimizers, "means": optimizers["quats"]}
    with pytest.raises(UsageError, match="'means' does not hold"):
        strategy.check_sanity(params, swapped)


def test_what_is_not_served_is_named() -> None:
    with pytest.raises(NotImplementedError, match="key_for_gradient"):
        DefaultStrategy(key_for_gradient="gradient_2dgs")
    with pytest.raises(NotImplementedError, match="scene"):
        DefaultStrategy().step_post_backward({}, {}, {}, 1, {}, scene=object())
    with pytest.raises(NotImplementedError, match="scene"):
        MCMCStrategy().step_post_backward({}, {}, {}, 1, {}, lr=1.0, scene=object())


@NEEDS_COMPILER
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["default", "absgrad", "mcmc"])
def test_a_loop_as_gsplat_writes_it_fits_images(name: str, packed: bool) -> None:
    torch.manual_seed(0)
    gsplat = splatcli
    views = seen_by(*ring_cameras(3, size=24), dtype=torch.float32)
    params, optimizers = trained(60)
    for optimizer in optimizers.values():
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = 1e-2
    window = {"refine_start_iter": 5, "refine_every": 5, "refine_stop_iter": 30}
    absgrad = name == "absgrad"
    strategy: Any = (
        gsplat.MCMCStrategy(cap_max=80, noise_lr=1.0, **window)
        if name == "mcmc"
        else gsplat.DefaultStrategy(absgrad=absgrad, grow_grad2d=1e-4, prune_scale3d=10.0, **window)
    )
    strategy.check_sanity(params, optimizers)
    state = strategy.initialize_state() if name == "mcmc" else strategy.initialize_state(scene_scale=1.0)
    y, x = torch.meshgrid(torch.linspace(0, 1, 24), torch.linspace(0, 1, 24), indexing="ij")
    target = torch.stack([x, y, 1 - x], dim=-1).expand(3, 24, 24, 3)
    losses = []
    for step in range(40):
        images, _, info = gsplat.rasterization(
            params["means"], params["quats"], params["scales"].exp(), params["opacities"].sigmoid(),
            torch.cat([params["sh0"], params["shN"]], dim=1), **views, sh_degree=1, packed=packed, absgrad=absgrad,
        )  # fmt: skip
        strategy.step_pre_backward(params, optimizers, state, step, info)
        similar = gsplat.fused_ssim(images.permute(0, 3, 1, 2), target.permute(0, 3, 1, 2))
        loss = 0.8 * (images - target).abs().mean() + 0.2 * (1.0 - similar)
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if name == "mcmc":
            strategy.step_post_backward(params, optimizers, state, step, info, lr=1e-2)
        else:
            strategy.step_post_backward(params, optimizers, state, step, info, packed=packed)
        losses.append(float(loss.detach()))
    assert len(params["means"]) > 60
    assert losses[-1] < 0.8 * losses[0]
    strategy.check_sanity(params, optimizers)


def with_statistics(n: int = 12) -> tuple[Any, dict[str, torch.optim.Adam], dict[str, Any]]:
    params, optimizers = trained(n)
    return params, optimizers, {"grad2d": torch.arange(float(n)), "count": None, "scene_scale": 2.0}


def test_rows_are_copied_split_and_removed_with_moments_and_statistics() -> None:
    params, optimizers, state = with_statistics()
    old = {name: value.detach().clone() for name, value in params.items()}
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[2, 5]] = True
    gsplat_edits.duplicate(params, optimizers, state, mask)
    for name in old:
        assert torch.equal(params[name], torch.cat([old[name], old[name][mask]]))
        assert moments(params, optimizers, name) == [*range(1, 13), 0, 0]
    assert state["grad2d"].tolist() == [*map(float, range(12)), 2.0, 5.0]
    gsplat_edits.remove(params, optimizers, state, torch.arange(14) >= 12)
    assert moments(params, optimizers) == [*range(1, 13)]
    for revised in (False, True):
        params, optimizers, state = with_statistics()
        gsplat_edits.split(params, optimizers, state, mask, revised_opacity=revised)
        stay = [row for row in range(12) if row not in (2, 5)]
        assert state["grad2d"].tolist() == [*map(float, stay), 2.0, 5.0, 2.0, 5.0]
        assert moments(params, optimizers) == [*(row + 1 for row in stay), 0, 0, 0, 0]
        for name in ("quats", "sh0", "shN"):
            assert torch.equal(params[name][10:], old[name][[2, 5, 2, 5]])
        assert_close(params["scales"][10:], old["scales"][[2, 5, 2, 5]] - math.log(1.6))
        assert float((params["means"].detach()[10:] - old["means"][[2, 5, 2, 5]]).abs().min()) > 0.0
        opacity, parent = params["opacities"][10:].sigmoid(), old["opacities"][[2, 5, 2, 5]].sigmoid()
        assert_close(1 - (1 - opacity) ** 2 if revised else opacity, parent)


def test_dead_rows_become_copies_of_living_ones() -> None:
    torch.manual_seed(4)
    params, optimizers, state = with_statistics()
    old = {name: value.detach().clone() for name, value in params.items()}
    mask = torch.arange(12) < 4
    gsplat_edits.relocate(params, optimizers, state, mask, binoms=torch.zeros(51, 51), min_opacity=0.005)
    assert len(params["means"]) == 12
    sources = [int((old["sh0"] == row).flatten(1).all(dim=1).nonzero()[0]) for row in params["sh0"][:4]]
    assert min(sources) >= 4
    for row in set(sources):
        places = torch.tensor([row, *(k for k in range(4) if sources[k] == row)])
        opacity, scales = gsplat_edits.compute_relocation(
            old["opacities"][row : row + 1].sigmoid(), old["scales"][row : row + 1].exp(), torch.tensor([len(places)])
        )
        assert_close(params["opacities"][places].sigmoid(), opacity.expand(len(places)))
        assert_close(params["scales"][places].exp(), scales.expand(len(places), 3))
        assert not any(moments(params, optimizers)[place] for place in places.tolist())
    untouched = [row for row in range(4, 12) if row not in sources]
    assert torch.equal(params["opacities"][untouched], old["opacities"][untouched])
    gsplat_edits.sample_add(params, optimizers, state, 3)
    assert len(params["means"]) == len(state["grad2d"]) == 15
    assert moments(params, optimizers)[12:] == [0, 0, 0]


def test_copies_are_no_fainter_than_the_least_opacity() -> None:
    torch.manual_seed(0)
    params, optimizers, state = with_statistics()
    with torch.no_grad():
        params["opacities"].fill_(logit_of(0.006))
    gsplat_edits.sample_add(params, optimizers, state, 3, min_opacity=0.005)
    assert float(params["opacities"].detach().min()) >= logit_of(0.005) - 1e-5


def test_a_parameter_and_its_moments_are_replaced_by_functions() -> None:
    params, optimizers = trained()
    keys = []

    def moved(key: str, moment: Tensor) -> Tensor:
        keys.append(key)
        return torch.cat([moment, moment[:1]])

    gsplat_edits.update_param_with_optimizer(
        lambda name, value: nn.Parameter(torch.cat([value, value[:1]])), moved, params, optimizers, ["means"]
    )
    assert keys == ["exp_avg", "exp_avg_sq"]
    assert moments(params, optimizers) == [*range(1, 13), 1]
    assert optimizers["means"].param_groups[0]["params"][0] is params["means"]
    assert len(params["scales"]) == 12


def test_a_strategy_of_ones_own_overrides_what_gsplat_names() -> None:
    class Cautious(DefaultStrategy):
        def _prune_gs(self, params: Any, optimizers: Any, state: dict[str, Any], step: int) -> int:
            return 0

    strategy = Cautious(refine_start_iter=0, refine_every=1, grow_grad2d=1e9)
    params, optimizers = trained()
    with torch.no_grad():
        params["opacities"].fill_(logit_of(0.001))
    info = info_of(torch.zeros(1, 12, 2), torch.ones(1, 12, 2, dtype=torch.int32))
    strategy.step_post_backward(params, optimizers, strategy.initialize_state(), 1, info)
    assert len(params["means"]) == 12
    assert isinstance(strategy, Strategy)
