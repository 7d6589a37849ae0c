"""The guides: their commands work in their order, and their tables name flags that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.foreign.imported import Columns
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.train.state import gaussians_to_render
from tests.checkpoint.foreign.made import write
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
#: The scene with points: every view of the ball shows all of it, so that blocks of it save nothing.
QUICK_BLOCKS = (*QUICK[2:], "--set", "data.block_share=1")

pytestmark = NEEDS_COMPILER


def blocks(guide: str) -> list[str]:
    """The shell blocks of a guide that a ``<!-- tested -->`` line precedes."""
    page = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- tested -->\n```sh\n(.*?)```", page, re.DOTALL)


def quick(block: str, steps: int = 20, settings: tuple[str, ...] = QUICK) -> str:
    """``block`` with few steps: real runs take minutes."""
    return re.sub(r"(splat train \S+)", rf"\1 {' '.join(settings)} --iterations {steps}", block)


def in_turn(block: str, splat: Splat) -> None:
    """Run the commands of ``block``, a line each, in the current folder and in this process."""
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "splat"
        done = splat(*words)
        assert done.code == 0, f"{line}: {done.err}"


class Scheduler:
    """What SLURM does with a script: runs it with its variables, and signals the shell alone."""

    def __init__(self, folder: Path) -> None:
        commands = folder / "bin"
        commands.mkdir()
        self.folder, self.log = folder, folder / "scontrol.log"
        self.environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        (commands / "splat").write_text(f'#!/bin/sh\nexec {shlex.join(splat_command())} "$@"\n')
        (commands / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n')
        for command in commands.iterdir():
            command.chmod(0o755)

    def run(self, script: str, *, task: int | None = None, stop_when: Path | None = None) -> int:
        """The exit code of the job. stop_when: SIGTERM is sent once this file is there."""
        path = self.folder / "job.sh"
        path.write_text(script)
        environment = self.environment | ({} if task is None else {"SLURM_ARRAY_TASK_ID": str(task)})
        with subprocess.Popen(["bash", str(path)], cwd=self.folder, env=environment) as process:
            while stop_when is not None and process.poll() is None:
                if stop_when.exists():
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.02)
            return process.wait(120)

    def requests(self) -> list[str]:
        """The arguments of each call of scontrol."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_a_job_at_its_limit_is_requeued_and_continues(tmp_path: Path) -> None:
    script, _ = blocks("cluster")
    assert re.search(r"^#SBATCH .*--signal=B:TERM@\d+", script, re.MULTILINE)
    assert "--requeue" in script
    write_scene(tmp_path / "scene")
    scheduler, checkpoints = Scheduler(tmp_path), tmp_path / "output/scene/ckpts"
    script = quick(script, 300)
    assert scheduler.run(script, stop_when=checkpoints / "ckpt_000000.pt") == 143
    assert scheduler.requests() == ["requeue 7"]
    assert not (checkpoints / "ckpt_000300.pt").exists()
    assert scheduler.run(script) == 0
    assert (checkpoints / "ckpt_000300.pt").exists()
    assert scheduler.run(script) == 0, "a job too many"
    assert scheduler.requests() == ["requeue 7"]


def test_a_job_that_fails_is_not_requeued(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path)
    assert scheduler.run(blocks("cluster")[0]) == 3, "there is no scene"
    assert scheduler.requests() == []


def test_jobs_of_an_array_are_stopped_and_continue(tmp_path: Path) -> None:
    _, script = blocks("cluster")
    names = re.findall(r"\w+", re.search(r"scenes=\((.*)\)", script)[1])
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", script).groups())
    assert range(first, last + 1) == range(len(names))
    scheduler, script = Scheduler(tmp_path), quick(script, 200)
    for name in names[:2]:
        write_scene(tmp_path / name)
    runs = [tmp_path / "output" / name / "ckpts" for name in names]
    assert scheduler.run(script, task=0, stop_when=runs[0] / "ckpt_000000.pt") == 143
    assert [scheduler.run(script, task=task) for task in (0, 1)] == [0, 0]
    assert [(run / "ckpt_000200.pt").exists() for run in runs] == [True, True, False]


