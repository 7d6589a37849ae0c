"""Hints for unknown commands and flags: splat's equivalent of another program's, or a similar name."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Words typed as a command -> what does that.
_COMMANDS = {
    "convert transform splat-transform": "splat export MODEL -o FILE converts, splat edit moves and cuts",
    "join concat crop clean prune filter simplify decimate rotate scale": "splat edit MODEL -o FILE, with its flags",
    "process process-data ns-process-data colmap reconstruct cameras": "splat sfm IMAGES, or only splat train IMAGES",
    "metrics evaluate score psnr": "splat eval MODEL",
    "viewer viz show web gui": "splat view MODEL",
    "simple_trainer simple-trainer ns-train splatfacto default fit optimize": "splat train SCENE",
    "mcmc splatfacto-mcmc": "splat train SCENE --strategy mcmc",
    "video camera-path ns-render": "splat render MODEL --views orbit -o video.mp4",
    "continue": "splat resume RUN",
    "list ls commands": "splat --help",
}

_MODEL = "the model is a word without a flag: splat {command} MODEL"
_SIZE = "--size WxH"
_ITERATION = "name a checkpoint: splat {command} RUN/ckpts/ckpt_007000.pt"
_PATHS = "--views orbit, ellipse, spiral, interpolate or camera_path.json"
_EXPORT = "--export scene.ply writes the finished model"
_CURVES = "metrics.jsonl in the run folder has the curves"

#: Commands, each -> flags of other programs -> what does that.
_FLAGS: dict[str, dict[str, str]] = {
    "render eval export mesh view info": {
        "-m -i --model-path --load-config --ckpt --checkpoint --input --ply": _MODEL,
        "--iteration --load-iteration --step": _ITERATION,
    },
    "render eval mesh compare edit": {"--source-path --scene": "--data SCENE"},
    "render": {
        "--skip-train --test": "--views test, which is the default",
        "--train --skip-test": "--views train",
        "--camera-path-filename --camera-path --camera --path --traj --trajectory --render-traj-path": _PATHS,
        "-r --resolution --width --height --downscale --downscale-factor --data-factor --scale": _SIZE,
        "--video --render-video": "-o video.mp4",
        "--output-path --output-dir --out --result-dir": "-o PLACE",
        "--depth --normals --normal --alpha --rendered-output-names": "--what rgb,depth,normals,alpha",
        "--seconds --duration": "--frames N, and --fps F",
        "--bg --bg-color --background-color --white-background": "--background COLOUR",
    },
    "eval": {
        "-o --output --output-path --out": "splat eval MODEL --json > figures.json; --sheet sheet.png draws the views",
        "--downscale --downscale-factor --data-factor": "-r F",
        "--test --skip-train": "--views test, which is the default",
    },
    "export": {"--output-dir --output-path --out --output-filename": "-o scene.ply"},
    "edit": {
        "-i --input --ply": _MODEL,
        "--decimate --prune-ratio": "--simplify 50%",
        "--filter-nan --remove-nan": "--filter nan",
        "--filter-harmonics --filter-bands": "--sh-degree D",
        "--filter-value": "--filter 'opacity>0.5'",
        "--filter-box --box --bbox": "--crop box:X0,Y0,Z0,X1,Y1,Z1",
        "--filter-sphere --sphere": "--crop sphere:X,Y,Z,RADIUS",
        "--filter-floaters --filter-cluster --floaters --outliers": "--clean",
        "--morton-order --morton": "--reorder morton",
        "--prune --min-opacity --opacity": "--filter 'opacity>0.1'",
        "--align --register": "--align-to OTHER",
        "--merge --join": "name several models: splat edit A B -o both.ply",
        "--format --output-format": "the end of the name selects the format: -o edited.spz",
        "--target-size": "splat export edited.ply -o small.sog --target-size 8MB",
    },
    "sfm": {
        "--image-path --images --data -i --input": "the folder is a word without a flag: splat sfm IMAGES",
        "--output-dir --output-path --workspace-path": "-o DIR",
        "--matcher --matching-method --matcher-type": "--matching HOW",
        "--num-frames-target --num-frames --fps": "--frames N",
        "--imagereader.camera-model --camera --camera-type": "--camera-model MODEL",
        "--single-camera": "--camera-per all",
        "--skip-colmap": "splat train SCENE reads cameras that are there",
    },
    "view": {"--viewer.websocket-port --viewer-port": "--port N", "--viewer-host --ip": "--host ADDRESS"},
    "resume": {
        "--load-dir --checkpoint --ckpt -m --model-path": "the run is a word without a flag: splat resume RUN",
        "--start-checkpoint": "name the checkpoint: splat resume RUN/ckpts/ckpt_007000.pt",
    },
    "train": {
        "--resume --continue": "splat resume RUN continues a run, and so does the same command with the same -o",
        "--checkpoint --load-checkpoint --load": "splat resume RUN continues a run; --init FILE starts from a model",
        "--init-from --init-ply --load-ply": "--init FILE starts from a model, --points FILE from points",
        "--export-ply --export-every --output-ply --save-ply --save-ply-every": _EXPORT,
        "--render-traj-path --traj-path": "splat render RUN --views ellipse -o video.mp4, after training",
        "--compression": "splat export RUN -o scene.sog, after training",
        "--lpips --metrics": "splat eval RUN --lpips vgg, after training",
        "--tb-every --tb-save-image --log-dir": "--tensorboard",
        "--wandb --log-every": _CURVES,
        "--steps --iters --iter --epochs --num-steps --num-iterations": "-n N",
        "--save-every --steps-per-save --checkpoint-every": "--set save.every_minutes=M or 'save.steps=[7000,30000]'",
        "--steps-per-eval-all-images --val-every": "--set train.eval_every=N; --test-every N holds out views",
        "--mcmc --default-strategy": "--strategy mcmc, absgrad or adc",
        "--lr --learning-rate": "--set optim.means_lr=X, and others of optim",
        "--pose-opt-lr --camera-optimizer": "--pose-opt, and --set views.pose_lr=X",
        "--app-opt --appearance --load-exposure": "--exposure, --bilateral-grid or --ppisp",
        "--camera-model --with-ut": "--projection fisheye; lenses are those of the scene",
        "--bg-color --background --bg --background-color": "--random-background, or --set train.background=COLOUR",
        "--scale --downscale --width --image-downscale --image-scale": "-r F",
        "--experiment-name --name --exp-name --project-name": "-o DIR",
        "--gpu --cuda --gpu-id": "--device cuda:0, or --ranks N",
        "--mask-dir --mask-path --use-masks": "--masks DIR",
        "--depth-dir --depth-path --use-depth": "--depths DIR, or --depth-loss",
        "--init-extent": "--init random has the cameras' extent; --scene-extent SIZE sets it",
        "--video": "the video is a word without a flag: splat train walk.mp4",
        "--scene --input --source --dataset --dataset-path --image-dir --images-dir": "the scene is a word without a "
        "flag: splat train SCENE",
    },
}

#: Least similarity of a name that is offered for another; typing errors in names of some letters are above it.
_SIMILAR = 0.75
#: Least letters of a name that is offered because a longer name has it as a part.
_PART = 4


def command_hint(words: Sequence[str]) -> str | None:
    """Return the command to type in place of one that does not exist (without ``splat``); None: unknown."""
    word = words[0]
    hint = _among(_COMMANDS, word.lower())
    # Unlike Path, os.path answers for names that no file can have.
    if hint is None and word and os.path.isdir(word):
        is_run = (Path(word) / "ckpts").is_dir()
        return shlex.join(["splat", "view" if is_run else "train", word])
    if hint is None and os.path.isfile(word):
        if len(words) > 1 and not words[1].startswith("-") and Path(words[1]).suffix:
            return shlex.join(["splat", "export", word, "-o", words[1]])
        return f"splat view {shlex.quote(word)} shows a model, splat info {shlex.quote(word)} describes a file"
    return hint


def word_hint(command: str, words: Sequence[str]) -> str | None:
    """Return a hint for ``words``, one more than ``splat COMMAND`` takes; None: unknown."""
    last = words[-1] if words else ""
    if command in ("export", "render", "mesh") and Path(last).suffix:
        return f"-o names the file to write: -o {shlex.quote(last)}"
    if command == "merge":
        return "splat edit A B -o both.ply puts models together; splat merge joins the blocks of one run"
    return None


def flag_hint(command: str, flag: str, names: Iterable[str]) -> str | None:
    """Return ``splat COMMAND``'s equivalent of another program's ``flag``, or a similar flag; None: unknown.

    names: the command's flags.
    """
    wanted = flag.replace("_", "-") if flag.startswith("--") else flag
    for commands, table in _FLAGS.items():
        hint = _among(table, wanted.lower()) if command in commands.split() else None
        if hint is not None:
            return hint.format(command=command)
    near = similar_flag(wanted, [name for name in names if name.startswith("--")])
    return f"did you mean {near}?" if near else None


def similar_flag(flag: str, names: Sequence[str]) -> str | None:
    """Return the flag that is meant by the start of its name, by a longer one, or with a typing error."""
    begun = [name for name in names if name.startswith(flag)]
    if begun:
        return begun[0]
    wanted = flag.strip("-")
    known = {name.strip("-"): name for name in names}
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=_SIMILAR)
    if near:
        return known[near[0]]
    parts = [name for name in known if len(name) >= _PART and _is_part(name, wanted)]
    if parts:
        return known[max(parts, key=len)]
    longer = [name for name in known if len(wanted) >= _PART and _is_part(wanted, name)]
    return known[longer[0]] if len(longer) == 1 else None


def _is_part(name: str, longer: str) -> bool:
    """Return whether ``name`` is one or several of the words between the hyphens of ``longer``."""
    return f"-{name}-" in f"-{longer}-"


def _among(table: dict[str, str], word: str) -> str | None:
    return next((hint for names, hint in table.items() if word in names.split()), None)
