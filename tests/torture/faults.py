"""The k-th call on a file fails, for k = 1, 2, ... until none does: whatever was there before can still be loaded.

Every place of the package that changes files is tried with every kind of call and every fault, once and from then on.
It must end well, or with an OutputError that ends as exit 8; leave the old or the new content, whole;
leave no temporary file; and work when it is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.run_dir import RunDir, find_latest_sound
from splatcli.cli.commands import run as splat
from splatcli.config import Config
from splatcli.errors import ModelFileError, OutputError
from splatcli.formats.ply import write_ply_file
from splatcli.output_files import write_bytes
from tests.cli.tiny import QUICK, write_scene
from tests.formats.made import read_ply
from tests.torture.calls import KINDS, SHORT_WRITE, armed, run_under
from tests.torture.harness import Figure, main, refused, workplace
from tests.torture.states import small_checkpoint

FAULTS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EINTR", "EACCES", "EMFILE", "EROFS")}
#: A call that is interrupted for ever is tried for ever, as it should be.
LASTING = ("ENOSPC", "EIO", "EDQUOT", "EROFS")


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: at most so many faults, drawn at random; all of them are some thousands."""
    start = time.monotonic()
    found = run_under("tests.torture.faults:all_faults", count, seed)
    what = "a call on a file fails: old or new content is there and loads, nothing is left over, a retry works"
    details = {"places": len(PLACES), **found["by_kind"]}
    seconds = round(time.monotonic() - start, 1)
    return {"faults": Figure(what, found["trials"], len(found["failures"]), seconds, details, found["failures"][:10])}


@dataclass(frozen=True)
class Place:
    """Code that changes files below a folder.

    prepare: makes the folder's content. act: what may fail. check: (folder, whether act succeeded) raises
    AssertionError when old and new content are both lost. faults: those that are tried, "short" being a short write.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    check: Callable[[Path, bool], object]
    faults: tuple[str, ...] = (*FAULTS, "short")


def all_faults(count: int, seed: int) -> dict[str, Any]:
    """In a process with the library: every fault, or ``count`` of them."""
    torch.set_num_threads(1)
    failures: list[str] = []
    by_kind = dict.fromkeys(KINDS, 0)
    with workplace() as folder:
        sequences = [
            (name, kind, fault, lasting)
            for name in PLACES
            for kind in KINDS
            for fault in PLACES[name].faults
            if fault != "short" or kind == "write"
            for lasting in ([False, True] if fault in LASTING else [False])
        ]
        random.Random(seed).shuffle(sequences)
        for name, kind, fault, lasting in sequences:
            for k in range(1, 10_000):
                if sum(by_kind.values()) >= count:
                    break
                label = f"{name}: call {k} of {kind} fails with {fault}{' and so on' if lasting else ''}"
                try:
                    fired = one_fault(PLACES[name], folder / "place", kind, k, fault, lasting=lasting)
                except Exception as error:
                    failures.append(f"{label}: {type(error).__name__}: {error}")
                    fired = True
                if not fired:
                    break
                by_kind[kind] += 1
    return {"trials": sum(by_kind.values()), "failures": failures, "by_kind": by_kind}


def one_fault(place: Place, folder: Path, kind: str, k: int, fault: str, *, lasting: bool) -> bool:
    """Whether the fault came about. Raises AssertionError when something is lost."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    place.prepare(folder)
    succeeded = False
    with armed(folder, kind, k, FAULTS.get(fault, SHORT_WRITE), lasting=lasting) as library:
        with contextlib.suppress(OutputError):
            place.act(folder)
            succeeded = True
        fired = library.calls_fired() > 0
    place.check(folder, succeeded)
    # A file that cannot be removed stays; one that was interrupted as well. The next open() of the run removes it.
    left = [str(path.relative_to(folder)) for path in folder.rglob("*") if ".tmp." in path.name or ".part" in path.name]
    assert kind == "unlink" or not left, f"left behind: {left}"
    place.act(folder)
    place.check(folder, True)
    return fired


# --- the places ------------------------------------------------------------------------------------------------------


def _states(run: Path) -> list[int]:
    """Steps of the checkpoints that load, also of those put aside."""
    return sorted(load_checkpoint(path).step for path in run.glob("ckpts/ckpt_*.pt*") if ".tmp." not in path.name)


def _save(folder: Path, step: int) -> None:
    save_checkpoint(folder / "ckpt.pt", small_checkpoint(20, step=step))


def _check_saved(folder: Path, succeeded: bool) -> None:
    step = load_checkpoint(folder / "ckpt.pt").step
    assert step == 2 if succeeded else step in (1, 2), step


def _run_of(folder: Path, *steps: int) -> None:
    """A run with checkpoints and metrics of these steps."""
    with RunDir.create(folder / "run") as run:
        run.write_config(Config())
        for step in steps:
            run.append_metrics({"event": "step", "step": step, "loss": 0.5})
            run.save(small_checkpoint(10, step=step, save={"keep_last": 2}))


def _save_in_run(folder: Path) -> None:
    with RunDir.open(folder / "run") as run:
        run.save(small_checkpoint(10, step=3, save={"keep_last": 2}))


def _check_run(folder: Path, succeeded: bool) -> None:
    latest = find_latest_sound(folder / "run").path
    assert latest is not None
    step = load_checkpoint(latest).step
    assert step == 3 if succeeded else step in (2, 3), step
    steps = _states(folder / "run")
    # Nothing old is deleted before the new one is safe.
    assert set(steps) >= ({2, 3} if succeeded else {2} if 3 in steps else {1, 2}), steps


