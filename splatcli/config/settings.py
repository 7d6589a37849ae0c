"""Config: every setting of a run with its default and bounds, section by section.

Values and names are those of INRIA's program and gsplat; where the two differ, the description of the field says so.
``Schedule.scaled`` and ``OptimConfig.scaled`` fit the 30,000-step recipe to a shorter run once, when the run begins.
The result is stored with the run, in absolute steps, so a resumed run follows the same schedule.

A Config is frozen. build.py makes it: ``build_config`` of what a command line gives, ``resolve`` what is final when a
run begins; a later change, such as that of --max-time or of a recovery, is another Config in the train state
(``with_settings``). The description of a field is its row in docs/settings.md and the help of its flag.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic.fields import FieldInfo

from splatcli.config.section import Flag, Section
from splatcli.sizes import parse_count, parse_size

#: The run length that the field's schedules are written for.
REFERENCE_ITERATIONS = 30_000

#: The values of ``model.init`` beside a path: the points of the scene, and the two kinds of points that a run makes.
SFM, HULL, RANDOM = "sfm", "hull", "random"
MADE_STARTS = (HULL, RANDOM)
NAMED_STARTS = (SFM, *MADE_STARTS)

#: Blocks that a scene may be cut into.
MAX_BLOCKS = 1_000


def parse_blocks(text: str) -> tuple[int, int]:
    """Return (A, B), strips and columns, of ``AxB``. Raises ValueError for more blocks than MAX_BLOCKS."""
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text.strip().lower())
    if found is None:
        raise ValueError("takes strips x columns, e.g. --blocks 2x3")
    strips, columns = int(found[1]), int(found[2])
    if strips * columns > MAX_BLOCKS:
        raise ValueError(f"makes {strips * columns} blocks; {MAX_BLOCKS} is the maximum")
    return strips, columns


def _block_grid(value: object) -> object:
    """Return ``AxB`` in its plain form. Raises as parse_blocks()."""
    return "x".join(map(str, parse_blocks(value))) if isinstance(value, str) else value


#: Hexadecimal digits of a colour, two or one for each of R, G, B; of six the sign, which begins a shell's comment, may
#: lack.
_HEX = re.compile(r"#?[0-9a-f]{6}|#[0-9a-f]{3}")


def parse_colour(text: str) -> tuple[float, float, float]:
    """Return R, G, B in 0..1 of one of CSS' colour names, ``#rrggbb``, ``#rgb`` or ``r,g,b``. Raises ValueError."""
    from PIL import ImageColor

    word = text.strip().lower()
    if word in ImageColor.colormap:
        r, g, b = (value / 255 for value in ImageColor.getrgb(word)[:3])
        return r, g, b
    if _HEX.fullmatch(word):
        digits = word.removeprefix("#")
        size = len(digits) // 3
        r, g, b = (int(digits[i : i + size] * (2 // size), 16) / 255 for i in range(0, 3 * size, size))
        return r, g, b
    try:
        values = [float(part) for part in word.split(",")]
    except ValueError:
        values = []
    if len(values) == 3 and all(0.0 <= value <= 1.0 for value in values):
        return values[0], values[1], values[2]
    forms = "black, white or another name of CSS, #rrggbb, or r,g,b from 0 to 1"
    if len(values) == 3 and all(value in range(256) for value in values):
        r, g, b = map(int, values)
        raise ValueError(f"levels of 0 to 255 are #{r:02x}{g:02x}{b:02x}; {forms}")
    near = difflib.get_close_matches(word, ImageColor.colormap, n=1)
    raise ValueError(f"did you mean {near[0]}? {forms}" if near else forms)


def _background(value: object) -> object:
    """Return black, white or random as they are, and another colour as ``#rrggbb``. Raises as parse_colour()."""
    if isinstance(value, list | tuple):  # of Python, and of TOML
        value = ",".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):  # 808080, which TOML takes for a number
        value = str(value)
    if not isinstance(value, str):
        return value
    if (word := value.strip().lower()) in ("black", "white", "random"):
        return word
    try:
        r, g, b = (math.floor(255 * part + 0.5) for part in parse_colour(value))
    except ValueError as error:
        raise ValueError(f"is no colour: {error}; or random") from None
    found = f"#{r:02x}{g:02x}{b:02x}"
    return {"#000000": "black", "#ffffff": "white"}.get(found, found)


#: Camera models that images of distorted lenses are trained as, see ``data.projection``.
Projection = Literal["auto", "pinhole", "fisheye"]


class DataConfig(Section):
    """Images, cameras and points, and how they are read."""

    panel = "Data"

    scene: str = Field("", description="Folder of the scene.")
    # A name of a layout is looked up where a scene is read (scene/read.py).
    format: Annotated[
        Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=100)] | None,
        Flag("--format", metavar="LAYOUT", default="what the folder holds"),
    ] = Field(
        None,
        description="Layout of the scene: colmap, nerfstudio (also instant-ngp), blender, opf, metashape, "
        "realitycapture, opensfm (also OpenDroneMap), openmvg, polycam, record3d or that of a plug-in.",
    )
    model: Annotated[str | None, Flag("--model", metavar="DIR", default="the largest")] = Field(
        None, description="Folder of a COLMAP model inside the scene."
    )
    images: Annotated[str | None, Flag("--images", metavar="DIR", default="the layout's own")] = Field(
        None, description="Folder of images inside the scene."
    )
    resolution: Annotated[float | None, Flag("-r", "--resolution", metavar="F", default="at most 1600 wide")] = Field(
        None, gt=0, description="Divide image sides by 1, 2, 4 or 8; a larger number is a width in pixels."
    )
    test_every: Annotated[int, Flag("--test-every", metavar="N")] = Field(
        8, ge=0, description="Hold out every N-th view in name order for evaluation; 0 holds out none."
    )
    masks: Annotated[str | None, Flag("--masks", metavar="DIR", default="the layout's own, or masks/")] = Field(
        None, description="Folder of masks inside the scene, or none; alpha uses the transparency of the images."
    )
    mask_mode: Annotated[Literal["ignore", "transparent"], Flag("--mask-mode", metavar="MODE")] = Field(
        "ignore",
        description="ignore leaves masked pixels out of loss and scores; transparent treats them as empty, so that the "
        "background shows.",
    )
    depths: Annotated[
        str | None,
        Flag(
            "--depth-loss",
            value="auto",
            help="Supervise depth with the depth maps that transforms.json names, or with SfM points.",
        ),
        Flag(
            "--depths",
            metavar="DIR",
            help="Supervise depth with the depth maps in this folder inside the scene, one per image (PNG, TIFF, .npy "
            "or .npz): z along the optical axis, 0 where unknown.",
        ),
    ] = Field(
        None,
        description="Supervise depth: auto uses the depth maps that the scene names, or the SfM points of each image "
        "(a COLMAP model with tracks); a path names a folder of depth maps inside the scene.",
    )
    depth_scale: Annotated[
        float | None,
        Flag(
            "--depth-scale",
            metavar="X",
            default="depth_unit_scale_factor or integer_depth_scale of transforms.json, else 0.001 for maps of "
            "integers and 1 for others",
        ),
    ] = Field(None, gt=0, description="Scene units of the value 1 in a depth map.")
    depth_type: Annotated[
        Literal["metric", "relative"] | None,
        Flag(
            "--depth-type",
            metavar="TYPE",
            default="relative where depth_params.json lies beside the COLMAP model, else metric",
        ),
    ] = Field(
        None,
        description="metric: depth maps are z in scene units. relative: they are the output of a network for single "
        "images, depth or inverse depth; scale and shift are fitted to the SfM points of each image.",
    )
    blocks: Annotated[str | None, BeforeValidator(_block_grid), Flag("--blocks", metavar="AxB", type=str)] = Field(
        None, description="Cut the scene into A strips of B blocks, train one after the other, and merge them."
    )
    block: Annotated[int | None, Flag("--block", metavar="K")] = Field(
        None, ge=0, description="Train only block K of --blocks, 0 to AxB - 1; splat merge joins them."
    )
    block_share: float = Field(
        0.8, gt=0, le=1, description="Refuse blocks of which one holds a larger share of the scene's points."
    )
    cache_bytes: Annotated[
        int | None,
        BeforeValidator(parse_size),
        Flag("--cache-budget", metavar="SIZE", default="a quarter of the memory", type=str, panel="Memory"),
    ] = Field(
        None,
        gt=0,
        description="Memory for decoded images, masks and depth maps, as 8GiB or 800M; what does not fit is decoded "
        "each time.",
    )
    max_pixels: Annotated[
        int | None, Flag("--max-pixels", metavar="N", default="what a quarter of the memory decodes")
    ] = Field(None, gt=0, description="Refuse images with more pixels.")
    skip_missing: Annotated[bool, Flag("--skip-missing")] = Field(
        False, description="Skip cameras whose image is missing."
    )
    allow_outside: Annotated[bool, Flag("--allow-outside")] = Field(
        False, description="Read images and points that the scene's files place outside its folder."
    )
    points: Annotated[str | None, Flag("--points", metavar="PATH", default="the scene's own")] = Field(
        None,
        description="Points in place of the scene's own, in the frame of its cameras: a PLY, or the folder of a COLMAP "
        "model or of a scene that splat sfm made.",
    )
    drop_bad_points: Annotated[bool, Flag("--drop-bad-points")] = Field(
        False, description="Leave out points that are NaN or infinite instead of refusing the scene."
    )
    max_points: int = Field(
        5_000_000,
        gt=0,
        description="Maximum number of points to read, spread evenly over the file; a Gaussian in training takes about "
        "1 kB.",
    )
    max_point_error: float = Field(
        3.0,
        ge=0,
        description="Leave out points that two images see with more than so many times the median reprojection error; "
        "0: none.",
    )
    projection: Annotated[Projection, Flag("--projection", metavar="MODEL")] = Field(
        "auto",
        description="Camera that images of distorted lenses are trained as: pinhole, which leaves out what lies far to "
        "the side; fisheye, up to 85 degrees from the optical axis; auto is fisheye for lenses that see farther than "
        "60 degrees from it.",
    )
    near_share: float = Field(
        0.2,
        ge=0,
        le=0.7,
        description="Near plane of a camera, as a share of its distance to the nearest sparse point; without points at "
        "0.01 units, or at a hundredth of a smaller scene's extent; 0: 0.01 units.",
    )
    # Positions are float32, and so are their squares.
    scene_extent: Annotated[float | None, Flag("--scene-extent", metavar="SIZE", default="from the cameras")] = Field(
        None, gt=0, le=1e12, description="Size of the scene in its own units; it scales learning rates and thresholds."
    )
    skip_bad_images: Annotated[bool, Flag("--skip-bad-images")] = Field(
        False, description="Decode every image before the first step, and skip damaged ones."
    )
    strict: Annotated[bool, Flag("--strict")] = Field(
        False, description="Decode every image before the first step, and refuse damaged ones."
    )

    def images_only(self) -> DataConfig:
        """Return the settings for readers that need the images only.

        Depth maps are neither read nor required, nor are points in place of the scene's own, unless blocks are found by
        them.
        """
        return self.model_copy(update={"depths": None, "points": None if self.block is None else self.points})


