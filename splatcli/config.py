"""Config: every setting of a run with its default and bounds, the presets, and ``build_config``, which makes a Config.

Values and names are the field's (INRIA, gsplat); where the two differ the choice is said beside the field.
``Schedule.scaled`` and ``OptimConfig.scaled`` fit the 30,000-step recipe to a shorter run once, when the run is made;
what comes out is stored with the run, in absolute steps, so that a resumed run follows the very same schedule.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from splatcli.errors import UsageError
from splatcli.sizes import parse_size

#: The run length that the field's schedules are written for.
REFERENCE_ITERATIONS = 30_000

#: Words that ``model.init`` takes beside a path: the scene's own points; and those of which a run makes its own points.
SFM, HULL, RANDOM = "sfm", "hull", "random"
MADE_STARTS = (HULL, RANDOM)
NAMED_STARTS = (SFM, *MADE_STARTS)

#: ``--preset``: docs/quality.md has what each brings.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"strategy.cap_max": "auto", "train.iterations": 7_000},
    "default": {"strategy.cap_max": "auto"},
    "quality": {"strategy.cap_max": "auto", "train.antialiased": True},
}

#: What tomllib raises: bytes that are no UTF-8, bad grammar, numbers of thousands of digits, brackets in thousands.
_UNREADABLE = (ValueError, RecursionError)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits(cls, value: object) -> object:
        """Whole numbers beyond 64 bits are refused: Python would store thousands of digits and not read them again."""
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, int) and number.bit_length() > 64 for number in numbers):
            raise ValueError("takes whole numbers of up to 64 bits")
        return value


class DataConfig(_Section):
    """Where the photos are and how they are read."""

    scene: str = ""
    #: The layout to read: "colmap", "nerfstudio", "blender" or that of a plug-in (scene/read.py); None finds out.
    format: Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=100)] | None = None
    #: Folder of a COLMAP model, relative to the scene; None takes the largest.
    model: str | None = None
    #: Folder of images, relative to the scene; None takes the layout's own.
    images: str | None = None
    #: 1, 2, 4 or 8 divide; a larger number is a width in pixels; None keeps images up to 1600 px wide.
    resolution: float | None = Field(None, gt=0)
    #: Every n-th view in name order is held out; 0 holds none out.
    test_every: int = Field(8, ge=0)
    #: Folder of masks inside the scene, "none", or "alpha" (transparency hides); None takes the layout's own.
    masks: str | None = None
    #: What masks hide takes no part in anything ("ignore"), or is empty: the background shows there ("transparent").
    mask_mode: Literal["ignore", "transparent"] = "ignore"
    #: What is known of depths: "auto" takes the scene's own (maps that it names, else the points that each photo sees);
    #: else a folder of depth maps inside the scene; None reads none.
    depths: str | None = None
    #: Scene units that 1 in a depth map is; None takes what the scene says, else 0.001 for whole numbers, 1 for others.
    depth_scale: float | None = Field(None, gt=0)
    #: The scene cut into strips x columns, as "2x3" (scene/partition.py), and the one of them that is trained.
    blocks: str | None = Field(None, pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,3}$")
    block: int | None = Field(None, ge=0)
    #: Blocks are refused where one of them would hold a larger part of the scene's points: they would save nothing.
    block_share: float = Field(0.8, gt=0, le=1)
    #: Bytes, or text as "8GiB", of decoded uint8 images that may stay in memory; None takes a quarter of it.
    cache_bytes: Annotated[int | None, BeforeValidator(parse_size)] = Field(None, gt=0)
    #: Photos with more pixels are refused; None takes what can be decoded in a quarter of the memory.
    max_pixels: int | None = Field(None, gt=0)
    #: Go on without the photos that a camera names and the disk lacks.
    skip_missing: bool = False
    #: Read photos and points that a scene file places outside the scene's folder.
    allow_outside: bool = False
    #: Leave out points that are NaN or infinite instead of refusing the scene.
    drop_bad_points: bool = False
    #: At most so many points are read, spread evenly over the file; a Gaussian in training takes about 1 kB.
    max_points: int = Field(5_000_000, gt=0)
    #: The scene's size in world units; None takes it from the cameras.
    scene_extent: float | None = Field(None, gt=0)
    #: Go on without the photos that cannot be decoded; all are, before the first step.
    skip_bad_images: bool = False
    #: Decode every photo in full before the first step.
    strict: bool = False

    def without_depths(self) -> DataConfig:
        """The same for who looks at photos only: depth maps are neither looked for nor missed."""
        return self.model_copy(update={"depths": None})


class ModelConfig(_Section):
    """The Gaussians before the first step."""

    sh_degree: int = Field(3, ge=0, le=4)
    #: "sfm", "hull", "random" (NAMED_STARTS, train/init.py), or the path of a PLY or checkpoint.
    init: str = "sfm"
    init_opacity: float = Field(0.1, gt=0, lt=1)
    #: Times the RMS distance to the three nearest neighbours.
    init_scale: float = Field(1.0, gt=0)
    #: Of "hull" and "random". None takes 100,000, or a tenth of the cap, so that most of it is left for where there is
    #: something.
    random_points: int | None = Field(None, gt=0)


class OptimConfig(_Section):
    """Adam, one learning rate a group; that of the means decays log-linearly."""

    #: Times the scene extent.
    means_lr: float = Field(1.6e-4, gt=0)
    means_lr_final: float = Field(1.6e-6, gt=0)
    log_scales_lr: float = Field(5e-3, gt=0)
    quats_lr: float = Field(1e-3, gt=0)
    #: INRIA's value since October 2024; gsplat's is 0.05.
    logit_opacities_lr: float = Field(2.5e-2, gt=0)
    sh0_lr: float = Field(2.5e-3, gt=0)
    shN_lr: float = Field(1.25e-4, gt=0)
    #: What quats_lr, log_scales_lr, logit_opacities_lr and sh0_lr are multiplied with in the end; log-linear over
    #: ``schedule.lr_steps``, as that of the means. shN_lr stays: coefficients out of view catch up with one rate.
    final_factor: float = Field(1.0, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-15, gt=0)

    @classmethod
    def scaled(cls, iterations: int, batch_size: int = 1, *, made_points: bool = False) -> OptimConfig:
        """Higher learning rates for a shorter run, which fall towards its end; the recipe's own from 30,000 views on.

        With several views a step there are fewer steps to an epoch: rates grow with the root of the batch size, and
        moments forget as much in a step as in that many single ones (beta to its power; 1 - batch (1 - beta) would
        fall below zero). What counts as a short run is the views that it sees.

        Adam moves a parameter by about its learning rate a step: with a tenth of the steps Gaussians would stop on
        their way. What is four times as fast in the beginning, as from 7,000 steps down, must become slow again to be
        exact in the end. The SH rest begins at zero and has the lowest rate of all, by which a short run does not get
        it where it has to be: it stays four times as fast (benchmarks/README.md has what each brings).

        made_points: the run has to make its own points, whose sizes say little. Twice as fast again is better for them,
        and worse where there are skies over the points of a scene.
        """
        shorter = min(10.0, max(1.0, REFERENCE_ITERATIONS / (iterations * batch_size)) ** 1.6)
        wider, recipe = math.sqrt(batch_size), cls()
        first = wider * shorter**0.6
        return cls(
            means_lr=first * recipe.means_lr,
            means_lr_final=wider * recipe.means_lr_final,
            shN_lr=first * recipe.shN_lr,
            beta1=recipe.beta1**batch_size,
            beta2=recipe.beta2**batch_size,
            log_scales_lr=first * (shorter**0.3 if made_points else 1.0) * recipe.log_scales_lr,
            quats_lr=first * recipe.quats_lr,
            logit_opacities_lr=first * recipe.logit_opacities_lr,
            sh0_lr=first * recipe.sh0_lr,
            final_factor=shorter**-0.9,
        )


class Schedule(_Section):
    """When things happen, in steps counted from 1."""

    refine_start: int = Field(500, ge=0)
    refine_stop: int = Field(15_000, ge=0)
    refine_every: int = Field(100, gt=0)
    reset_every: int = Field(3_000, gt=0)
    #: From this step on, refinements remove huge Gaussians too.
    prune_huge_start: int = Field(3_000, ge=0)
    sh_degree_interval: int = Field(1_000, gt=0)
    #: Images begin with their sides halved so many times, and double every ``resolution_schedule`` steps.
    num_downscales: int = Field(0, ge=0, le=5)
    resolution_schedule: int = Field(3_000, gt=0)
    #: Steps over which the means' learning rate falls to its final value; it stays there.
    lr_steps: int = Field(REFERENCE_ITERATIONS, gt=0)

    @classmethod
    def scaled(cls, iterations: int) -> Schedule:
        """The 30,000-step recipe squeezed into a shorter run (compare gsplat's ``steps_scaler``); never stretched.

        Two intervals do not shrink in proportion. ``refine_every`` stays as long as fifteen refinements fit into the
        window: a decision needs statistics over enough views. ``reset_every`` is half as long at least, and a run of up
        to 6,000 steps has no reset: recovering from one takes its steps.
        """
        factor = min(1.0, iterations / REFERENCE_ITERATIONS)

        def scale(steps: int) -> int:
            return max(1, round(steps * factor))

        return cls(
            refine_start=scale(500),
            refine_stop=scale(15_000),
            refine_every=min(100, max(1, scale(15_000) // 15)),
            reset_every=max(1_500, scale(3_000)) if iterations > 6_000 else 3_000,
            prune_huge_start=max(300, scale(3_000)),  # first ones of few random points are huge
            sh_degree_interval=scale(1_000),
            resolution_schedule=scale(3_000),
            lr_steps=max(1, iterations),
        )


def _cap(value: object) -> int | Literal["auto"] | None:
    """A bound on the number of Gaussians; one kind of error for all of its forms."""
    if value is None or value == "none":
        return None
    if value == "auto":
        return "auto"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError('takes a number above 0, "auto" or "none"')
    return value


def _strategy_name(value: object) -> object:
    return "adc" if value == "default" else value


class StrategyConfig(_Section):
    """Density control: where Gaussians are added and removed."""

    #: "adc": clone, split, prune and reset (gsplat's "default", a name that is taken too). "absgrad": the same by
    #: magnitudes of the gradient (AbsGS), the default by measurement (docs/quality.md). "mcmc": relocate, and grow by
    #: a factor. Packages bring others (train/densify/__init__.py), so only a run that uses the name looks for it.
    name: Annotated[str, BeforeValidator(_strategy_name), Field(pattern=r"^\w[\w.-]*$", max_length=100)] = "absgrad"
    #: No more Gaussians than this; None, or "none", sets no bound. "auto" becomes a number when a run is made
    #: (train/init.py).
    cap_max: Annotated[int | Literal["auto"] | None, PlainValidator(_cap)] = None
    #: Mean NDC-scaled gradient norm of the projected mean above which a Gaussian grows; None takes 2e-4 for adc, and
    #: for absgrad, whose sums of magnitudes are larger, 3e-4 (docs/quality.md).
    grow_grad2d: float | None = Field(None, gt=0)
    #: Times the scene extent: smaller Gaussians are cloned, larger are split.
    grow_scale3d: float = Field(0.01, gt=0)
    #: Fainter Gaussians are removed, or relocated.
    prune_opacity: float = Field(0.005, ge=0, lt=1)
    #: Times the scene extent; applied from ``schedule.prune_huge_start`` on. INRIA's value is 0.1, which takes away
    #: what surrounds a scene and brings nothing back (docs/quality.md); what stands before a camera is larger still.
    prune_scale3d: float = Field(0.5, gt=0)
    #: adc, absgrad: two Gaussians from one are together as opaque as it was; INRIA and gsplat leave each as opaque.
    revised_opacity: bool = True
    #: adc, absgrad: what grows is split into two halves along its longest axis, small or large; else small ones are
    #: cloned. absgrad sets it where settings are built (strategy_recipe, docs/quality.md).
    long_axis_split: bool = False
    #: Weight of the mean opacity, and of the mean standard deviation in world units, beside the loss.
    opacity_reg: float = Field(0.0, ge=0)
    scale_reg: float = Field(0.0, ge=0)
    #: mcmc: how many times as many Gaussians there are after a refinement.
    grow_factor: float = Field(1.05, ge=1)
    #: mcmc: times the learning rate of the means is how far noise pushes them.
    noise_lr: float = Field(5e5, ge=0)

    @property
    def grow_threshold(self) -> float:
        """``grow_grad2d`` as given, or the strategy's own."""
        return self.grow_grad2d or (3e-4 if self.name == "absgrad" else 2e-4)


class TrainConfig(_Section):
    """The loop."""

    iterations: int = Field(REFERENCE_ITERATIONS, gt=0)
    #: Views of a step: their gradients are averaged, and density control sees all of them.
    batch_size: int = Field(1, ge=1, le=4096)
    seed: int = 42
    ssim_lambda: float = Field(0.2, ge=0, le=1)
    background: Literal["black", "white", "random"] = "black"
    antialiased: bool = False
    #: Gaussians no finer than the training views could show (Mip-Splatting's 3D filter); ``antialiased`` is its 2D one.
    filter_3d: bool = False
    #: Weight of the depth term, which ``data.depths`` turns on; in median depths of each photo, docs/math.md 7.4.
    depth_lambda: float = Field(0.1, ge=0)
    #: Steps between evaluations on the held-out views beside the last one; 0 evaluates at the end only.
    eval_every: int = Field(0, ge=0)


class ViewsConfig(_Section):
    """What of the training views is trained along; Adam of each view's own, see train/corrections.py."""

    #: A small motion of each training camera.
    pose_opt: bool = False
    #: Radians, and parts of the scene extent; falls log-linearly over ``schedule.lr_steps``.
    pose_lr: float = Field(5e-4, gt=0)
    pose_lr_final: float = Field(5e-5, gt=0)
    #: Weight of half the squared motion beside the loss.
    pose_reg: float = Field(1e-6, ge=0)
    #: An affine map of the colours of each training view.
    exposure: bool = False
    exposure_lr: float = Field(1e-2, gt=0)
    exposure_lr_final: float = Field(1e-3, gt=0)
    #: A grid of affine maps for each training view, by place and brightness (rasterizer/bilateral_grid.py); not with
    #: exposure.
    bilateral_grid: bool = False
    bilateral_grid_lr: float = Field(2e-3, gt=0)
    bilateral_grid_lr_final: float = Field(2e-5, gt=0)
    #: Weight of a grid's total variation beside the loss.
    bilateral_grid_tv: float = Field(10.0, ge=0)

    @model_validator(mode="after")
    def _one_map_of_colours(self) -> ViewsConfig:
        if self.exposure and self.bilateral_grid:
            raise ValueError("exposure and bilateral_grid exclude each other: a grid is an exposure for each place")
        return self

    @property
    def trained(self) -> bool:
        """Whether anything of a view is."""
        return self.pose_opt or self.exposure or self.bilateral_grid


class SaveConfig(_Section):
    """Checkpoints."""

    every_minutes: float = Field(2.0, gt=0)
    #: Also at these steps; these are never deleted.
    steps: tuple[int, ...] = (7_000, 30_000)
    keep_last: int = Field(2, ge=1)
    #: How long a run that is done waits for room when its last state cannot be written.
    patience_minutes: float = Field(10.0, ge=0)


class GuardConfig(_Section):
    """What watches a run; docs/long-runs.md says where the values come from."""

    #: Steps between two looks at all parameters and moments for NaN and infinity; 0 looks only when saving.
    finite_every: int = Field(100, ge=0)
    #: Times that a run goes back to its last checkpoint, after diverging and after running out of memory each.
    max_rollbacks: int = Field(3, ge=0)
    #: Steps between two measurements of the probe views, training views that stay the same; 0 makes none.
    probe_every: int = Field(500, ge=0)
    probe_views: int = Field(3, gt=0)
    #: dB below the best measurement that raise an alarm when they last.
    psnr_drop: float = Field(3.0, gt=0)
    #: Steps after an opacity reset whose measurements do not count.
    reset_window: int = Field(1_000, ge=0)
    #: Part of the Gaussians that density control may remove at once without an alarm.
    prune_jump: float = Field(0.5, gt=0, le=1)


class MemoryConfig(_Section):
    """What a run may take; docs/memory.md says what goes into it."""

    #: Bytes, or text as "8GiB": of the GPU, or of the whole process on the CPU; None takes what is free.
    budget: Annotated[int | None, BeforeValidator(parse_size)] = Field(None, gt=0)
    #: No more Gaussians than this. A run with a budget finds it when it is made, and keeps it when it is resumed.
    cap: int | None = Field(None, gt=0)
    #: SH coefficients beside the constant one, and their moments, lie outside the device: on the host for a GPU, in a
    #: file in the run folder on the CPU. It changes no bit.
    offload: bool = False


class Config(_Section):
    """All settings of a run."""

    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    schedule: Schedule = Field(default_factory=Schedule)
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    views: ViewsConfig = Field(default_factory=ViewsConfig)
    save: SaveConfig = Field(default_factory=SaveConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)

    @model_validator(mode="after")
    def _offloaded_gradients(self) -> Config:
        if self.memory.offload and self.train.batch_size > 1:
            raise ValueError(
                "memory.offload and train.batch_size > 1 exclude each other: the gradients of several views are summed "
                "on the device, for all Gaussians"
            )
        return self

    @property
    def depth_lambda(self) -> float:
        """Weight of the depth term; 0 where no depths are asked for."""
        return 0.0 if self.data.depths is None else self.train.depth_lambda

    def most_gaussians(self) -> int | None:
        """The least of the caps that there are in numbers."""
        return min((cap for cap in (self.strategy.cap_max, self.memory.cap) if isinstance(cap, int)), default=None)


def preset_recipe(name: str | None) -> dict[str, Any]:
    """What a preset sets; nothing for None. Raises UsageError for a name that there is not."""
    if name is None:
        return {}
    try:
        return dict(PRESETS[name])
    except KeyError:
        raise UsageError(
            f"there is no preset {name!r}", where="--preset", remedy="one of " + ", ".join(PRESETS)
        ) from None


def strategy_recipe(name: str, iterations: int, schedule: Schedule, batch_size: int = 1) -> dict[str, Any]:
    """What a strategy wants otherwise than the settings' own defaults, in a run of so many steps on so many views.

    schedule: of a run of that length.
    """
    if name == "absgrad":
        recipe: dict[str, Any] = {"strategy.long_axis_split": True}
        if schedule.reset_every >= schedule.refine_stop:  # nothing brings down what is faint and in the way
            recipe["strategy.prune_opacity"] = 0.02
        return recipe
    if name != "mcmc":
        return {}
    scale = min(1.0, iterations / REFERENCE_ITERATIONS)
    # A run that makes its own points begins with a tenth of the cap, and is to come to it a while before growth ends.
    refinements = max(1.0, (25_000 - 500) * scale / schedule.refine_every)
    return {
        "model.init_opacity": 0.5,
        "model.init_scale": 0.1,
        "optim.logit_opacities_lr": 5e-2 * math.sqrt(batch_size),
        "schedule.refine_stop": max(1, round(25_000 * scale)),
        "strategy.cap_max": 1_000_000,
        "strategy.grow_factor": max(1.05, 10.0 ** (1.0 / (0.8 * refinements))),
        "strategy.opacity_reg": 0.01,
        "strategy.scale_reg": 0.01,
    }


def build_config(
    flags: dict[str, Any] | None = None,
    *,
    file: Path | None = None,
    assignments: list[str] | None = None,
    preset: str | None = None,
) -> Config:
    """The settings of a new run.

    preset: a name in PRESETS, whose settings everything given wins over.
    flags: dotted key -> value; a value of None means that the flag was not given.
    file: a TOML file with the sections above.
    assignments: ``a.b=value`` strings; the value is read as TOML, else taken as a string.
    Later sources win. Schedule and learning rates are scaled to ``train.iterations``, ``train.batch_size`` and what
    ``model.init`` starts from; keys given explicitly are not. Where the iterations are not given, larger batches make
    fewer steps, on as many views.
    Raises UsageError for unknown keys (with the nearest known one) and for values out of range.
    """
    given = read_settings(flags, file=file, assignments=assignments)
    values = preset_recipe(preset) | given
    try:
        config = Config.model_validate(_nest(values))
        batch, steps = config.train.batch_size, config.train.iterations
        if "train.iterations" not in given:
            values["train.iterations"] = steps = math.ceil(steps / batch)
        schedule = Schedule.scaled(steps)
        recipe = {
            "schedule": schedule.model_dump(),
            "optim": OptimConfig.scaled(steps, batch, made_points=config.model.init in MADE_STARTS).model_dump(),
        }
        strategy = strategy_recipe(config.strategy.name, steps, schedule, batch)
        merged = {**_flatten(config.model_dump()), **_flatten(recipe), **strategy, **values}
        config = Config.model_validate(_nest(merged))
    except ValidationError as error:
        raise _out_of_range(error, file) from None
    return config


def read_settings(
    flags: dict[str, Any] | None = None, *, file: Path | None = None, assignments: list[str] | None = None
) -> dict[str, Any]:
    """Dotted key -> value of all that is given, later sources winning; arguments as in ``build_config``.

    Raises UsageError for unknown keys.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_flatten(_read_toml(file)))
    values.update({key: value for key, value in (flags or {}).items() if value is not None})
    for text in assignments or []:
        key, equals, raw = text.partition("=")
        if not equals:
            raise UsageError(f"--set wants key=value, got {text!r}", remedy="e.g. --set optim.means_lr=1e-4")
        values[key.strip()] = _parse_value(raw.strip())
    known = set(_flatten(Config().model_dump()))
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see docs/settings.md for the keys"
            raise UsageError(f"unknown setting {key!r}", where=file, remedy=hint)
    return values


def flat_settings(config: Config, *, as_json: bool = False) -> dict[str, Any]:
    """Dotted key -> value of every setting. as_json: as it is read back from JSON, infinities as None."""
    return _flatten(json.loads(config.model_dump_json()) if as_json else config.model_dump())


def with_settings(config: Config, values: dict[str, Any]) -> Config:
    """``config`` with other values under dotted keys. Raises UsageError for those out of range."""
    try:
        return Config.model_validate(_nest({**flat_settings(config), **values}))
    except ValidationError as error:
        raise _out_of_range(error, None) from None


def resolve(config: Config, *, auto_cap: int | None = None, memory_cap: int | None = None) -> Config:
    """Return the final settings of a run, which is about to begin.

    auto_cap: the number that ``strategy.cap_max = "auto"`` stands for on the run's scene.
    memory_cap: the number of Gaussians that the memory suffices for.
    """
    values: dict[str, Any] = {}
    if config.strategy.cap_max == "auto" and auto_cap is not None:
        values["strategy.cap_max"] = auto_cap
    if memory_cap is not None:
        values["memory.cap"] = memory_cap
    return with_settings(config, values)


def parse_config(data: dict[str, Any]) -> Config:
    """Settings stored with a run, validated again. Raises pydantic.ValidationError."""
    return Config.model_validate(data)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the settings: {error.strerror}", where=path, remedy="--config names a TOML file"
        ) from None
    except _UNREADABLE as error:
        raise UsageError(
            f"not valid TOML: {error}",
            where=path,
            remedy="a section and a setting look like this: [optim] sh0_lr = 0.01",
        ) from None


def _parse_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except _UNREADABLE:
        return raw


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _out_of_range(error: ValidationError, file: Path | None) -> UsageError:
    """What pydantic found, for people."""
    problems = [f"{'.'.join(map(str, e['loc']))} = {_brief(e['input'])}: {e['msg']}" for e in error.errors()]
    return UsageError(
        "settings out of range: " + "; ".join(problems), where=file, remedy="docs/settings.md has what each one takes"
    )


def _brief(value: object) -> str:
    """A value that someone gave, in at most 100 letters."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."
