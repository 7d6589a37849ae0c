"""``splat edit -o x.pt`` from outside: a checkpoint without some Gaussians, which `splat resume` continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.checkpoint.state import Checkpoint
from splatcli.formats.ply import write_ply_file
from splatcli.train.state import gaussians_to_render
from tests.cli.tiny import QUICK
from tests.formats.made import read_ply, scene
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def run(splat_once: Splat, tiny_scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped before its end, with moments, statistics, a 3D filter, trained poses and colours."""
    folder = tmp_path_factory.mktemp("edited") / "run"
    words = ("--filter-3d", "--pose-opt", "--exposure", "--stop-at", "30")
    done = splat_once("train", tiny_scene, "-o", folder, "-n", "60", "-q", *QUICK, *words)
    assert done.code == 0, done.err
    return folder


def newest(folder: Path) -> Checkpoint:
    path = find_latest_sound(folder).path
    assert path is not None
    return load_checkpoint(path)


def per_gaussian(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every stored tensor that has a row for each Gaussian."""
    assert checkpoint.moments is not None
    assert checkpoint.sh_last_step is not None
    found = {**dict(checkpoint.gaussians.items()), "sh_last_step": checkpoint.sh_last_step}
    for name, (first, second) in checkpoint.moments.items():
        found |= {f"first {name}": first, f"second {name}": second}
    found |= {name: value for name, value in checkpoint.strategy.items() if isinstance(value, Tensor)}
    return found | checkpoint.columns.present()


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (("--crop-out", "box:0,-1e6,-1e6,1e6,1e6,1e6"), lambda g: g.means[:, 0] < 0),
        (
            ("--crop", "sphere:0,0,0,6", "--filter", "z>0"),
            lambda g: (g.means.norm(dim=1) <= 6) & (g.means[:, 2] > 0),
        ),
        (("--filter", "opacity>0.1"), lambda g: g.logit_opacities.double() > torch.tensor(0.1).double().logit()),
        (("--filter", "nan"), lambda g: g.means[:, 0] < 99),
    ],
)
def test_what_stays_keeps_its_bits_in_every_part_of_the_state(
    words: tuple[str, ...], stays: Callable[..., Tensor], splat: Splat, run: Path, tmp_path: Path
) -> None:
    before = newest(run)
    rows = stays(gaussians_to_render(before))
    done = splat("edit", run, *words, "-o", tmp_path / "new" / "edited.pt", "--json")
    assert done.code == 0, done.err
    assert done.objects[-1]["num_gaussians"] == int(rows.sum()) > 0
    after = load_checkpoint(tmp_path / "new" / "edited.pt")
    given, found = per_gaussian(before), per_gaussian(after)
    assert given.keys() == found.keys()
    assert {"grad2d", "count", "filter_3d", "first shN", "second means"} <= given.keys()
    for name, tensor in given.items():
        assert torch.equal(tensor[rows], found[name]), name
    for name in ("step", "adam_step", "active_sh_degree", "sampler", "config", "train", "test", "dataset", "loss"):
        assert getattr(before, name) == getattr(after, name), name
    for name in ("rng", "views"):
        one, other = getattr(before, name), getattr(after, name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert [camera.name for camera in before.cameras] == [camera.name for camera in after.cameras]


def test_an_edited_checkpoint_is_resumed_to_the_end(
    splat: Splat, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = len(newest(run).gaussians)
    assert splat("edit", run, "--filter", "opacity>0.05", "--crop-out", "box:0,0,0,9,9,9", "-o", "edited.pt").code == 0
    left = len(load_checkpoint(Path("edited.pt")).gaussians)
    assert 0 < left < before
    assert splat("check", "edited.pt").code == 0
    done = splat("resume", "edited.pt", "--stop-at", "31", "-q", "--json")
    assert done.code == 0, done.err
    made = Path(done.objects[-1]["path"])
    assert load_checkpoint(made).step == 31
    assert len(load_checkpoint(made).gaussians) == left
    assert splat("resume", made, "-q").code == 0
    assert newest(made.parent.parent).step == 60
    # The run that was edited is as it was.
    assert newest(run).step == 30
    assert len(newest(run).gaussians) == before


def test_a_checkpoint_without_a_drop_resumes_to_the_same_bits(
    splat: Splat, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert splat("edit", run, "--filter", "opacity>=0", "-o", "all.pt").code == 0
    assert splat("resume", "all.pt", "--stop-at", "34", "-q").code == 0
    (tmp_path / "copy.pt").write_bytes((run / "ckpts" / "ckpt_000030.pt").read_bytes())
    assert splat("resume", "copy.pt", "--stop-at", "34", "-q").code == 0
    one, other = (newest(folder) for folder in sorted((tmp_path / "output").iterdir()))
    for name, tensor in per_gaussian(one).items():
        assert torch.equal(tensor, per_gaussian(other)[name]), name


def test_clean_writes_a_checkpoint(splat: Splat, run: Path, tmp_path: Path) -> None:
    done = splat("edit", run, "--clean", "light", "-o", tmp_path / "clean.pt", "--json")
    assert done.code == 0, done.err
    assert len(load_checkpoint(tmp_path / "clean.pt").gaussians) == done.objects[-1]["num_gaussians"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scale", "2"), "Adam's moments"),
        (("--translate", "0,0,1"), "Adam's moments"),
        (("--rotate", "0,0,90"), "Adam's moments"),
        (("--level", "z"), "Adam's moments"),
        (("--sh-degree", "0"), "Adam's moments"),
        (("--simplify", "50%"), "Adam's moments"),
        (("--reorder", "morton"), "Adam's moments"),
        (("--filter", "opacity>0.1", "--scale", "2"), "Adam's moments"),
        (("--refine", "5"), "--refine does not train the state"),
        (("--crop", "sphere:90,0,0,1"), "is left"),
    ],
)
def test_what_would_make_the_moments_wrong_is_refused(
    words: tuple[str, ...], said: str, splat: Splat, finished_run: Path, tmp_path: Path
) -> None:
    done = splat("edit", finished_run, *words, "-o", tmp_path / "x.pt")
    assert done.code == 2, done.err
    assert said in done.err
    assert "help:" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "x.pt").exists()


def test_what_holds_no_state_of_a_run_is_refused(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    model, bare = tmp_path / "model.ply", tmp_path / "bare.pt"
    write_ply_file(scene(200, 1), model)
    checkpoint = load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt")
    checkpoint.moments = checkpoint.sh_last_step = None
    save_checkpoint(bare, checkpoint)
    odd = replace(newest(finished_run))
    odd.strategy = {**odd.strategy, "mine": torch.zeros(len(odd.gaussians))}
    save_checkpoint(tmp_path / "odd.pt", odd)
    crop = ("--filter", "opacity>0.01")
    for words, code, said in (
        ((model, *crop, "-o", tmp_path / "x.pt"), 2, "is no checkpoint of splat"),
        ((bare, *crop, "-o", tmp_path / "x.pt"), 5, "it holds no optimiser state"),
        ((tmp_path / "odd.pt", *crop, "-o", tmp_path / "x.pt"), 2, "its strategy keeps mine"),
        ((finished_run, finished_run, *crop, "-o", tmp_path / "x.pt"), 2, "several models"),
        ((finished_run, *crop, "-o", tmp_path / "x.ckpt"), 2, "of other programs are only read"),
        ((finished_run, *crop, "-o", finished_run / "ckpts" / "ckpt_000041.pt"), 2, "a run writes its own"),
        ((finished_run, *crop, "-o", bare), 8, "-w replaces it"),
    ):
        done = splat("edit", *words)
        assert done.code == code, done.err
        assert said in done.err
        assert not (tmp_path / "x.pt").exists()
    assert [path.name for path in (finished_run / "ckpts").iterdir() if "41" in path.name] == []


def test_a_dry_run_counts_and_writes_no_checkpoint(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    words = ("edit", finished_run, "--filter", "opacity>0.1", "-o", tmp_path / "x.pt", "--json")
    planned = splat(*words, "--dry-run").objects[-1]
    assert not list(tmp_path.iterdir())
    done = splat(*words).objects[-1]
    assert planned["operations"] == done["operations"]
    assert splat("export", tmp_path / "x.pt", "-o", tmp_path / "x.ply").code == 0
    assert len(read_ply(tmp_path / "x.ply")) == done["num_gaussians"]