class ModelConfig(Section):
    """The Gaussians before the first step."""

    sh_degree: Annotated[int, Flag("--sh-degree", metavar="D")] = Field(
        3, ge=0, le=4, description="Degree of the spherical harmonics, 0 to 4."
    )
    init: Annotated[str, Flag("--init", metavar="HOW", default="sfm; without SfM points, hull or random")] = Field(
        "sfm",
        description="Start from SfM points (sfm), points on the visual hull of transparent images (hull), random "
        "points (random), or the model at this path.",
    )
    init_opacity: float = Field(0.1, gt=0, lt=1, description="Opacity of a new Gaussian.")
    init_scale: float = Field(
        1.0, gt=0, description="Size of a new Gaussian, times the RMS distance to its three nearest neighbours."
    )
    # A tenth of the cap leaves most of it for where there is something.
    random_points: int | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="Number of points that hull and random start from; none: 100,000, or a tenth of the cap where that "
        "is less, but at least 1,000.",
    )
    sky_points: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Number of directions, evenly over the sphere, in which a point is added far away where the images "
        "show no SfM point, as in the sky; none: a fifth of the cap, at most 20,000; 0 adds no points.",
    )


class OptimConfig(Section):
    """Adam, one learning rate per group of parameters."""

    means_lr: float = Field(
        1.6e-4, gt=0, description="Learning rate of the means, times the scene extent; it falls log-linearly."
    )
    means_lr_final: float = Field(
        1.6e-6, gt=0, description="Learning rate of the means after `schedule.lr_steps` steps, where it stays."
    )
    means_size_power: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Power of a Gaussian's size, relative to the others', by which the learning rate of its mean "
        "grows; 0: one rate for all. By default 0.5, and 0 where views are far apart or the run makes its own points.",
    )
    log_scales_lr: float = Field(
        5e-3,
        gt=0,
        description="Learning rate of the log-scales; up to twice as high in short runs that make their own points.",
    )
    quats_lr: float = Field(1e-3, gt=0, description="Learning rate of the quaternions.")
    logit_opacities_lr: float = Field(
        2.5e-2,
        gt=0,
        description="Learning rate of the opacity logits: INRIA's value since October 2024; gsplat uses 0.05.",
    )
    sh0_lr: float = Field(2.5e-3, gt=0, description="Learning rate of the constant SH coefficient.")
    # It does not fall: coefficients out of view catch up with one rate.
    shN_lr: float = Field(
        1.25e-4, gt=0, description="Learning rate of the other SH coefficients, constant during a run."
    )
    final_factor: float = Field(
        1.0,
        gt=0,
        description="Factor that the rates of quaternions, log-scales, opacity logits and the constant SH coefficient "
        "reach log-linearly after `schedule.lr_steps` steps.",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's second moment.")
    # A smaller one is zero in float32.
    eps: float = Field(1e-15, ge=1e-37, description="Term that keeps Adam from dividing by zero.")

    @classmethod
    def scaled(cls, iterations: int, batch_size: int = 1, *, made_points: bool = False) -> OptimConfig:
        """Return higher learning rates for a shorter run, falling towards its end; the recipe's from 30,000 views on.

        With several views per step an epoch has fewer steps: rates grow with the root of the batch size, and moments
        decay in one step as much as in that many single ones (beta to its power; 1 - batch (1 - beta) would be
        negative). The number of views decides whether a run is short.

        Adam moves a parameter by about its learning rate per step: with a tenth of the steps Gaussians would not reach
        their places. Rates that are four times as high in the beginning, as for 7,000 steps and fewer, have to fall for
        exact results in the end. The higher SH coefficients begin at zero with the lowest rate, which is too low for a
        short run: it stays four times as high (benchmarks/README.md has the figures).

        made_points: the run makes its own points, whose sizes carry little information. Twice the rate is better for
        their scales, and worse for scenes with SfM points and a sky.
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


class Schedule(Section):
    """When things happen, in steps counted from 1."""

    refine_start: int = Field(500, ge=0, description="Gaussians are added and pruned after this step.")
    refine_stop: int = Field(15_000, ge=0, description="Gaussians are added and pruned until this step.")
    refine_every: int = Field(100, gt=0, description="Steps from one refinement to the next.")
    reset_every: int = Field(3_000, gt=0, description="Steps from one opacity reset to the next.")
    prune_huge_start: int = Field(
        3_000,
        ge=0,
        description="Refinements prune huge Gaussians too from this step on; at least 300 in a short run.",
    )
    sh_degree_start: int | None = Field(
        None,
        ge=0,
        le=4,
        description="SH degree of the first steps; by default that of the model which the run starts from, else 0.",
    )
    sh_degree_interval: int = Field(1_000, gt=0, description="Steps from one SH degree to the next.")
    num_downscales: int | None = Field(
        None,
        ge=0,
        le=5,
        description="How many times image sides are halved at the beginning; none: once where the training images have "
        "400,000 pixels or more and the run starts from no model, else never.",
    )
    resolution_schedule: int = Field(9_000, gt=0, description="Steps after which image sides double.")
    lr_steps: int = Field(
        REFERENCE_ITERATIONS,
        gt=0,
        description="Steps over which learning rates fall to their final values; the length of the run.",
    )

    @classmethod
    def scaled(cls, iterations: int) -> Schedule:
        """Return the 30,000-step recipe scaled to a shorter run (compare gsplat's ``steps_scaler``), never to a longer.

        Two intervals do not shrink in proportion. ``refine_every`` stays while fifteen refinements fit into the window:
        a decision needs statistics over enough views. ``reset_every`` is at least half as long, and a run of up to
        6,000 steps has no reset: recovery from one takes many steps.
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
            resolution_schedule=scale(9_000),
            lr_steps=max(1, iterations),
        )


def _cap(value: object) -> int | Literal["auto"] | None:
    """Return a maximum number of Gaussians from any of its forms, with one kind of error for all."""
    value = parse_count(value)
    if value is None or value == "none":
        return None
    if value == "auto":
        return "auto"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError('takes a number above 0, "auto" or "none"')
    return value


def _strategy_name(value: object) -> object:
    return "adc" if value == "default" else value


class StrategyConfig(Section):
    """Density control: where Gaussians are added and removed."""

    # absgrad is the default by measurement (docs/quality.md). Packages bring other strategies
    # (train/densify/__init__.py), so only a run that uses a name looks for it.
    name: Annotated[
        str,
        BeforeValidator(_strategy_name),
        Field(pattern=r"^\w[\w.-]*$", max_length=100),
        Flag("--strategy", metavar="NAME", help="Density control: adc, absgrad, mcmc, or the name of a plug-in."),
    ] = Field(
        "absgrad",
        description="adc (gsplat's default, a name that is accepted too) clones, splits, prunes and resets; absgrad "
        "(AbsGS) does so by the absolute gradients of the pixels; mcmc relocates, and grows by a factor; another name "
        "is that of a plug-in.",
    )
    cap_max: Annotated[
        int | Literal["auto"] | None,
        PlainValidator(_cap),
        Flag(
            "--cap-max",
            "--max-gaussians",
            metavar="N|auto|none",
            help="Maximum number of Gaussians, as 500k or 1M; auto estimates it from the images.",
            default="auto",
            type=str,
        ),
    ] = Field(
        None,
        description="Maximum number of Gaussians; auto estimates it from the images: half the number of pixels of an "
        "image, times the root of the number of views over 40. none sets no maximum.",
    )
    # The sums of absolute gradients are larger, hence the other threshold of absgrad (docs/quality.md).
    grow_grad2d: float | None = Field(
        None,
        gt=0,
        description="Mean gradient norm of the projected mean, in NDC, above which a Gaussian grows; none: 0.0002 for "
        "adc, 0.0003 for absgrad.",
    )
    grow_scale3d: float = Field(
        0.01,
        gt=0,
        description="Smaller Gaussians are cloned, larger ones are split; times the scene extent. It has no effect "
        "with `strategy.long_axis_split`.",
    )
    prune_opacity: float = Field(
        0.005, ge=0, lt=1, description="Gaussians of less opacity are removed, or relocated by mcmc."
    )
    # INRIA's value takes away what surrounds a scene and brings nothing back (docs/quality.md); what stands before a
    # camera is larger still.
    prune_scale3d: float = Field(
        0.5,
        gt=0,
        description="Larger Gaussians are removed from `schedule.prune_huge_start` on; times the scene extent. INRIA "
        "uses 0.1.",
    )
    max_scale3d: float = Field(
        0.3,
        ge=0,
        description="Largest standard deviation of a Gaussian, times its distance from the middle of the training "
        "cameras, or times the scene extent where that is larger; 0: no limit.",
    )
    prune_near: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Gaussians nearer to a training camera than this part of its distance to the nearest sparse point "
        "are removed at each refinement; 0 removes none.",
    )
    # By measurement (docs/quality.md), as absgrad itself.
    prune_weakest: float | None = Field(
        None,
        ge=0,
        le=0.5,
        description="adc, absgrad, under a cap: part of the Gaussians that is pruned, seven times while the run "
        "densifies. They are those that contribute least to any view, and leave their place to others; none: 0.1 for "
        "absgrad from a visual hull, else 0.",
    )
    revised_opacity: bool = Field(
        True,
        description="adc, absgrad: clone and split preserve total opacity; INRIA and gsplat leave each half as opaque "
        "as the original.",
    )
    # strategy_recipe() sets it for absgrad (docs/quality.md).
    long_axis_split: bool = Field(
        False,
        description="adc, absgrad: Gaussians of any size are split into two halves along their longest axis. Together "
        "they spread as far as the original, and with `strategy.revised_opacity` they are as opaque as their length "
        "requires. Otherwise small ones are cloned, and large ones are split at random.",
    )
    opacity_reg: float = Field(0.0, ge=0, description="Weight of the mean opacity in the loss.")
    scale_reg: float = Field(0.0, ge=0, description="Weight of the mean standard deviation in the loss, world units.")
    grow_factor: float = Field(
        1.05, ge=1, le=100, description="mcmc: factor of the number of Gaussians per refinement."
    )
    noise_lr: float = Field(5e5, ge=0, description="mcmc: strength of the noise, times the learning rate of the means.")

    @property
    def grow_threshold(self) -> float:
        """``grow_grad2d`` as given, or the strategy's own."""
        return self.grow_grad2d or (3e-4 if self.name == "absgrad" else 2e-4)


