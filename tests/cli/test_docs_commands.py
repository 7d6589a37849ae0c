"""Each command of the documents: its options exist, and it works with a small scene in the place of a real one.

The guides have tests of their own (test_guides.py), and so has the README (tests/test_docs.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.foreign.imported import Columns
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.cli.commands import app, run
from splatcli.train.state import gaussians_to_render
from tests.checkpoint.foreign.made import write
from tests.cli.tiny import HEIGHT, QUICK, WIDTH, add_points
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat
from tests.sfm import corner

pytestmark = NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: What runs elsewhere, or cannot run here, and the test that tries it.
ELSEWHERE = {
    r"--ranks|torchrun": "tests/distributed/test_commands.py",
    r"^splat view|\| splat view|--viewer|^ssh|--view$": "tests/cli/test_view.py",
    r"\$SLURM|^exec ": "tests/cli/test_guides.py",
    r"^kill ": "tests/cli/test_signals.py",
    r"^make torture|^python -m tests\.torture": "tests/torture/test_inventory.py",
    r"^python benchmarks/|bench --plan": "tests/bench/test_plan.py",
    r"^splat demo": "tests/cli/test_demo.py",
    r"--max-time": "tests/cli/test_max_time.py",
    r"--lpips": "tests/render/test_perceptual.py",
    r"walk\.mp4": "tests/cli/test_guides.py",
    r"^splat (sfm|train) clips/$": "tests/sfm/test_gaps.py",
    r"^splat sfm (images|photos)/( -o scene/.*)?$|^splat train images/$": "tests/sfm/test_commands.py",
    r"^splat bench scene/ --setting": "tests/bench/test_bench.py",
    r"--gcp": "tests/sfm/test_control_points.py",
    r"^splat sfm .* --cameras": "tests/sfm/test_triangulate.py",
    r"--model sparse/1": "tests/sfm/test_captures.py",
}
QUICK_BLOCKS = (*QUICK[2:], "--set", "data.block_share=1")
QUICK_PHOTOS = ("--sh-degree", "1", "--cap-max", "3000")
#: Settings of the documents, and those of the small scene: it has ten images, and a run of 40 steps.
SMALLER = {
    "ckpt_007000": "ckpt_000040",
    "--blocks 2x3": "--blocks 2x1",
    "--blocks 3x4": "--blocks 2x1",
    "1280x720": "64x36",
    "640x480": "64x48",
    "--iterations 30000": "--iterations 50",
    "--iterations 10000": "--iterations 50",
    "--stop-at 1000": "--stop-at 20",
    "-r 2 ": "",
    "-r 4 ": "",
    "--seeds 1,2": "--seeds 1",
    "box:-1,-1,-1,1,1,1": "box:-1,-1,-1,1,0.5,1",
    "images/": "photos/",
    "benchmarks.fisheye FOLDER": "benchmarks.fisheye FOLDER --preview --steps 20 --cap-max 1000",
    "sphere:0,0,0,1.5 --resolution 400": "sphere:0,0,0,50 --resolution 64",
    "sphere:0,0,0.6,2.3 --resolution 400": "sphere:0,0,0.6,50 --resolution 64",
}


def commands() -> list[tuple[str, str]]:
    """(page, command) of the shell blocks of docs/, but for the guides; continued lines joined; none twice."""
    found: dict[str, str] = {}
    for page in sorted(DOCS.glob("*.md")):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", "").splitlines():
                text = re.sub(r"\s+#\s.*", "", line).strip()
                if text and not text.startswith("#"):
                    found.setdefault(text, page.stem)
    return [(page, text) for text, page in found.items()]


def here(text: str) -> bool:
    return not any(re.search(pattern, text) for pattern in ELSEWHERE)


COMMANDS = commands()


def stages(text: str) -> Iterator[tuple[list[str], Path | None]]:
    """(words, file that stdout goes to) of each command of a pipeline."""
    for stage in re.split(r" \| ", text):
        words, _, target = stage.partition(" > ")
        yield shlex.split(words), Path(target.strip()) if target else None


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=[text for _, text in COMMANDS])
def test_the_options_of_documented_commands_exist(page: str, text: str) -> None:
    group = typer.main.get_command(app)
    for part in text.split(" && "):
        for words, _ in stages(part):
            if "splat" not in words[:1]:
                continue
            words = ["0" if word.startswith("$SLURM") else word for word in words]
            name, *rest = words[1:]
            command = group.commands[name]  # type: ignore[attr-defined]
            command.make_context(name, rest, resilient_parsing=False)


def test_what_runs_elsewhere_names_tests_that_exist() -> None:
    for pattern, test in ELSEWHERE.items():
        assert (ROOT / test).exists(), test
        assert any(re.search(pattern, text) for _, text in COMMANDS), pattern
    assert sum(here(text) for _, text in COMMANDS) > 60


@pytest.fixture(scope="module")
def prepared(
    tiny_scene: Path,
    finished_run: Path,
    good_run: Path,
    exported_ply: Path,
    splat_once: Splat,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with everything that the documents name."""
    folder = tmp_path_factory.mktemp("documents")
    add_points(Path(shutil.copytree(tiny_scene, folder / "scene")))
    shutil.copytree(finished_run, folder / "output" / "scene")
    (folder / "photos").mkdir()
    for index in range(8):
        Image.fromarray(corner.image(index)).save(folder / "photos" / f"{index}.jpg", quality=95)
    for name in ("scene", "download", "room", "chair", "east", "west"):
        shutil.copy(exported_ply, folder / f"{name}.ply")
    assert splat_once("export", good_run, "-o", folder / "point_cloud.ply", "-q").code == 0  # it is like its images
    shutil.copytree(folder / "scene", folder / "city")
    (folder / "run.toml").write_text("[optim]\nmeans_lr = 1e-4\n")

    latest = find_latest_sound(finished_run).path
    assert latest is not None
    model = gaussians_to_render(load_checkpoint(latest))
    tables = Columns(model.means, model.quats, model.log_scales, model.logit_opacities, model.sh0, model.shN)
    write("inria", tables, folder).rename(folder / "chkpnt30000.pth")
    (folder / "results/garden/ckpts").mkdir(parents=True)
    write("gsplat", tables, folder).rename(folder / "results/garden/ckpts/ckpt_29999_rank0.pt")
    (folder / "nerfstudio_models").mkdir()
    write("nerfstudio", tables, folder).rename(folder / "nerfstudio_models/step-000029999.ckpt")
    run_folder, path = folder / "output" / "scene", folder / "camera_path.json"
    for words in (
        ("export", folder / "scene.ply", "-o", folder / "download.spz"),
        ("export", folder / "scene.ply", "-o", folder / "scene.spz"),
        ("export", run_folder, "-o", folder / "cameras.json"),
        ("render", run_folder, "--views", "orbit", "--frames", "3", "-o", folder / "orbit", "--save-cameras", path),
        ("train", folder / "city", "--blocks", "2x1", "-o", folder / "output" / "city", *QUICK_BLOCKS, "-n", "20"),
    ):
        assert splat_once(*words).code == 0, words
    return folder


