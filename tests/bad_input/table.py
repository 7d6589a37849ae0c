"""The table of bad inputs: each case damages one good thing, runs one command line, and says how that has to end.

The cases stand in ``test_*_rows.py``, one module for each part of the program, in a list called CASES:

    CASES = [Case(4, "cameras.bin cut off", cut_cameras, says=("cameras.bin", "byte"))]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_row(case: Case, expect: Expect) -> None:
        expect(case)

Whatever a case says, this holds too: no traceback anywhere; the message has the error id that belongs to the exit code
and says what helps; with --json the same comes as an object; nothing is written outside ``out`` and ``output``, not
even a crash report, and nothing at all by a command that is refused; and memory stays bounded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap

COURTYARD = Path(__file__).resolve().parents[2] / "data/samples/courtyard"
WIDTH, HEIGHT, VIEWS = 80, 60, 12

#: Trains one step of the scene in the current folder; a second or less.
QUICK = ("-n", "1", "--sh-degree", "1", "--set", "model.random_points=99", "--device", "cpu")
TRAIN = ("train", "scene", "-o", "out", *QUICK)

#: Folders that a command may write to.
OUTPUTS = ("out", "output")

#: Bytes beyond those before it that a command may touch: a hundred times the good scene with its run, and far less than
#: what any of the false counts claims.
MEMORY = 256 << 20


@dataclass(frozen=True)
class Case:
    """One damage and how a command line answers it.

    row: of the table of bad inputs (1 to 72).
    name: what is wrong.
    harm: makes the case: given the current folder, which holds the good scene as ``scene/`` and nothing else.
    code: the exit code.
    says: what the messages have to hold: stderr, and where nothing is wrong stdout too.
    flags: added to ``command``.
    command: the words after ``splat``; paths are relative to the current folder.
    memory: bytes that the command may touch.
    begins: training has begun when it fails, so that a run folder stays, perhaps with a result.
    """

    row: int
    name: str
    harm: Callable[[Path], object]
    code: int = 3
    says: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = TRAIN
    memory: int = MEMORY
    begins: bool = False

    def __str__(self) -> str:
        return f"row {self.row}: {self.name}"


#: Runs a case and checks how it ends; returns what came on stderr.
Expect = Callable[[Case], str]


def check(case: Case, folder: Path, temporary: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The work of ``expect``. folder: the current one, with the good scene; temporary: where temporary files go."""
    case.harm(folder)
    words = [*case.command, *case.flags]
    made = [name for name in OUTPUTS if not (folder / name).exists()]
    free = () if case.code and not case.begins else OUTPUTS
    before, there = snapshot(folder, free), set(temporary.iterdir())
    capfd.readouterr()
    resident = forget_peak()
    code = run(words)
    peak = peak_memory()
    out, err = capfd.readouterr()
    assert code == case.code, f"ended with {code}:\n{err}"
    assert "Traceback" not in out + err
    messages = err if code else err + out
    for text in case.says:
        assert text in messages, f"does not say {text!r}:\n{messages}"
    assert snapshot(folder, free) == before, f"something beside {free} was changed"
    left = sorted(path.name for path in set(temporary.iterdir()) - there)
    assert not left, f"left behind: {left}"
    assert peak - resident <= case.memory, f"{(peak - resident) >> 20} MiB were touched"
    if code:
        assert f"error[E{code:03}]: " in err
        assert "help: " in err
        assert case.begins or not out
        for name in made:
            shutil.rmtree(folder / name, ignore_errors=True)
        run([*words, "--json"])
        problem = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert (problem["event"], problem["error"], problem["exit_code"]) == ("error", f"E{code:03}", code)
    else:
        assert "error[" not in err
    return err


def snapshot(folder: Path, free: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Path -> (size, time of the last change) of everything under ``folder`` but what is in its folders ``free``."""
    found = {}
    for base, folders, files in os.walk(folder):
        if Path(base) == folder:
            folders[:] = [name for name in folders if name not in free]
        found.update({str(Path(base, name)): (0, 0) for name in folders})
        for name in files:
            path = Path(base, name)
            status = path.lstat()
            # A run's lock names who took it last.
            found[str(path)] = (0, 0) if name == "lock" else (status.st_size, status.st_mtime_ns)
    return found


def forget_peak() -> int:
    """Lets the kernel measure this process's peak memory anew; returns its resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """The most bytes that were resident since ``forget_peak``."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) << 10


def make_good_scene(folder: Path) -> Path:
    """Twelve views of the sample scene at a quarter of its size, in COLMAP's layout with observations and tracks."""
    model = pycolmap.Reconstruction()
    model.read_binary(str(COURTYARD / "sparse/0"))
    kept = sorted(model.images)[:: len(model.images) // VIEWS][:VIEWS]
    for image_id in sorted(set(model.images) - set(kept)):
        model.deregister_frame(model.image(image_id).frame_id)
    for camera in model.cameras.values():
        camera.rescale(WIDTH, HEIGHT)
    for image_id in kept:
        image = model.image(image_id)
        (folder / "images").mkdir(parents=True, exist_ok=True)
        with Image.open(COURTYARD / "images" / image.name) as full_size:
            ratio = WIDTH / full_size.width
            full_size.resize((WIDTH, HEIGHT)).save(folder / "images" / image.name, quality=90)
        for point in image.points2D:
            point.xy = point.xy * ratio
    (folder / "sparse/0").mkdir(parents=True)
    model.write_binary(str(folder / "sparse/0"))
    return folder


def copy_scene(good: Path, folder: Path) -> Path:
    """A copy of the good scene to be damaged, as ``scene/`` in ``folder``."""
    return Path(shutil.copytree(good, folder / "scene"))