class TrainConfig(Section):
    """The training loop."""

    iterations: Annotated[
        int, BeforeValidator(parse_count), Flag("--iterations", "--max-steps", "-n", metavar="N", type=str)
    ] = Field(
        REFERENCE_ITERATIONS,
        gt=0,
        description="Number of steps, as 30000 or 30k. The default is divided by `train.batch_size`.",
    )
    batch_size: Annotated[int, Flag("--batch-size", metavar="N", default="1, or one for each rank", panel="Expert")] = (
        Field(1, ge=1, le=4096, description="Views per step; their gradients are averaged.")
    )
    seed: Annotated[int, Flag("--seed", metavar="N", panel="Expert")] = Field(
        42, description="Seed of all random numbers; the same seed gives the same bits."
    )
    ssim_lambda: float = Field(
        0.2, ge=0, le=1, description="The loss is (1 - `ssim_lambda`) L1 + `ssim_lambda` (1 - SSIM)."
    )
    background: Annotated[
        str,
        BeforeValidator(_background),
        Flag("--white-background", value="white", help="Train and render over white."),
        Flag("--random-background", value="random", help="Train over a new colour in each step."),
    ] = Field(
        "black",
        description="Background: random, which is a new colour in each step, or a colour: black, white or another name "
        "of CSS, #rrggbb, or r,g,b from 0 to 1.",
    )
    antialiased: Annotated[bool, Flag("--antialiased")] = Field(
        False, description="Preserve the brightness of Gaussians smaller than a pixel (Mip-Splatting's 2D filter)."
    )
    filter_3d: Annotated[bool, Flag("--filter-3d")] = Field(
        False, description="Apply Mip-Splatting's 3D smoothing filter, for close-ups and zooms."
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Part of the Gaussians that a step leaves out at the end of the run, rising linearly from 0 "
        "(DropGaussian); none: 0.2 where training views are 20 degrees or more apart as seen from the sparse "
        "points (80 % quantile of the angles to the next view), else 0. The model is rendered and exported with the "
        "opacities of the mean step, 1 minus this part times those of training.",
    )
    sh_views: float = Field(
        3.0,
        ge=0,
        description="Effective number of training views that show a Gaussian at which the SH coefficients of degree 3 "
        "and above count half in the trained model: less with fewer views, more with more. Training itself does not "
        "see it. 0: they always count in full.",
    )
    sh_prior: float | None = Field(
        None,
        ge=0,
        description="Effective number of views that the mean view-dependent colour of all Gaussians counts as, beside "
        "the views that show a Gaussian, in the trained model; none: 1 where training views are 20 degrees or more "
        "apart (as for dropout), else 0: only `train.sh_views` applies.",
    )
    alpha_lambda: float = Field(
        0.2,
        ge=0,
        description="Weight of the mean of (1 - alpha)^2 in the loss of the second half of a run over black, so that "
        "dark surfaces become opaque. Pixels of at most 5 in 255 do not count, nor images with transparency: they may "
        "be empty.",
    )
    mask_lambda: float = Field(
        0.01,
        ge=0,
        description="Weight of the mean alpha of masked pixels in the loss of the second half of a run, so that what "
        "no image shows becomes empty instead of haze.",
    )
    depth_lambda: float = Field(
        0.1, ge=0, description="Weight of the depth term, which `data.depths` turns on: about the mean relative error."
    )
    max_view_error: float = Field(
        0.8,
        ge=0,
        description="Leave out training views that do not fit the others, after 0.4 and 0.7 of the steps: images of "
        "something else, wrong poses, images 1.3 times as bright or dark as the render. The error is 1 - SSIM of "
        "render and image, divided by that of the image and itself shifted by 1 % of its longer side; an outlier's is "
        "above this. A model whose median error is more than this / 1.6 leaves none out. 0: none.",
    )
    eval_every: int = Field(
        0,
        ge=0,
        description="Steps from one evaluation on the held-out views to the next; 0 evaluates at the end only. A "
        "refinement or opacity reset of the same step comes after it.",
    )
    tensorboard: Annotated[bool, Flag("--tensorboard", panel="Viewer")] = Field(
        False,
        description="Write curves for TensorBoard (pip install 'splatcli[tensorboard]') to `tensorboard` in the run "
        "folder: loss, number of Gaussians, PSNR and SSIM.",
    )


