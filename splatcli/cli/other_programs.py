"""Command lines of other programs, as ``splat train`` answers them."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from splatcli.cli.typer_command import Command
from splatcli.errors import UsageError

#: Flags of the original program, gsplat, nerfstudio, Brush and OpenSplat -> what stands for them; "" takes the value
#: alone, a name with "=" is a setting. Here and below "_" is written "-", which both mean the same in gsplat and
#: nerfstudio.
_FLAGS = {
    "-s": "",
    "--source-path": "",
    "--data": "",
    "--data-dir": "",
    "-m": "-o",
    "--model-path": "-o",
    "--result-dir": "-o",
    "--output-dir": "-o",
    "-i": "--images",
    "-d": "--depths",
    "--max-num-iterations": "-n",
    "--max-steps": "-n",
    "--total-steps": "-n",
    "--num-iters": "-n",
    "--max-splats": "--cap-max",
    "--eval-split-every": "--test-every",
    "--llffhold": "--test-every",
    "--max-resolution": "-r",
    "--load-checkpoint": "--init",
    "--machine.seed": "--seed",
    "--machine.num-devices": "--ranks",
    "--data-factor": "-r",
    "--downscale-factor": "-r",
    "--images-path": "--images",
    "--masks-path": "--masks",
    "--depths-path": "--depths",
    "--eval-interval": "--test-every",
    "--start-checkpoint": "--init",
    "--init-type": "--init",
    "--init-num-pts": "model.random_points=",
    "--init-opa": "model.init_opacity=",
    "--sh-degree-interval": "schedule.sh_degree_interval=",
    "--densify-grad-threshold": "strategy.grow_grad2d=",
    "--densify-from-iter": "schedule.refine_start=",
    "--densify-until-iter": "schedule.refine_stop=",
    "--densification-interval": "schedule.refine_every=",
    "--opacity-reset-interval": "schedule.reset_every=",
    "--percent-dense": "strategy.grow_scale3d=",
    "--lambda-dssim": "train.ssim_lambda=",
    "--ssim-lambda": "train.ssim_lambda=",
    "--position-lr-init": "optim.means_lr=",
    "--position-lr-final": "optim.means_lr_final=",
    "--feature-lr": "optim.sh0_lr=",
    "--opacity-lr": "optim.logit_opacities_lr=",
    "--opacities-lr": "optim.logit_opacities_lr=",
    "--scaling-lr": "optim.log_scales_lr=",
    "--scales-lr": "optim.log_scales_lr=",
    "--rotation-lr": "optim.quats_lr=",
    "--strategy.grow-grad2d": "strategy.grow_grad2d=",
    "--strategy.grow-scale3d": "strategy.grow_scale3d=",
    "--strategy.prune-opa": "strategy.prune_opacity=",
    "--strategy.min-opacity": "strategy.prune_opacity=",
    "--strategy.prune-scale3d": "strategy.prune_scale3d=",
    "--opacity-reg": "strategy.opacity_reg=",
    "--scale-reg": "strategy.scale_reg=",
    "--strategy.noise-lr": "strategy.noise_lr=",
    "--strategy.refine-start-iter": "schedule.refine_start=",
    "--strategy.refine-stop-iter": "schedule.refine_stop=",
    "--strategy.refine-every": "schedule.refine_every=",
    "--strategy.reset-every": "schedule.reset_every=",
    "--strategy.cap-max": "--cap-max",
    "--pipeline.model.sh-degree": "--sh-degree",
    "--pipeline.model.sh-degree-interval": "schedule.sh_degree_interval=",
    "--pipeline.model.densify-grad-thresh": "strategy.grow_grad2d=",
    "--pipeline.model.densify-size-thresh": "strategy.grow_scale3d=",
    "--pipeline.model.cull-alpha-thresh": "strategy.prune_opacity=",
    "--pipeline.model.max-gs-num": "--cap-max",
    "--pipeline.model.refine-every": "schedule.refine_every=",
    "--pipeline.model.warmup-length": "schedule.refine_start=",
    "--pipeline.model.stop-split-at": "schedule.refine_stop=",
    "--pipeline.model.ssim-lambda": "train.ssim_lambda=",
    "--pipeline.model.num-downscales": "schedule.num_downscales=",
    "--viewer.websocket-port": "--viewer-port",
    "--exposure-lr-init": "views.exposure_lr=",
    "--exposure-lr-final": "views.exposure_lr_final=",
}

#: Flags that take several numbers -> the setting that is their list; none where splat needs no such list.
_LISTS = {
    "--save-iterations": "save.steps=",
    "--checkpoint-iterations": "save.steps=",
    "--save-steps": "save.steps=",
    "--test-iterations": None,
    "--eval-steps": None,
    "--ply-steps": None,
}

#: Switches of theirs -> ours; none where splat does so anyway.
_SWITCHES: dict[str, list[str]] = {
    "-w": ["--white-background"],
    "--random-bkgd": ["--random-background"],
    "--antialiasing": ["--antialiased"],
    "--train-test-exp": ["--exposure"],
    "--use-bilateral-grid": ["--bilateral-grid"],
    "--strategy.revised-opacity": ["--set", "strategy.revised_opacity=true"],
    "--strategy.absgrad": ["--strategy", "absgrad"],
    "--pipeline.model.use-absgrad": ["--strategy", "absgrad"],
    "--pipeline.model.use-bilateral-grid": ["--bilateral-grid"],
    "--pipeline.model.random-init": ["--init", "random"],
    "--with-viewer": ["--viewer"],
    "--eval": [],
    "--packed": [],
    "--sparse-grad": [],
    "--visible-adam": [],
    "--disable-video": [],
    "--no-viewer": [],
    "--strategy.verbose": [],
    "--convert-SHs-python": [],
    "--compute-cov3D-python": [],
    "--disable-viewer": [],
    "--normalize-world-space": [],
    "--no-normalize-world-space": [],
    "--save-ply": [],
    "--debug": [],
    "--detect-anomaly": [],
}

#: Switches that are on by default here -> what stands for theirs with False.
_OFF = {name: ["--strategy", "adc"] for name in ("--strategy.absgrad", "--pipeline.model.use-absgrad")}

#: Flags with one of a few words -> what stands for each word.
_CHOICES: dict[str, dict[str, list[str]]] = {
    "--post-processing": {"bilateral_grid": ["--bilateral-grid"], "ppisp": ["--ppisp"], "none": []},
    "--camera-model": {"pinhole": []},
    "--optimizer-type": {"default": [], "sparse_adam": []},
    "--pipeline.model.camera-optimizer.mode": {"SO3xR3": ["--pose-opt"], "SE3": ["--pose-opt"], "off": []},
    "--pipeline.model.rasterize-mode": {"antialiased": ["--antialiased"], "classic": []},
    "--pipeline.model.strategy": {"mcmc": ["--strategy", "mcmc"], "default": []},
    "--pipeline.model.background-color": {
        "white": ["--white-background"],
        "random": ["--random-background"],
        "black": [],
    },
}

#: Flags that have no meaning here, with one value: near planes follow the scene.
_WITHOUT_MEANING = {
    "--near-plane",
    "--far-plane",
    "--eval-mode",
    "--orientation-method",
    "--center-method",
    "--auto-scale-poses",
    "--scale-factor",
    "--data-device",
    "--ip",
    "--port",
    "--vis",
    "--lpips-net",
    "--mixed-precision",
    "--timestamp",
    "--position-lr-max-steps",
    "--debug-from",
    "--pipeline.datamanager.cache-images",
    "--viewer.quit-on-train-completion",
}

#: Flags that take one value.
_WITH_VALUE = {*_FLAGS, *_CHOICES, *_WITHOUT_MEANING, "--load-dir", "--ckpt", "--steps-scaler"}

#: The words with which their programs begin -> what stands for them.
_METHODS: dict[str, list[str]] = {
    "default": [],
    "mcmc": ["--strategy", "mcmc"],
    "splatfacto": [],
    "splatfacto-mcmc": ["--strategy", "mcmc"],
    "splatfacto-big": [],
}

#: nerfstudio's words for the layout of a scene, before the flags of its reader: layouts are recognised.
_READERS = frozenset(("colmap", "nerfstudio-data", "blender-data"))

#: Ends of names of files of splats, which other programs write with -o.
_SPLATS = frozenset((".ply", ".splat", ".spz", ".sog", ".ksplat", ".glb", ".usdz"))

#: The steps of gsplat's trainer, which ``--steps_scaler`` multiplies.
_THEIR_STEPS = 30_000


class TrainCommand(Command):
    """Answers the flags of other programs with the command line that they stand for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            own = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
            found = translated(args, own)
            if found is not None:
                command, theirs = found
                kind = "flag" if theirs.startswith("-") else "word"
                raise UsageError(f"this is a {kind} of another program", where=theirs, remedy=f"splat {command}")
        return super().parse_args(ctx, args)


