"""``splat train``: a scene in, a run folder with checkpoints out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.config import Config


def train(
    scene: Annotated[
        Path,
        typer.Argument(
            metavar="SCENE",
            help="Folder with a COLMAP, nerfstudio or Blender scene; or photos without cameras, or a video, whose "
            "cameras are found first.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Run folder.  [default: output/NAME, numbered]"),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option("--iterations", "--max-steps", "-n", metavar="N", help="Steps of the schedule.  [default: 30000]"),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(
            "--max-time", metavar="T", help="As many steps as 60s, 5m or 2h have room for, start and end included."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            help="Views a step; with the default number of iterations there are fewer steps, on as many views.  "
            "[default: 1, or a view for each rank]",
        ),
    ] = None,
    ranks: options.Ranks = None,
    distributed: options.Distributed = None,
    stop_at: options.StopAt = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            "--blocks",
            metavar="AxB",
            help="Cut the scene into A strips of B blocks, train one after the other, and merge them.",
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option("--block", metavar="K", min=0, help="Only block K of --blocks, 0 to AxB - 1; see splat merge."),
    ] = None,
    resolution: Annotated[
        float | None,
        typer.Option(
            "-r",
            "--resolution",
            metavar="F",
            help="Divide image sides by 1, 2, 4 or 8; more is a width in pixels.  [default: at most 1600 wide]",
        ),
    ] = None,
    images: options.Images = None,
    masks: options.Masks = None,
    mask_mode: options.MaskMode = None,
    depth_loss: options.DepthLoss = False,
    depths: options.Depths = None,
    depth_scale: options.DepthScale = None,
    cache_budget: options.CacheBudget = None,
    max_pixels: options.MaxPixels = None,
    strict: options.Strict = False,
    skip_bad_images: options.SkipBadImages = False,
    format: options.Format = None,
    colmap_model: options.ColmapModel = None,
    skip_missing: options.SkipMissing = False,
    allow_outside: options.AllowOutside = False,
    drop_bad_points: options.DropBadPoints = False,
    scene_extent: options.SceneExtent = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="How Gaussians are added: adc, absgrad, mcmc, or the name of a plug-in.  [default: absgrad]",
        ),
    ] = None,
    cap_max: Annotated[
        str | None,
        typer.Option(
            "--cap-max",
            "--max-gaussians",
            metavar="N|auto|none",
            help="Never more Gaussians than this; auto: as many as the photos can tell apart.  [default: auto]",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", metavar="NAME", help="fast, default or quality: settings that go together.")
    ] = "default",
    vram_budget: options.VramBudget = None,
    offload: options.Offload = False,
    sh_degree: Annotated[
        int | None, typer.Option("--sh-degree", metavar="D", help="Degree of the colour, 0 to 4.  [default: 3]")
    ] = None,
    test_every: Annotated[
        int | None, typer.Option("--test-every", metavar="N", help="Hold out every N-th view; 0: none.  [default: 8]")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same bits.  [default: 42]")] = None,
    init: Annotated[
        str | None,
        typer.Option(
            "--init",
            metavar="HOW",
            help="Start from the scene's points (sfm), from points on the visual hull of transparent photos (hull), "
            "from random ones, or from a model's path.  [default: sfm; where there are no points, hull or random]",
        ),
    ] = None,
    param_space: options.ParamSpace = None,
    lenient: options.Lenient = False,
    drop_nonfinite: options.DropNonfinite = False,
    device: options.Device = "auto",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file with settings; flags win over it.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of docs/settings.md; may be repeated."),
    ] = None,
    white_background: Annotated[bool, typer.Option("--white-background", help="White where nothing is.")] = False,
    random_background: Annotated[bool, typer.Option("--random-background", help="A new colour each step.")] = False,
    antialiased: Annotated[
        bool, typer.Option("--antialiased", help="Keep the brightness of Gaussians smaller than a pixel.")
    ] = False,
    filter_3d: Annotated[
        bool, typer.Option("--filter-3d", help="Gaussians no finer than the photos show, for close-ups and zooms.")
    ] = False,
    pose_opt: Annotated[
        bool, typer.Option("--pose-opt", help="Refine the poses of the training cameras along the way.")
    ] = False,
    exposure: Annotated[
        bool, typer.Option("--exposure", help="Learn each training photo's exposure and white balance.")
    ] = False,
    bilateral_grid: Annotated[
        bool,
        typer.Option(
            "--bilateral-grid", help="The same for each place and brightness of a photo: vignettes, local tone mapping."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move a run that is already in DIR aside instead of refusing.")
    ] = False,
    viewer: options.Viewer = False,
    viewer_port: options.ViewerPort = None,
    viewer_host: options.ViewerHost = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Train Gaussians on the photos of a scene.

    Prints the path of the last checkpoint. Ctrl-C, SIGTERM and SIGHUP end at the next step, after a complete save;
    SIGUSR1 saves, and training goes on. The same command with the same -o goes on with a run that was stopped. Photos
    without cameras are given to `splat sfm` first; what it finds is kept beside the run as NAME-sfm, and used again.

    \b
    Examples:
      splat train scene/
      splat train photos/
      splat train scene/ -r 2 --iterations 7000 -o output/small
      splat train scene/ --max-time 60s
      splat train scene/ --blocks 2x3 -o output/city
      splat train scene/ --viewer
      splat train scene/ | splat render --views
      splat train scene/ --ranks 4
      splat train scene/ --ranks 4 --distributed sharded
      splat train scene/ --init point_cloud.ply
      splat train scene/ --set optim.means_lr=1e-4 --json > log.jsonl
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.ranks import SHARDED, check_sharded, joined_group, start_ranks
    from splatcli.cli.training import build_request, check_batch, default_folder, start_training
    from splatcli.cli.view import live_page

    if white_background and random_background:
        raise UsageError("--white-background and --random-background exclude each other", remedy="give one")
    if exposure and bilateral_grid:
        raise UsageError(
            "--exposure and --bilateral-grid exclude each other",
            remedy="give one; a grid is an exposure for each place of a photo",
        )
    background = "white" if white_background else "random" if random_background else None
    flags: dict[str, Any] = {
        "data.scene": str(scene.absolute()),
        **options.data_flags(
            format=format,
            model=colmap_model,
            images=images,
            masks=masks,
            mask_mode=mask_mode,
            depths=depths,
            depth_loss=depth_loss,
            depth_scale=depth_scale,
            max_pixels=max_pixels,
            strict=strict,
            skip_bad_images=skip_bad_images,
            skip_missing=skip_missing,
            allow_outside=allow_outside,
            drop_bad_points=drop_bad_points,
            scene_extent=scene_extent,
        ),
        "data.blocks": None if blocks is None else options.blocks(blocks),
        "data.resolution": resolution,
        "data.test_every": test_every,
        "model.sh_degree": sh_degree,
        "model.init": init,
        "strategy.name": strategy,
        "strategy.cap_max": options.cap(cap_max),
        "memory.budget": vram_budget,
        "memory.offload": offload or None,
        "train.iterations": iterations,
        "train.batch_size": batch_size,
        "train.seed": seed,
        "train.background": background,
        "train.antialiased": antialiased or None,
        "train.filter_3d": filter_3d or None,
        "data.cache_bytes": cache_budget,
        "views.pose_opt": pose_opt or None,
        "views.exposure": exposure or None,
        "views.bilateral_grid": bilateral_grid or None,
    }
    shared = ranks or distributed
    if max_time is not None and (shared or (batch_size or 1) > 1):
        raise UsageError(
            "--max-time plans for one process and one view a step",
            where="--max-time",
            remedy="give --iterations, or leave out --ranks, --distributed and --batch-size",
        )
    if offload and (shared or (batch_size or 1) > 1 or max_time is not None):
        raise UsageError(
            "--offload is for one process, one view a step, and a number of steps",
            where="--offload",
            remedy="leave out --ranks, --distributed, --batch-size and --max-time",
        )
    with open_output(json=json, quiet=quiet) as out:
        if ranks is not None:
            arguments = sys.argv[1:]
            asked = options.name_of_ranks(arguments)
            return start_ranks(ranks, options.without_ranks(arguments), device=device, mode=distributed, asked=asked)
        with joined_group(distributed, device, out) as (group, own_device):
            from splatcli.config import NAMED_STARTS, build_config
            from splatcli.train.densify import check_strategy

            # Without the batch that ranks have by default, so that another number of them knows the run again.
            unshared = build_config(flags, file=config, assignments=assignments, preset=preset)
            request = build_request(
                unshared,
                **{
                    "--max-time": max_time,
                    "--param-space": None if param_space is None else param_space.value,
                    "--lenient": lenient,
                    "--drop-nonfinite": drop_nonfinite,
                },
            )
            if group is not None and batch_size is None:
                flags["train.batch_size"] = group.size
            settings = build_config(flags, file=config, assignments=assignments, preset=preset)
            check_batch(settings, group)
            check_strategy(settings)
            sharded = distributed == SHARDED
            if sharded:
                check_sharded(settings, viewer=viewer)
            limit = None if max_time is None else options.time_limit(max_time)
            if limit is not None and iterations is not None:
                raise UsageError(
                    "--max-time chooses the steps itself", where="--iterations", remedy="give one of the two"
                )
            named = settings.model.init not in NAMED_STARTS
            options.check_import_options(param_space, lenient, drop_nonfinite, given=named)

            def rebuild_config(values: dict[str, Any]) -> Config:
                return build_config({**flags, **values}, file=config, assignments=assignments, preset=preset)

            blocks_asked = settings.data.blocks is not None
            if blocks_asked:
                options.check_blocks(output, overwrite=overwrite, max_time=max_time, block=block)
                if group is not None:
                    raise UsageError(
                        "a block is trained by one process", where="--blocks", remedy="start one for each --block K"
                    )
            elif block is not None:
                raise UsageError("of how many blocks?", where="--block", remedy="e.g. --blocks 2x2 --block 0")
            with live_page(viewer, host=viewer_host, port=viewer_port, out=out) as live:
                if blocks_asked:
                    from splatcli.cli.blocks import train_blocks

                    return train_blocks(
                        settings,
                        block,
                        place=output or default_folder(scene),
                        import_options=options.import_options(param_space, lenient, drop_nonfinite),
                        stop_at=stop_at,
                        device=own_device,
                        rebuild_config=rebuild_config,
                        live=live,
                        out=out,
                        request=request,
                    )
                return start_training(
                    settings,
                    import_options=options.import_options(param_space, lenient, drop_nonfinite),
                    output=output,
                    overwrite=overwrite,
                    stop_at=stop_at,
                    device=own_device,
                    limit=limit,
                    rebuild_config=rebuild_config,
                    live=live,
                    out=out,
                    request=request,
                    group=group,
                    sharded=sharded,
                )