#: The settings of ViewsConfig that map the colours of an image, of which a run trains one at most.
COLOUR_MAPS = ("exposure", "bilateral_grid", "ppisp")


class ViewsConfig(Section):
    """Parameters of the training views, trained along with the Gaussians."""

    pose_opt: Annotated[bool, Flag("--pose-opt")] = Field(
        False, description="Optimise the poses of the training cameras."
    )
    pose_lr: float = Field(
        5e-4,
        gt=0,
        le=1,
        description="Learning rate of rotations (radians) and translations (scene extents); it falls log-linearly.",
    )
    pose_lr_final: float = Field(
        5e-5, gt=0, le=1, description="Learning rate of poses after `schedule.lr_steps` steps, where it stays."
    )
    # While renders are blurred, so are the gradients of poses: they move good cameras, and held-out ones stay behind.
    pose_start: float = Field(
        0.2, ge=0, lt=1, description="Part of `schedule.lr_steps` after which poses begin to change."
    )
    pose_reg: float = Field(1e-6, ge=0, description="Weight of half the squared pose change in the loss.")
    exposure: Annotated[bool, Flag("--exposure")] = Field(
        False, description="Optimise the exposure and white balance of each training image: an affine colour map."
    )
    exposure_lr: float = Field(1e-2, gt=0, description="Learning rate of the colour maps; it falls log-linearly.")
    exposure_lr_final: float = Field(
        1e-3, gt=0, description="Learning rate of the colour maps after `schedule.lr_steps` steps, where it stays."
    )
    bilateral_grid: Annotated[bool, Flag("--bilateral-grid")] = Field(
        False,
        description="Optimise a grid of 16x16x8 affine colour maps for each training image, by place and brightness: "
        "vignettes, local tone mapping.",
    )
    bilateral_grid_lr: float = Field(2e-3, gt=0, description="Learning rate of the grids; it falls log-linearly.")
    bilateral_grid_lr_final: float = Field(
        2e-5, gt=0, description="Learning rate of the grids after `schedule.lr_steps` steps, where it stays."
    )
    bilateral_grid_tv: float = Field(10.0, ge=0, description="Weight of the total variation of a grid in the loss.")

    ppisp: Annotated[bool, Flag("--ppisp")] = Field(
        False,
        description="Optimise PPISP: exposure and white balance of each training image, vignetting and response of "
        "each camera.",
    )
    ppisp_lr: float = Field(1e-2, gt=0, description="Learning rate of PPISP's exposures; it falls log-linearly.")
    ppisp_lr_final: float = Field(
        1e-3, gt=0, description="Learning rate of PPISP's exposures after `schedule.lr_steps` steps, where it stays."
    )
    ppisp_reg: float = Field(1.0, ge=0, description="Weight of PPISP's prior in the loss.")

    @model_validator(mode="after")
    def _one_colour_map(self) -> ViewsConfig:
        if sum(getattr(self, name) for name in COLOUR_MAPS) > 1:
            *others, last = COLOUR_MAPS
            raise ValueError(
                f"views.{', views.'.join(others)} and views.{last} exclude each other: each maps an image's colours"
            )
        return self

    @property
    def colour_map(self) -> str | None:
        """The one of COLOUR_MAPS that is trained; None: none is."""
        return next((name for name in COLOUR_MAPS if getattr(self, name)), None)

    @property
    def trained(self) -> bool:
        """Whether any parameter of the views is trained."""
        return self.pose_opt or self.colour_map is not None


