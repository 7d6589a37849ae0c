"""Models of other programs come in with the bits that they were stored with, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli import Model
from splatcli.checkpoint.foreign.imported import Columns, ImportedModel, ImportOptions, to_gaussians
from splatcli.checkpoint.foreign.read import read_foreign
from splatcli.errors import ModelFileError
from splatcli.formats.registry import import_model
from tests.checkpoint.foreign.made import (
    WRITERS,
    activated,
    tables_of,
    write,
    write_gsplat,
    write_inria,
    write_nerfstudio,
)


def assert_same(stored: ImportedModel, expected: Columns) -> None:
    for (name, found), table in zip(stored.columns._asdict().items(), expected, strict=True):
        assert (found.dtype, found.shape, found.is_contiguous()) == (torch.float32, table.shape, True), name
        assert found.numpy().tobytes() == table.contiguous().numpy().tobytes(), name


def refusal(path: Path, reading: ImportOptions | None = None) -> str:
    with pytest.raises(ModelFileError) as caught:
        to_gaussians(import_model(path), reading or ImportOptions(), path)
    assert str(path.parent) in str(caught.value)
    return caught.value.what


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("count", "degree"), [(0, 0), (1, 3), (2, 4), (300, 0), (300, 2)])
def test_every_format_keeps_its_bits(kind: str, count: int, degree: int, tmp_path: Path) -> None:
    tables = tables_of(count, degree)
    path = write(kind, tables, tmp_path)
    stored = import_model(path)
    if (kind, degree) == ("nerfstudio", 0):  # colours without harmonics have a definition of their own, tested below
        tables = tables._replace(sh0=stored.columns.sh0)
    assert_same(stored, tables)
    assert (len(stored), stored.sh_degree, stored.declared) == (count, degree, False)
    again = import_model(path)
    assert_same(again, stored.columns)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_gaussians_are_the_stored_numbers(kind: str, tmp_path: Path) -> None:
    tables = tables_of()
    path = write(kind, tables, tmp_path)
    gaussians, notes = to_gaussians(import_model(path), ImportOptions(), path)
    assert torch.equal(gaussians.log_scales, tables.scales)
    assert torch.equal(gaussians.logit_opacities, tables.opacities)
    assert torch.equal(gaussians.quats, tables.quats)
    assert any("frame" in note for note in notes) == (kind in ("gsplat", "nerfstudio"))


def test_the_origin_is_reported(tmp_path: Path) -> None:
    said = {kind: import_model(write(kind, tables_of(), tmp_path)).origin for kind in WRITERS}
    assert said == {
        "ply": "PLY",
        "inria": "checkpoint of the original program (INRIA), iteration 7000",
        "gsplat": "gsplat checkpoint, step 6999",
        "nerfstudio": "nerfstudio checkpoint, step 29999",
    }


@pytest.mark.parametrize("prefix", ["_model.", "_model.module.", "module._model.gauss_params."])
def test_older_names_of_nerfstudio_are_known(prefix: str, tmp_path: Path) -> None:
    tables = tables_of()
    assert_same(read_foreign(write_nerfstudio(tables, tmp_path / "a.ckpt", prefix=prefix)), tables)


def test_the_oldest_nerfstudio_keeps_all_coefficients_in_one_tensor(tmp_path: Path) -> None:
    tables = tables_of(degree=2)

    def merge(stored: dict[str, Any]) -> None:
        state = stored["pipeline"]
        first, rest = state.pop("_model.features_dc"), state.pop("_model.features_rest")
        state["_model.colors_all"] = torch.cat([first[:, None], rest], dim=1)

    assert_same(read_foreign(write_nerfstudio(tables, tmp_path / "a.ckpt", merge, prefix="_model.")), tables)


def test_splatfacto_without_harmonics_has_colours_behind_a_sigmoid(tmp_path: Path) -> None:
    tables = tables_of(degree=0)
    stored = read_foreign(write_nerfstudio(tables, tmp_path / "a.ckpt"))
    shown = 0.5 + 0.28209479177387814 * stored.columns.sh0
    torch.testing.assert_close(shown, tables.sh0.sigmoid(), rtol=0, atol=1e-6)
    assert any("were turned into SH coefficients" in note for note in stored.notes)


@pytest.mark.parametrize(
    ("write_run", "file", "settings", "line"),
    [
        (write_gsplat, "ckpts/ckpt_6999_rank0.pt", "cfg.yml", "antialiased: {}"),
        (write_nerfstudio, "nerfstudio_models/step-000006999.ckpt", "config.yml", "    rasterize_mode: {}"),
    ],
)
def test_the_settings_of_a_run_say_whether_it_was_trained_antialiased(
    write_run: Callable[[Columns, Path], Path], file: str, settings: str, line: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    write_run(tables_of(), path)
    yes, no = ("antialiased", "classic") if write_run is write_nerfstudio else ("true", "false")
    assert not Model.load(path).settings.antialiased
    for value, expected in ((yes, True), (no, False)):
        text = f"!!python/object:a.Config\nmodel:\n{line.format(value)}\nother: 1\n"
        (tmp_path / settings).write_text(text, encoding="utf-8")
        assert Model.load(path).settings.antialiased is expected
        remark = f"it was trained antialiased, as {settings} says, and is rendered so"
        assert (remark in to_gaussians(read_foreign(path), ImportOptions(), path)[1]) is expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tables = Columns(*(table.to(dtype).float() for table in tables_of()))

    def cast(stored: dict[str, Any]) -> None:
        stored["splats"] = {name: table.to(dtype) for name, table in stored["splats"].items()}

    assert_same(read_foreign(write_gsplat(tables, tmp_path / "a.pt", cast)), tables)


def test_slices_of_one_tensor_are_read_as_they_show(tmp_path: Path) -> None:
    """gsplat starts with sh0 and shN as the two halves of one tensor, and with every k-th of the points."""
    tables = tables_of(60)
    colours = torch.cat([tables.sh0[:, None], tables.shN], dim=1)
    points = torch.stack([tables.means, torch.zeros(60, 3)], dim=1).reshape(120, 3)

    def share(stored: dict[str, Any]) -> None:
        stored["splats"].update(sh0=colours[:, :1], shN=colours[:, 1:], means=points[::2])

    assert_same(read_foreign(write_gsplat(tables, tmp_path / "a.pt", share)), tables)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda s: s["splats"].pop("shN"), "it has no splats.shN"),
        (lambda s: s["splats"].update(sh0=7), "splats.sh0 is int, not a tensor"),
        (lambda s: s["splats"].update(scales=torch.zeros(200, 2)), "shape [200, 2] (a 2D Gaussian model, 2DGS?)"),
        (lambda s: s["splats"].update(quats=torch.zeros(199, 4)), "splats.quats has shape [199, 4], not [200, 4]"),
        (lambda s: s["splats"].update(means=torch.zeros(())), "splats.means has shape []"),
        (lambda s: s["splats"].update(shN=torch.zeros(200, 5, 3)), "splats.shN has shape [200, 5, 3]"),
        (lambda s: s["splats"].update(means=torch.zeros(200, 3, dtype=torch.int64)), "splats.means is int64"),
        (lambda s: s.update(splats={"features": 1, "colors": 2}), "come from a network (gsplat's app_opt)"),
        (lambda s: s.pop("splats"), "no model that is known here: a dictionary of step"),
        (lambda s: s.update(splats=[1]), "no model that is known here"),
    ],
)
def test_what_is_no_model_of_gsplat_is_refused(edit: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    assert said in refusal(write_gsplat(tables_of(), tmp_path / "a.pt", edit))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda v: v.append(1), "13 values, the original program's has 12"),
        (lambda v: v.__setitem__(4, torch.zeros(200, 2)), "_scaling has shape [200, 2] (a 2D Gaussian model"),
        (lambda v: v.__setitem__(2, None), "it has no _features_dc"),
        (lambda v: v.__setitem__(0, "x"), "no model that is known here: a tuple of 2 values"),
    ],
)
def test_what_is_no_model_of_inria_is_refused(edit: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    assert said in refusal(write_inria(tables_of(), tmp_path / "a.pth", edit))


def test_other_methods_of_nerfstudio_hold_no_splats(tmp_path: Path) -> None:
    def strip(stored: dict[str, Any]) -> None:
        stored["pipeline"] = {"_model.field.mlp.params": torch.zeros(4)}

    assert "without Gaussians" in refusal(write_nerfstudio(tables_of(), tmp_path / "a.ckpt", strip))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("group", Columns._fields)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_anywhere_is_named_counted_and_placed(
    kind: str, group: str, value: float, tmp_path: Path
) -> None:
    tables = tables_of(30)
    getattr(tables, group).view(30, -1)[17, -1] = value
    path = write(kind, tables, tmp_path)
    said = refusal(path)
    assert "1 NaN or infinite values in " in said
    assert ("vertex 17" if kind == "ply" else "the first at [17") in said
    gaussians, notes = to_gaussians(import_model(path), ImportOptions(drop_nonfinite=True), path)
    assert len(gaussians) == 29
    assert torch.equal(gaussians.means, torch.cat([tables.means[:17], tables.means[18:]]))
    assert "dropped 1 of 30 Gaussians with NaN or infinite values" in notes


def test_the_column_of_a_bad_value_in_a_ply_is_the_files_own(tmp_path: Path) -> None:
    for coefficient in range(3):
        for channel in range(3):
            tables = tables_of(10)
            tables.shN[4, coefficient, channel] = float("nan")
            said = refusal(write("ply", tables, tmp_path))
            assert f"the first in f_rest_{3 * channel + coefficient} of vertex 4" in said


class TestShards:
    def write(self, folder: Path, ranks: list[int], world: int = 3, step: int = 6999) -> Columns:
        """Shards as ``world`` processes leave them, of which those of ``ranks`` are there."""
        whole = tables_of(100)
        (folder / "ckpts").mkdir(exist_ok=True)
        for rank in ranks:
            part = Columns(*(table[rank::world] for table in whole))
            write_gsplat(part, folder / "ckpts" / f"ckpt_{step}_rank{rank}.pt", step=step)
        return Columns(*(torch.cat([table[rank::world] for rank in range(world)]) for table in whole))

    @pytest.mark.parametrize("rank", [0, 2])
    def test_naming_one_reads_all(self, rank: int, tmp_path: Path) -> None:
        whole = self.write(tmp_path, [0, 1, 2])
        stored = read_foreign(tmp_path / "ckpts" / f"ckpt_6999_rank{rank}.pt")
        assert_same(stored, whole)
        assert stored.parts == [34, 33, 33]
        assert "read 3 shards as one model: ckpt_6999_rank0.pt to ckpt_6999_rank2.pt" in stored.notes

    @pytest.mark.parametrize(
        ("ranks", "missing"), [([1], "rank0"), ([2], "rank0.pt; ckpt_6999_rank1"), ([0, 2], "rank1")]
    )
    def test_a_gap_is_refused_with_what_is_missing(self, ranks: list[int], missing: str, tmp_path: Path) -> None:
        self.write(tmp_path, ranks)
        said = refusal(tmp_path / "ckpts" / f"ckpt_6999_rank{ranks[0]}.pt")
        assert "a shard of a model that" in said
        assert missing in said

    def test_other_steps_tell_how_many_there_should_be(self, tmp_path: Path) -> None:
        self.write(tmp_path, [0])
        self.write(tmp_path, [0, 1, 2], step=29999)
        said = refusal(tmp_path / "ckpts" / "ckpt_6999_rank0.pt")
        assert "3 processes trained, and 2 are missing: ckpt_6999_rank1.pt; ckpt_6999_rank2.pt" in said

    def test_statistics_tell_how_many_there_should_be(self, tmp_path: Path) -> None:
        self.write(tmp_path, [0])
        (tmp_path / "stats").mkdir()
        for rank in range(2):
            (tmp_path / "stats" / f"train_step6999_rank{rank}.json").write_text("{}")
        assert "1 is missing: ckpt_6999_rank1.pt" in refusal(tmp_path / "ckpts" / "ckpt_6999_rank0.pt")

    def test_one_process_leaves_one_shard(self, tmp_path: Path) -> None:
        whole = self.write(tmp_path, [0], world=1)
        assert_same(read_foreign(tmp_path / "ckpts" / "ckpt_6999_rank0.pt"), whole)

    def test_shards_of_different_steps_are_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, [0, 1, 2])
        self.write(tmp_path, [1], step=29999)
        (tmp_path / "ckpts" / "ckpt_29999_rank1.pt").replace(tmp_path / "ckpts" / "ckpt_6999_rank1.pt")
        said = refusal(tmp_path / "ckpts" / "ckpt_6999_rank0.pt")
        assert "different steps" in said
        assert "ckpt_6999_rank1.pt of step 29999" in said

    def test_a_single_activated_shard_is_noticed(self, tmp_path: Path) -> None:
        self.write(tmp_path, [0, 1, 2], world=1)
        write_gsplat(activated(tables_of(200), scales=1), tmp_path / "ckpts" / "ckpt_6999_rank1.pt")
        said = refusal(tmp_path / "ckpts" / "ckpt_6999_rank0.pt")
        assert "scales look already activated (all 600 values" in said
