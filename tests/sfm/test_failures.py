"""Images that do not suffice and workers that crash: a message, the right class, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.errors import OutputError, ResourceError, SceneError
from splatcli.sfm import features
from splatcli.sfm.execution import Execution
from splatcli.sfm.images import SfmInput, find_input, readable
from splatcli.sfm.job import Job, reconstruct
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.prepare import prepare
from splatcli.sfm.worker import crashed, run_worker
from tests.scene import made
from tests.sfm import corner
from tests.sfm.conftest import find_cameras_of, write_noise


def flat(folder: Path) -> None:
    for index in range(3):
        Image.new("RGB", (80, 60), (90 + index,) * 3).save(folder / f"{index}.png")


def same_place(folder: Path) -> None:
    """One image three times, in different files: everything matches and nothing has depth."""
    image = Image.fromarray(corner.image(0))
    for index in range(3):
        image.save(folder / f"{index}.png", compress_level=4 * index + 1)


def one_good(folder: Path) -> None:
    for index in range(2):
        (folder / f"{index}.png").write_bytes(b"\x89PNG\r\n%d" % index)
    Image.fromarray(np.zeros((60, 80, 3), dtype=np.uint8)).save(folder / "2.png")


def tiny(folder: Path) -> None:
    for index in range(3):
        Image.new("RGB", (1, 1), (90 + index,) * 3).save(folder / f"{index}.png")


def dangling(folder: Path) -> None:
    write_noise(folder, 2)
    (folder / "z.png").symlink_to("moved.png")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        pytest.param(lambda folder: None, "there are no images", id="empty"),
        pytest.param(lambda folder: write_noise(folder, 1), "there is only one image here, at least 3", id="one image"),
        pytest.param(lambda folder: write_noise(folder, 2), "only 2 images here, at least 3", id="two images"),
        pytest.param(lambda folder: write_noise(folder / "masks", 5), "there are no images", id="masks only"),
        pytest.param(
            one_good, "only 1 of 3 images can be used, at least 3 are needed; 2 cannot be read, 0.png", id="damaged"
        ),
        pytest.param(dangling, "2 of 3 images can be used, at least 3 are needed; 1 cannot be read, z.png", id="link"),
        pytest.param(tiny, "no two of the 3 images show the same thing", id="a pixel"),
        pytest.param(flat, "no two of the 3 images show the same thing", id="no texture"),
        pytest.param(lambda folder: write_noise(folder, 3), "no two of the 3 images", id="nothing in common"),
        pytest.param(same_place, "none of the 3 images could be registered: a rotation alone", id="no depth"),
    ],
)
def test_images_that_do_not_suffice(harm: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    images, folder = tmp_path / "photos", tmp_path / "made"
    images.mkdir()
    folder.mkdir()
    harm(images)
    with pytest.raises(SceneError) as caught:
        reconstruct(find_input(images), SfmOptions(), folder, Execution())
    assert says in str(caught.value)
    assert caught.value.remedy
    assert str(tmp_path) in str(caught.value.where)


def test_a_name_that_is_not_utf8_is_left_out_before_the_work(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    write_noise(tmp_path, 3)
    (tmp_path / "0.png").rename(tmp_path / name)
    headers, bad = readable(find_input(tmp_path), 1 << 20)
    assert list(headers) == ["1.png", "2.png"]
    assert "not valid UTF-8" in bad[name].what
    with pytest.raises(SceneError, match=r"only 2 of 3 images can be used.* not valid UTF-8"):
        find_cameras_of(tmp_path, place=tmp_path / "made")


@pytest.mark.parametrize(
    ("code", "log", "says"),
    [
        (-9, "", "most likely because the machine ran out of memory"),
        (-6, "F20260101 1:1:1 7 ba.cc:12] Check failed: a > b (1 vs. 2) \n*** stack ***\n", "by SIGABRT"),
        (-6, "F20260101 1:1:1 7 ba.cc:12] Check failed: a > b (1 vs. 2) \n", "motion: Check failed: a > b (1 vs. 2)"),
        (1, "Traceback\n  File x\nRuntimeError: odd\n", "with exit code 1 during structure from motion: RuntimeError"),
        (-6, "terminate called\n  what():  x\nstd::bad_alloc\n", "ran out of memory"),
        (
            -6,
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  [io.cc:17] no such key\n"
            "*** Aborted at 1795676636 ***\nPC: @     0x7f5e714a8eec (/lib/libc.so.6)\n    @     0x7f5e abort\n",
            "by SIGABRT during structure from motion: no such key",
        ),
        (-11, "", "by SIGSEGV during structure from motion"),
    ],
)
def test_a_crash_is_reported_with_its_reason(code: int, log: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    problem = crashed(code, path)
    assert isinstance(problem, ResourceError)
    assert says in problem.what
    assert "--max-image-size" in str(problem.remedy)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch) -> Callable[[str], None]:
    """Puts a shell script in the worker's place."""

    def use(script: str) -> None:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return use