def translated(words: Sequence[str], own: Container[str]) -> tuple[str, str] | None:
    """Return the command that means the same as the words after ``splat train``, and the first flag of theirs.

    own: the flags of ``splat train``, which are also known with "_" in place of "-". None where no flag of another
    program is among the words, and the first is no method of theirs.
    """
    scene: list[str] = []
    others: list[str] = []
    theirs: list[str] = []
    evaluated = ""
    pending = deque(words)
    while pending:
        word = pending.popleft()
        written, equals, value = word.partition("=")
        name = written.replace("_", "-") if written.startswith("--") else written
        if word == "--":
            others += [word, *pending]
            break
        if written in own or not written.startswith("-"):
            others.append(word)
            continue
        if name in _WITH_VALUE and not equals:
            value = pending.popleft() if pending else "..."
        if name in _CHOICES and value not in _CHOICES[name]:
            others += [word] if equals else [word, value]
            continue
        theirs.append(written)
        if name in _SWITCHES:
            # A value is optional: nerfstudio writes one.
            said = value if equals else pending.popleft() if pending and pending[0] in ("True", "False") else "True"
            others += _SWITCHES[name] if said != "False" else _OFF.get(name, [])
        elif name in _LISTS:
            numbers = [value] if equals else []
            while pending and pending[0].isdecimal():
                numbers.append(pending.popleft())
            others += ["--set", f"{_LISTS[name]}[{','.join(numbers)}]"] if _LISTS[name] else []
        elif name == "--load-dir":
            return shlex.join(["resume", value]), theirs[0]
        elif name == "--ckpt":
            evaluated = value
            while pending and not pending[0].startswith("-"):  # other shards, which are found beside the first
                pending.popleft()
        elif name == "--steps-scaler":
            others += ["-n", _scaled(value)]
        elif name in _CHOICES:
            others += _CHOICES[name][value]
        elif name in _FLAGS and not _FLAGS[name]:
            scene.append(value)
        elif name in _FLAGS and _FLAGS[name].endswith("="):
            others += ["--set", f"{_FLAGS[name]}{value}"]
        elif name in _FLAGS:
            others += [_FLAGS[name], value]
        elif name in own:
            others.append(name + equals + value)
        elif name not in _WITHOUT_MEANING:
            theirs.pop()
            others.append(word)
    if not theirs and others and others[0] in _METHODS and not Path(others[0]).exists():
        theirs, scene = [others[0]], ["SCENE"]
    if not theirs:
        return None
    if evaluated:
        return shlex.join(["eval", evaluated, "--data", *(scene or ["SCENE"])]), theirs[0]
    if scene and others and others[0] in _METHODS:
        others[:1] = _METHODS[others[0]]
        others = [word for word in others if word not in _READERS]
    return shlex.join(["train", *scene, *others]), theirs[0]


def _scaled(factor: str) -> str:
    """Return the steps of gsplat's trainer times ``factor``."""
    try:
        return str(round(_THEIR_STEPS * float(factor)))
    except (ValueError, OverflowError):
        return "..."


def check_run_folder(output: Path | None) -> None:
    """Raise UsageError for the name of a file of splats as the folder of a run that is not there yet."""
    if output is None or output.suffix.lower() not in _SPLATS or output.is_dir():
        return
    run = shlex.quote(str(output.with_suffix("")))
    raise UsageError(
        "a run needs a folder, and this is the name of a file of splats",
        where=f"-o {output}",
        remedy=f"-o {run}, and then splat export {run} -o {shlex.quote(str(output))}",
    )
