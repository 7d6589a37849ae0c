"""SOG of version 1, as programs wrote it before there were codebooks, is read; damaged ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.cli.commands import run
from splatcli.formats.registry import import_model, newest_import
from splatcli.gaussians import Gaussians
from tests.formats.made import errors, scene
from tests.formats.made_sog import bundled, sog_1
from tests.formats.test_refusals import refusal, webp


def read(path: Path) -> Gaussians:
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_values_are_those_that_were_written(degree: int, tmp_path: Path) -> None:
    """To half a step of each channel's range."""
    before = scene(100, degree)
    (tmp_path / "a.sog").write_bytes(bundled(sog_1(before)))
    stored = import_model(tmp_path / "a.sog")
    assert stored.origin == "SOG version 1"
    after = read(tmp_path / "a.sog")
    assert after.sh_degree == degree

    def half_step(values: Any, steps: int = 255) -> float:
        return float(np.ptp(values.double().numpy(), axis=0).max()) / (2 * steps)

    found = errors(before, after)
    stretched = before.means.sign() * before.means.abs().log1p()
    assert found["means"] <= half_step(stretched, 65535) * float(before.means.abs().max() + 1) + 1e-6
    assert found["log_scales"] <= half_step(before.log_scales) + 1e-6
    assert found["sh0"] <= half_step(before.sh0) + 1e-6
    logits = (after.logit_opacities - before.logit_opacities).abs().max()
    assert float(logits) <= half_step(before.logit_opacities) + 1e-6
    assert found["quats"] <= 1.1
    assert found["shN"] <= half_step(before.shN.reshape(-1)) + 1e-6 if degree else found["shN"] == 0


def test_a_folder_is_read_as_the_bundle(tmp_path: Path) -> None:
    members = sog_1(scene(64, 1))
    (tmp_path / "a.sog").write_bytes(bundled(members))
    (tmp_path / "folder").mkdir()
    for name, content in members.items():
        (tmp_path / "folder" / name).write_bytes(content)
    assert newest_import(tmp_path / "folder") == tmp_path / "folder/meta.json"
    for (name, a), (_, b) in zip(
        read(tmp_path / "a.sog").items(), read(tmp_path / "folder/meta.json").items(), strict=True
    ):
        assert a.equal(b), name


def test_commands_take_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.sog").write_bytes(bundled(sog_1(scene(25, 1))))
    assert run(["info", str(tmp_path / "a.sog")]) == 0
    assert "SOG version 1" in capsys.readouterr().out
    assert run(["export", str(tmp_path / "a.sog"), "-o", str(tmp_path / "b.sog")]) == 0
    assert import_model(tmp_path / "b.sog").origin == "SOG version 2"


Edit = Callable[[dict[str, bytes], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda members, meta: meta["means"].pop("shape"), "means.shape: it is missing"),
        (lambda members, meta: meta["means"].update(shape=[0, 3]), "means.shape"),
        (lambda members, meta: meta["means"].update(shape=[10**12, 3]), "means.shape"),
        (lambda members, meta: meta["means"].update(shape=[10**8, 3]), "100,000,000 are needed"),
        (lambda members, meta: meta["means"].update(mins=[0, 0]), "means.mins"),
        (lambda members, meta: meta["means"].update(files=["means_l.webp"]), "means has one file"),
        (lambda members, meta: meta["scales"].pop("maxs"), "scales.maxs"),
        (lambda members, meta: meta["scales"].update(mins=[0, 0, float("nan")]), "scales.mins"),
        (lambda members, meta: meta["sh0"].update(mins=[0, 0, 0]), "sh0.mins"),
        (lambda members, meta: meta["quats"].update(encoding="quaternion_euler"), "quats.encoding"),
        (lambda members, meta: meta["quats"].update(files=["../quats.webp"]), "quats.files"),
        (lambda members, meta: meta["shN"].update(quantization=6), "shN.quantization"),
        (lambda members, meta: meta["shN"].update(files=["shN_labels.webp"]), "shN has one file"),
        (lambda members, meta: members.update({"shN_centroids.webp": webp(200, 1)}), "is 200 pixels wide"),
        (lambda members, meta: members.update({"shN_centroids.webp": webp(191, 1)}), "192 are needed"),
        (lambda members, meta: members.update({"shN_centroids.webp": webp(192, 1)}), "a label of 99; there are 64"),
        (lambda members, meta: members.update({"sh0.webp": webp(5, 5)}), "100 are needed"),
        (lambda members, meta: members.update({"sh0.webp": webp(2100, 2100)}), "it claims sh0.webp"),
        (lambda members, meta: members.update({"quats.webp": members["sh0.webp"]}), "are known"),
        (lambda members, meta: members.update({"scales.webp": members["scales.webp"][:-9]}), "is no WebP image"),
        (lambda members, meta: members.pop("sh0.webp"), "sh0.webp"),
    ],
)
def test_one_that_does_not_fit_is_refused(edit: Edit, said: str, tmp_path: Path) -> None:
    members = sog_1(scene(100, 1))
    meta = json.loads(members["meta.json"])
    edit(members, meta)
    members["meta.json"] = json.dumps(meta).encode()
    assert said in refusal(bundled(members), tmp_path / "x.sog").what