class SaveConfig(Section):
    """Checkpoints."""

    every_minutes: float = Field(2.0, gt=0, description="Minutes from one checkpoint to the next.")
    steps: tuple[int, ...] = Field(
        (7_000, 30_000), description="Checkpoints are saved after these steps too, and never deleted."
    )
    keep_last: int = Field(2, ge=1, description="Number of other checkpoints to keep.")
    patience_minutes: float = Field(
        10.0,
        ge=0,
        description="Minutes that a finished run waits for disk space when its last checkpoint cannot be written.",
    )


class GuardConfig(Section):
    """Checks of a run in progress."""

    finite_every: int = Field(
        100,
        ge=0,
        description="Steps from one check of all parameters and moments for NaN and infinity to the next; 0 checks at "
        "saves only.",
    )
    max_rollbacks: int = Field(
        3,
        ge=0,
        description="Number of times that a run returns to its last checkpoint after diverging, and as often after "
        "running out of memory.",
    )
    probe_every: int = Field(
        500, ge=0, description="Steps from one measurement of the probe views to the next; 0 measures none."
    )
    probe_views: int = Field(3, gt=0, description="Number of training views to measure, evenly spaced.")
    psnr_drop: float = Field(3.0, gt=0, description="Lasting loss of train PSNR that raises an alarm, dB.")
    reset_window: int = Field(1_000, ge=0, description="Steps after an opacity reset whose measurements are ignored.")
    prune_jump: float = Field(
        0.5, gt=0, le=1, description="Share of the Gaussians that one refinement may remove without an alarm."
    )