def quick(text: str) -> str:
    """``text`` with few steps and small pictures: real runs take minutes."""
    for documented, smaller in SMALLER.items():
        text = text.replace(documented, smaller)
    text = re.sub(r"--iterations 7000|--iterations 3000", "--iterations 30", text)
    if text.startswith("splat bench"):
        text = re.sub(r'"(\w+)=(.*?)"', rf'"\1=\2 {" ".join(QUICK)} --iterations 20"', f"{text} --seeds 1")
        return re.sub(r" --iterations 30(?= )", "", text)
    chosen = QUICK_BLOCKS if "--blocks" in text else QUICK_PHOTOS if "train photos" in text else QUICK
    steps = () if re.search(r"--iterations|--max-time", text) else ("--iterations", "30")
    return re.sub(r"splat train \S+", lambda found: " ".join([found[0], *chosen, *steps]), text)


@pytest.mark.parametrize(
    ("page", "text"), [(p, t) for p, t in COMMANDS if here(t)], ids=[t for _, t in COMMANDS if here(t)]
)
def test_documented_commands_work(
    page: str,
    text: str,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    if new := re.search(r"^splat (?:train|sfm) .*-o (\S+)", text):
        shutil.rmtree(new[1], ignore_errors=True)
    for part in quick(text).split(" && "):
        piped = b""
        for words, target in stages(part):
            if words[0] == "splat":
                with stdin(piped):
                    code = run(words[1:])
                piped, messages = capfdbinary.readouterr()
            else:
                done = subprocess.run([program(words[0]), *words[1:]], input=piped, capture_output=True, check=False)
                code, piped, messages = done.returncode, done.stdout, done.stderr
            assert code == 0, messages.decode()
            assert b"Traceback" not in messages
            if target is not None and str(target) != os.devnull:
                assert piped, "nothing is written to the file"
                target.write_bytes(piped)


def program(name: str) -> str:
    """The program that a command names; skips the test where it is not installed."""
    if name == "python":
        return sys.executable
    if name == "ffmpeg" and shutil.which(name) is None:
        return str(pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe())
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@contextmanager
def stdin(content: bytes) -> Iterator[None]:
    """The content as stdin of this process; /dev/null without one."""
    kept = os.dup(0)
    with tempfile.TemporaryFile() as file, open(os.devnull, "rb") as nothing:
        file.write(content)
        file.seek(0)
        os.dup2(file.fileno() if content else nothing.fileno(), 0)
        try:
            with open(0, closefd=False, encoding="utf-8") as text, pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "stdin", text)
                yield
        finally:
            os.dup2(kept, 0)
            os.close(kept)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)


