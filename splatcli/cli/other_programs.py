"""Command lines and folders as other programs want them: what ``splat train`` makes of them."""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splatcli.cli.options import Command
from splatcli.errors import UsageError

#: Flags of the original program, gsplat and nerfstudio -> what stands for them; "" takes the value alone, a name with
#: "=" is a setting.
_FLAGS = {
    "-s": "",
    "--source_path": "",
    "--source-path": "",
    "--data": "",
    "--data_dir": "",
    "--data-dir": "",
    "-m": "-o",
    "--model_path": "-o",
    "--model-path": "-o",
    "--result_dir": "-o",
    "--result-dir": "-o",
    "--output-dir": "-o",
    "--output_dir": "-o",
    "--max-num-iterations": "-n",
    "--max_num_iterations": "-n",
    "--max_steps": "-n",
    "--sh_degree": "--sh-degree",
    "--test_every": "--test-every",
    "--cap_max": "--cap-max",
    "--data_factor": "-r",
    "--data-factor": "-r",
    "--start_checkpoint": "--init",
    "--init_type": "--init",
    "--init_num_pts": "model.random_points=",
    "--densify_grad_threshold": "strategy.grow_grad2d=",
    "--densify_from_iter": "schedule.refine_start=",
    "--densify_until_iter": "schedule.refine_stop=",
    "--densification_interval": "schedule.refine_every=",
    "--opacity_reset_interval": "schedule.reset_every=",
    "--percent_dense": "strategy.grow_scale3d=",
    "--lambda_dssim": "train.ssim_lambda=",
    "--ssim_lambda": "train.ssim_lambda=",
    "--position_lr_init": "optim.means_lr=",
    "--position_lr_final": "optim.means_lr_final=",
    "--feature_lr": "optim.sh0_lr=",
    "--opacity_lr": "optim.logit_opacities_lr=",
    "--scaling_lr": "optim.log_scales_lr=",
    "--rotation_lr": "optim.quats_lr=",
    "--strategy.grow-grad2d": "strategy.grow_grad2d=",
    "--strategy.grow-scale3d": "strategy.grow_scale3d=",
    "--strategy.prune-opa": "strategy.prune_opacity=",
    "--strategy.refine-start-iter": "schedule.refine_start=",
    "--strategy.refine-stop-iter": "schedule.refine_stop=",
    "--strategy.refine-every": "schedule.refine_every=",
    "--strategy.reset-every": "schedule.reset_every=",
    "--strategy.cap-max": "--cap-max",
}

#: Flags that take several numbers -> the setting that is their list.
_LISTS = {"--save_iterations": "save.steps=", "--checkpoint_iterations": "save.steps=", "--save_steps": "save.steps="}

#: Switches of theirs -> ours; none where splat does so anyway.
_SWITCHES = {
    "--white_background": ["--white-background"],
    "--random_background": ["--random-background"],
    "--antialiasing": ["--antialiased"],
    "--train_test_exp": ["--exposure"],
    "--pose_opt": ["--pose-opt"],
    "--use_bilateral_grid": ["--bilateral-grid"],
    "--eval": [],
    "--packed": [],
    "--disable_viewer": [],
}


class TrainCommand(Command):
    """Answers the flags of other programs with the command line that they stand for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = translated(args)
        if ours is not None and not ctx.resilient_parsing:
            theirs = next(word for word in args if word.partition("=")[0] in (*_FLAGS, *_LISTS, *_SWITCHES))
            raise UsageError(
                "this is a flag of another program",
                where=theirs.partition("=")[0],
                remedy=f"splat train {shlex.join(ours)}",
            )
        return super().parse_args(ctx, args)


def translated(words: Sequence[str]) -> list[str] | None:
    """Return the words after ``splat train`` that mean the same; None where there is no flag of another program."""
    scene: list[str] = []
    others: list[str] = []
    pending = deque(words)
    changed = False
    while pending:
        word = pending.popleft()
        name, equals, value = word.partition("=")
        if word == "--":
            others += [word, *pending]
            pending.clear()
        elif name in _SWITCHES:
            changed = True
            others += _SWITCHES[name]
        elif name in _LISTS:
            changed = True
            numbers = [value] if equals else []
            while pending and pending[0].isdecimal():
                numbers.append(pending.popleft())
            others += ["--set", f"{_LISTS[name]}[{','.join(numbers)}]"]
        elif name in _FLAGS:
            changed = True
            value = value if equals else pending.popleft() if pending else "..."
            if not _FLAGS[name]:
                scene.append(value)
            elif _FLAGS[name].endswith("="):
                others += ["--set", f"{_FLAGS[name]}{value}"]
            else:
                others += [_FLAGS[name], value]
        else:
            others.append(word)
    return [*scene, *others] if changed else None


def scene_to_train(path: Path, *, is_layout_given: bool) -> tuple[Path, str | None]:
    """Return the folder of the scene that ``path`` means, and a note where that is another folder.

    The model folder of a scene (sparse/, sparse/0) and its images/ stand for the scene. is_layout_given: flags say how
    the folder is to be read, and it is taken as it is. Raises UsageError, which names the command, for a run or a
    checkpoint, and for one of several models.
    """
    name = shlex.quote(str(path))
    if not os.path.exists(path):  # False also for a name that no file can have
        return path, None
    if path.is_file() and path.suffix == ".pt" and path.parent.name == "ckpts":
        raise UsageError(
            "this is a checkpoint, and training takes a scene",
            where=path,
            remedy=f"splat resume {name} continues its run; splat train SCENE --init {name} starts from it",
        )
    if (path / "ckpts").is_dir() and not (path / "images").is_dir():
        raise UsageError(
            "this is a run folder, and training takes a scene", where=path, remedy=f"splat resume {name} continues it"
        )
    if is_layout_given or not path.is_dir():
        return path, None
    absolute = path.absolute()
    root = absolute.parent
    if absolute.parent.name == "sparse" and _is_model(path) and (root.parent / "images").is_dir():
        models = [folder for folder in root.iterdir() if _is_model(folder)]
        if len(models) > 1:
            scene = shlex.quote(str(_shortened(root.parent, path)))
            raise UsageError(
                f"this is one of {len(models)} models of a scene",
                where=path,
                remedy=f"splat train {scene} --model sparse/{absolute.name}",
            )
        return _moved(root.parent, path)
    has_models = _is_model(path) or _is_model(path / "0")
    if absolute.name == "sparse" and has_models and (root / "images").is_dir():
        return _moved(root, path)
    described = (root / "sparse").is_dir() and (_is_model(root / "sparse") or _is_model(root / "sparse" / "0"))
    if absolute.name == "images" and (described or (root / "transforms.json").is_file()):
        return _moved(root, path)
    return path, None


def _is_model(folder: Path) -> bool:
    return any((folder / f"cameras{suffix}").is_file() for suffix in (".bin", ".txt"))


def _moved(scene: Path, given: Path) -> tuple[Path, str]:
    shown = _shortened(scene, given)
    return shown, f"note: {given} belongs to the scene {shown}, which is trained"


def _shortened(scene: Path, given: Path) -> Path:
    """Return ``scene``, which is above ``given``, written as that is."""
    if given.is_absolute():
        return scene
    above = given
    while above.absolute() != scene and above.name not in ("", ".."):
        above = above.parent
    return above if above.absolute() == scene else scene