def test_a_scene_in_blocks(tmp_path: Path, splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, array, merge = blocks("city")
    across, down = map(int, re.search(r"--blocks (\d+)x(\d+)", alone).groups())
    assert f"--array=0-{across * down - 1} " in array, "a job for each block"
    add_points(write_scene(tmp_path / "city"))
    alone, array = (quick(text.replace(f"{across}x{down}", "2x1"), 20, QUICK_BLOCKS) for text in (alone, array))

    monkeypatch.chdir(tmp_path)
    in_turn(alone, splat)
    whole = (tmp_path / "city.sog").read_bytes()
    shutil.rmtree(tmp_path / "output")
    scheduler = Scheduler(tmp_path)
    assert [scheduler.run(array, task=task) for task in (0, 1)] == [0, 0]
    in_turn(f"{merge}splat export output/city -o again.sog", splat)
    assert (tmp_path / "again.sog").read_bytes() == whole, "as jobs, or in turn"


def test_a_video_becomes_a_page(tmp_path: Path, splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="pip install 'splatcli[video]'")
    import imageio.v3 as imageio

    from tests.sfm import corner

    options = {"plugin": "FFMPEG", "fps": 5, "codec": "libx264", "quality": 10, "macro_block_size": 4}
    imageio.imwrite(tmp_path / "walk.mp4", [corner.image(index) for index in range(9)], **options)
    (block,) = blocks("phone-video")
    monkeypatch.chdir(tmp_path)
    in_turn(quick(block, 30, ("--sh-degree", "1", "--cap-max", "3000")), splat)
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert b"<html" in (tmp_path / "walk.html").read_bytes()
    assert (tmp_path / "output/walk-sfm/sparse/0/images.bin").exists()


@pytest.fixture(scope="module")
def tables(finished_run: Path) -> Columns:
    """The Gaussians of the finished run, for files of other programs."""
    latest = find_latest_sound(finished_run).path
    assert latest is not None
    found = gaussians_to_render(load_checkpoint(latest))
    return Columns(found.means, found.quats, found.log_scales, found.logit_opacities, found.sh0, found.shN)


@pytest.mark.parametrize(
    ("guide", "kinds"),
    [("from-gsplat", ["gsplat"]), ("from-3dgs", ["inria", "ply", "nerfstudio"])],
    ids=["gsplat", "3dgs"],
)
def test_models_of_other_programs(
    guide: str,
    kinds: list[str],
    tables: Columns,
    tiny_scene: Path,
    tmp_path: Path,
    splat: Splat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(tiny_scene, tmp_path / "scene")
    for kind in kinds:
        write(kind, tables, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(guide):
        in_turn(block.replace("splat train ", "splat train --iterations 3 "), splat)
    assert len(list((tmp_path / "renders").glob("*.png"))) == 2
    assert (tmp_path / "output/refined/ckpts/ckpt_000003.pt").exists()


def rows(page: Path) -> list[list[str]]:
    """The rows of all tables of a page."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]


def test_flags_of_other_programs_get_the_answer_that_the_guide_shows(splat: Splat) -> None:
    typed = [row for row in rows(GUIDES / "from-3dgs.md") if row[0].startswith("`splat train ")]
    assert len(typed) > 3
    for words, answer in typed:
        done = splat(*shlex.split(words.strip("`"))[1:])
        assert done.code == 2
        assert f"help: {answer.strip('`')}" in done.err


def test_every_flag_that_the_guides_name_exists() -> None:
    known = set(re.findall(r"--[a-z0-9-]+", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")))
    named = set()
    for page in GUIDES.glob("*.md"):
        named |= {(page.name, flag) for row in rows(page) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", row[-1])}
        commands = re.findall(r"^splat .*|^exec splat .*", page.read_text(encoding="utf-8"), re.MULTILINE)
        named |= {(page.name, flag) for line in commands for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", line)}
    assert len(named) > 40
    known |= {"--build-arg", "--gpus", "--time"}  # Docker's
    assert {(page, flag) for page, flag in named if flag not in known} == set()