def _rewind(folder: Path) -> None:
    with RunDir.open(folder / "run") as run:
        run.rewind(1)


def _check_rewound(folder: Path, succeeded: bool) -> None:
    latest = find_latest_sound(folder / "run").path
    assert latest is not None
    assert not succeeded or load_checkpoint(latest).step == 1
    assert _states(folder / "run") == [1, 2], "a checkpoint is lost"
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [1] if succeeded else steps in ([1], [1, 2]), steps


def _append(folder: Path) -> None:
    with RunDir.open(folder / "run") as run:
        run.append_metrics({"event": "step", "step": 9, "loss": 0.25})


def _check_metrics(folder: Path, succeeded: bool) -> None:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[:2] == [1, 2]
    assert set(steps[2:]) <= {9}
    assert not succeeded or len(steps) > 2


def _configure(folder: Path) -> None:
    with RunDir.open(folder / "run") as run:
        run.write_config(Config.model_validate({"train": {"seed": 7}}))


def _check_config(folder: Path, succeeded: bool) -> None:
    seed = json.loads((folder / "run" / "config.json").read_text())["train"]["seed"]
    assert seed == 7 if succeeded else seed in (7, Config().train.seed), seed


def _overwrite(folder: Path) -> None:
    RunDir.create(folder / "run", overwrite=True).close()


def _check_moved(folder: Path, succeeded: bool) -> None:
    kept = [_states(run) for run in folder.iterdir()]
    assert [1, 2] in kept, "the old run is lost"
    assert not succeeded or (folder / "run" / "ckpts").is_dir()


def _export(folder: Path) -> None:
    write_ply_file(small_checkpoint(30, seed=2).gaussians, folder / "x.ply")


def _check_ply(folder: Path, succeeded: bool) -> None:
    found = read_ply(folder / "x.ply").means
    old, new = (small_checkpoint(30, seed=seed).gaussians.means for seed in (1, 2))
    assert torch.equal(found, new) or (not succeeded and torch.equal(found, old))


def _picture(folder: Path) -> None:
    write_bytes(folder / "pictures" / "x.png", b"new" * 5000)


def _check_picture(folder: Path, succeeded: bool) -> None:
    content = (folder / "pictures" / "x.png").read_bytes()
    assert content == b"new" * 5000 or (not succeeded and content == b"old")


def _old_picture(folder: Path) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "x.png").write_bytes(b"old")


def _command(*words: str, refusals: tuple[int, ...] = (OutputError.exit_code,)) -> None:
    """A command line, which must end well or, with an OutputError here, with one of the codes ``refusals``."""
    code = splat([*words, "-q"])
    if code in refusals:
        raise OutputError("refused")
    assert code == 0, f"exit code {code} of splat {words[0]}"


def _scene_beside(folder: Path) -> Path:
    """A scene outside the folder whose calls fail."""
    scene = folder.parent / "scene"
    return scene if scene.is_dir() else write_scene(scene)


def _train_command(folder: Path) -> None:
    settings = ("--iterations", "3", *QUICK, "--set", "save.steps=[1]", "--set", "save.patience_minutes=0")
    _command("train", str(folder.parent / "scene"), "-o", str(folder / "run"), *settings, "--overwrite")


def _check_trained(folder: Path, succeeded: bool) -> None:
    latest = find_latest_sound(folder / "run").path
    step = -1 if latest is None else load_checkpoint(latest).step
    assert step == 3 if succeeded else step <= 3, step
    broken = [path.name for path in (folder / "run").glob("ckpts/ckpt_*.pt") if not _loads(path)]
    assert not broken, broken


def _half_trained(folder: Path) -> None:
    settings = ("--iterations", "3", "--stop-at", "2", *QUICK, "--set", "save.patience_minutes=0")
    _command("train", str(_scene_beside(folder)), "-o", str(folder / "run"), *settings)


def _resume_command(folder: Path) -> None:
    # A checkpoint that cannot be opened is a model that cannot be read.
    codes = (OutputError.exit_code, ModelFileError.exit_code)
    _command("resume", str(folder / "run" / "ckpts" / "ckpt_000002.pt"), refusals=codes)


def _check_resumed(folder: Path, succeeded: bool) -> None:
    assert load_checkpoint(folder / "run" / "ckpts" / "ckpt_000002.pt").step == 2
    _check_trained(folder, succeeded)


def _loads(path: Path) -> bool:
    return not refused(lambda: load_checkpoint(path))


PLACES: dict[str, Place] = {
    "save": Place(lambda folder: _save(folder, 1), lambda folder: _save(folder, 2), _check_saved),
    "save in a run": Place(lambda folder: _run_of(folder, 1, 2), _save_in_run, _check_run),
    "rewind": Place(lambda folder: _run_of(folder, 1, 2), _rewind, _check_rewound),
    "metrics": Place(lambda folder: _run_of(folder, 1, 2), _append, _check_metrics),
    "settings": Place(lambda folder: _run_of(folder, 1), _configure, _check_config),
    "--overwrite": Place(lambda folder: _run_of(folder, 1, 2), _overwrite, _check_moved),
    "export PLY": Place(
        lambda folder: write_ply_file(small_checkpoint(30, seed=1).gaussians, folder / "x.ply"), _export, _check_ply
    ),
    "picture, export": Place(_old_picture, _picture, _check_picture),
    # Whole commands take longer, and make the same calls.
    "splat train": Place(_scene_beside, _train_command, _check_trained, ("ENOSPC",)),
    "splat resume": Place(_half_trained, _resume_command, _check_resumed, ("ENOSPC",)),
}


if __name__ == "__main__":
    main(figures, 100_000)