def test_an_abort_leaves_a_message_and_nothing_else(images: Path, tmp_path: Path, worker) -> None:
    worker("cat > /dev/null; kill -ABRT $$")
    with pytest.raises(ResourceError, match="by SIGABRT"):
        find_cameras_of(images, place=tmp_path / "deep" / "scene")
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def test_a_full_disk_is_named(images: Path, tmp_path: Path, worker) -> None:
    worker(
        'cat > /dev/null; echo "  what():  [database_sqlite.cc:1737] SQLite error: database or disk is full" >&2;'
        "echo 'PC: @     0x7f5e714a8eec (/lib/libc.so.6+0x8aeeb)' >&2; kill -ABRT $$"
    )
    with pytest.raises(OutputError, match="the disk became full") as caught:
        find_cameras_of(images, place=tmp_path / "scene")
    assert str(tmp_path / "scene") in str(caught.value.where)
    assert "-o" in str(caught.value.remedy)


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(
    images: Path, tmp_path: Path, worker, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Root may write everywhere, so that the system's refusal is made."""
    place, real = tmp_path / "given" / "scene", os.mkdir

    def refuse(path: str | Path, *arguments: object, **rest: object) -> None:
        if Path(path).is_relative_to(place.parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        real(path, *arguments, **rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", refuse)
        for parent_there in (False, True):
            if parent_there:
                real(place.parent)
            assert run(["sfm", str(images), "-o", str(place)]) == 8
            said = capfd.readouterr().err
            assert "cannot be written: Permission denied" in said
            assert f"where: {place}\n" in said
            assert "choose another place with -o" in said
            assert ".tmp." not in said
    worker(
        "cat > request; read -r f < request; f=${f#*'\"folder\": \"'}; f=${f%%'\"'*};"
        """echo '{"error": {"error": "E008", "what": "w", "where": "'$f'/images/a.png", "help": "h"}}'"""
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError) as caught:
        find_cameras_of(images, place=place)
    assert (caught.value.what, caught.value.where, caught.value.remedy) == ("w", str(place), "h")


def test_a_crash_on_a_full_disk_is_not_blamed_on_memory(
    images: Path, tmp_path: Path, worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker("cat > /dev/null; kill -ABRT $$")
    monkeypatch.setattr("splatcli.sfm.worker.free_bytes", lambda folder: 4096)
    with pytest.raises(OutputError, match="the disk became full"):
        find_cameras_of(images, place=tmp_path / "scene")


@pytest.mark.parametrize("kind", ["cameras", "images", "points3D", "frames"])
def test_a_model_that_a_full_disk_cuts_is_not_taken_for_whole(kind: str, tmp_path: Path) -> None:
    """pycolmap writes it without a word."""
    images = write_noise(tmp_path / "photos", 3)

    class Model:
        def write_binary(self, folder: Path) -> None:
            file = made.write_model(folder, made.reconstruction()) / f"{kind}.bin"
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    inputs, folder = find_input(images), tmp_path / "scene"
    folder.mkdir()
    prepared = prepare(inputs, SfmOptions(), folder, Execution())
    job = Job(prepared, inputs, SfmOptions(), folder, Execution())
    with pytest.raises(OutputError, match=rf"disk full\?\): {kind}\.bin") as caught:
        job._write(Model(), 0)  # type: ignore[arg-type]
    assert "free some space" in str(caught.value.remedy)


def killed(image: features.SfmImage, options: SfmOptions, use_gpu: bool) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_that_looks_for_features_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills the largest process where memory runs out."""
    monkeypatch.setattr(features, "_features_of", killed)
    images = write_noise(tmp_path / "photos", 3)
    (tmp_path / "made").mkdir()
    with pytest.raises(ResourceError, match="was killed, most likely because the machine ran out of memory"):
        reconstruct(find_input(images), SfmOptions(), tmp_path / "made", Execution(num_threads=2))


def test_a_worker_that_ends_before_it_has_read_a_long_request(tmp_path: Path, worker) -> None:
    worker("exec 0<&-; exit 3")
    inputs = SfmInput(tmp_path, tuple(f"{'x' * 200}{number}.jpg" for number in range(10_000)))
    with pytest.raises(ResourceError, match="ended with exit code 3"):
        run_worker(inputs, SfmOptions(), tmp_path, Execution())


def test_a_worker_that_is_killed_while_it_writes(tmp_path: Path, worker) -> None:
    worker("""cat > /dev/null; printf '{"facts": {"na'; kill -KILL $$""")
    with pytest.raises(ResourceError, match="was killed, most likely because the machine ran out of memory"):
        run_worker(SfmInput(tmp_path, ("a.jpg",)), SfmOptions(), tmp_path, Execution())


def test_a_worker_can_read_its_log(tmp_path: Path, worker) -> None:
    """COLMAP tells of the progress of matching nowhere else."""
    worker("""cat > /dev/null; echo a word >&2; cat <&2 && echo '{"facts": {"readable": true}}'""")
    inputs = SfmInput(tmp_path, ("a.jpg",))
    facts = run_worker(inputs, SfmOptions(), tmp_path, Execution())
    assert facts == {"readable": True}


def test_pycolmap_leaves_no_log_behind(tmp_path: Path) -> None:
    """A process of its own: pycolmap looks for the temporary folder once."""
    code = "from splatcli.scene._pycolmap import pycolmap; pycolmap.logging.error('a word')"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "a word" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_worker_keeps_its_kind_and_remedy(images: Path, tmp_path: Path, worker) -> None:
    worker("""cat > /dev/null; echo '{"error": {"error": "E003", "what": "w", "where": "x", "help": "h"}}'""")
    with pytest.raises(SceneError) as caught:
        find_cameras_of(images, place=tmp_path / "scene")
    assert (caught.value.what, caught.value.where, caught.value.remedy) == ("w", "x", "h")


def test_ctrl_c_ends_the_worker_and_leaves_nothing(images: Path, tmp_path: Path, worker) -> None:
    worker("""cat > /dev/null; echo '{"phase": "features", "done": '$$', "total": 9}'; exec sleep 60""")
    heard: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        heard.append(done)
        raise KeyboardInterrupt

    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        find_cameras_of(images, place=tmp_path / "scene", progress=progress)
    assert time.monotonic() - since < 30, "the worker was waited for"
    with pytest.raises(ProcessLookupError):
        os.kill(heard[0], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def test_an_image_that_cannot_be_opened_counts_in_the_fingerprint(tmp_path: Path) -> None:
    """It is left out, and cameras are computed anew once it is there."""
    write_noise(tmp_path, 3)
    whole = find_input(tmp_path).fingerprint()
    (tmp_path / "z.png").symlink_to("moved.png")
    broken = find_input(tmp_path).fingerprint()
    assert broken == find_input(tmp_path).fingerprint() != whole
    write_noise(tmp_path / "more", 1)
    next((tmp_path / "more").iterdir()).rename(tmp_path / "moved.png")
    assert find_input(tmp_path).fingerprint() != broken


@pytest.mark.parametrize("failing", ["mkdir", "worker"])
def test_an_output_that_cannot_be_written_is_named_as_it_was_given(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: str
) -> None:
    """And not the folder beside it that is worked in."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def fill(_: object, __: object, made: Path, ___: object) -> None:
        raise OutputError("the disk became full during structure from motion", where=made)

    monkeypatch.chdir(tmp_path)
    if failing == "mkdir":
        made = Path.mkdir
        monkeypatch.setattr(
            Path, "mkdir", lambda self, *a, **k: (refuse if ".tmp." in self.name else made)(self, *a, **k)
        )
    else:
        monkeypatch.setattr("splatcli.sfm.run.run_worker", fill)
    assert run(["sfm", str(images), "-o", "cams"]) == 8
    said = capfd.readouterr().err
    assert "where: cams\n" in said
    assert ".tmp." not in said
    assert run(["sfm", str(images)]) == 8
    assert f"where: {tmp_path / 'output' / 'photos-sfm'}\n" in capfd.readouterr().err
