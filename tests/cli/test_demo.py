"""splat demo: the sample scene trains without a checkout beside it, and is shown."""

from __future__ import annotations

import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from splatcli.cli import demo
from splatcli.errors import SceneError
from tests.forked import splat_command

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_trains_and_serves_its_model(tmp_path: Path) -> None:
    command = [*splat_command(), "demo", "-n", "20", "--view", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            checkpoint = process.stdout.readline().strip()
            assert (tmp_path / checkpoint).is_file()
            assert Path(checkpoint).is_relative_to("output/demo")
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(url) as page:
                assert b"<html" in page.read(1000)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    # A model of few steps can be exported and read again.
    for words in (["output/demo", "-o", "young.ply"], ["young.ply", "-o", "again.spz"]):
        export = [*splat_command(), "export", *words, "-q"]
        done = subprocess.run(export, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr


def test_the_sample_scene_is_found_in_the_package_and_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo.sample_scene() == ROOT / "data" / "samples" / "courtyard"
    package = tmp_path / "splatcli"
    monkeypatch.setattr(demo, "_PACKAGE", package)
    with pytest.raises(SceneError, match="sample scene is missing"):
        demo.sample_scene()
    shutil.copytree(ROOT / "data" / "samples" / "courtyard", package / "_samples" / "courtyard")
    assert demo.sample_scene() == package / "_samples" / "courtyard"