def test_documented_python_works(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, with what the words around them promise to be there."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    training, hooks, own_loss, embedding, strategy, drop_in, loss = python_blocks("api")
    settings = 'init="random", random_points=200, prune_scale3d=100.0, prune_opacity=0.0001'
    training = training.replace("data/samples/courtyard", "scene").replace(", resolution=2", "")
    names: dict[str, Any] = {}
    exec(training.replace("iterations=2_000, cap_max=100_000", f"iterations=20, {settings}"), names)
    assert names["image"].shape == (HEIGHT, WIDTH, 3)
    assert (folder / "courtyard.sog").stat().st_size > 0

    exec(hooks.replace("eval_every=500", f'eval_every=10, iterations=20, output="hooked", {settings}'), names)
    assert names["trainer"].run().metrics["step"] == 20

    exec(
        own_loss.replace("loss=regularised", f'loss=regularised, iterations=3, output="regularised", {settings}'), names
    )
    assert (folder / "regularised" / "ckpts" / "ckpt_000003.pt").is_file()

    names["torch"] = torch
    torch.manual_seed(0)
    exec(embedding.replace("[appearance])", f'[appearance], iterations=3, output="appearance", {settings})'), names)
    torch.manual_seed(0)
    untrained = names["Appearance"](names["scene"])
    assert not torch.equal(names["appearance"].colours[-1].bias, untrained.colours[-1].bias)

    refinements = 'iterations=12, refine_start=2, refine_every=4, refine_stop=10, output="faint", cap_max=230'
    exec(
        strategy.replace(
            "**as_absgrad", f'{refinements}, init="random", random_points=200, prune_scale3d=100.0, **as_absgrad'
        ).replace("0.02", "0.0001"),
        names,
    )
    assert 200 < len(names["splatcli"].Model.load(folder / "faint")) <= 230

    gaussians, camera = names["model"].gaussians, names["scene"].cameras[0]
    names |= {
        "width": WIDTH,
        "height": HEIGHT,
        "means": gaussians.means,
        "quats": gaussians.quats,
        "scales": gaussians.log_scales.exp(),
        "opacities": gaussians.logit_opacities.sigmoid(),
        "colors": torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1),
        "viewmats": torch.as_tensor(camera.viewmat, dtype=torch.float32)[None],
        "Ks": torch.as_tensor(camera.K, dtype=torch.float32)[None],
    }
    assert camera.near > 0.01
    for plane, near in (("", 0.01), (f", near_plane={camera.near}", camera.near)):
        exec(drop_in.replace("sh_degree=3", f"sh_degree=int(colors.shape[1] ** 0.5) - 1{plane}"), names)
        assert names["images"].shape == (1, HEIGHT, WIDTH, 3)
        image = names["model"].render(replace(camera, near=near), background=(0, 0, 0)).image
        torch.testing.assert_close(names["images"][0], image, atol=1e-5, rtol=0)
    names["img1"] = names["img2"] = torch.rand(1, 3, 20, 30, generator=torch.Generator().manual_seed(0))
    exec(loss, names)
    assert float(names["ssim"]) == pytest.approx(1.0, abs=1e-5)
    assert float(names["loss"]) == pytest.approx(0.0, abs=1e-5)

    (stored,) = python_blocks("checkpoint")
    stored = stored.replace("ckpt_000300.pt", "output/scene/ckpts/ckpt_000040.pt")
    names["json"] = json
    exec(stored, names)
    assert names["manifest"]["train"]["step"] == 40