class MemoryConfig(Section):
    """Memory limits."""

    panel = "Memory"

    budget: Annotated[
        int | None,
        BeforeValidator(parse_size),
        Flag(
            "--vram-budget",
            metavar="SIZE",
            default="what is free",
            type=str,
            help="Maximum memory, as 8GiB or 800M: of the GPU, or of the process with --device cpu. The number of "
            "Gaussians is limited accordingly.",
        ),
    ] = Field(
        None, gt=0, description="Maximum memory in bytes, or as 8GiB: of the GPU, or of the process with --device cpu."
    )
    cap: int | None = Field(
        None,
        gt=0,
        description="Maximum number of Gaussians; a run with a budget sets it at its first step and keeps it when it "
        "is resumed.",
    )
    offload: Annotated[bool, Flag("--offload")] = Field(
        False,
        description="Keep the higher SH coefficients and their moments, three quarters of a Gaussian, in host memory, "
        "or in a file in the run folder with --device cpu. Slower; the results are bit-identical.",
    )


class Config(Section):
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
        """Weight of the depth term; 0 without depth supervision."""
        return 0.0 if self.data.depths is None else self.train.depth_lambda

    def max_gaussians(self) -> int | None:
        """Return the lower of the caps that are numbers; None without one."""
        return min((cap for cap in (self.strategy.cap_max, self.memory.cap) if isinstance(cap, int)), default=None)


def sections() -> dict[str, type[Section]]:
    """Return the class of each section of Config by its name."""
    return {name: cast(type[Section], info.annotation) for name, info in Config.model_fields.items()}


def setting_fields() -> dict[str, FieldInfo]:
    """Return the field of each setting by its dotted key, in order."""
    return {f"{name}.{key}": info for name, section in sections().items() for key, info in section.model_fields.items()}


def setting_flags() -> dict[str, list[Flag]]:
    """Return the flags of each setting that has any, by its dotted key, in order."""
    found = {key: [one for one in info.metadata if isinstance(one, Flag)] for key, info in setting_fields().items()}
    return {key: flags for key, flags in found.items() if flags}
