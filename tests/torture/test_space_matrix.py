"""No model with activated scales or opacities is taken for a raw one, in any format and unit of length."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli.checkpoint.foreign.stored import Stored
from splatcli.cli.model import open_stored
from tests.checkpoint.foreign.made import activated
from tests.torture.space_matrix import DATA, UNITS, WRITERS, Count, accepted, compressed_tables, figures, scaled


def test_the_matrix_has_no_false_accept() -> None:
    found = figures(quick=True)
    assert (found["false_accepts"], found["false_refusals"], found["normalised_refused"]) == (0, 0, 0)
    assert found["activated_models"] == 5 * len(WRITERS) * 12
    assert found["raw_models"] == 5 * len(WRITERS)
    assert set(found["synthetic_by_format"]) == set(WRITERS)


def test_an_accepted_activated_model_would_be_counted() -> None:
    count = Count()
    count.add((1, 0, 0), accepted=True, unit=1.0)
    count.add((0, 1, 0), accepted=False, unit=1.0)
    count.add((0, 0, 0), accepted=False, unit=10.0)
    assert (count.false_accepts, count.normalised_refused, count.false_refusals) == (1, 1, 1)
    assert count.refused_by_unit == {"10": 1}


@pytest.mark.skipif(not DATA.is_dir(), reason="no models of other programs beside the project")
@pytest.mark.parametrize("name", ["inria_ply/point_cloud_iter7000_9080.ply", "biker/biker.compressed.ply"])
def test_real_models_pass_raw_and_fail_activated(name: str) -> None:
    path: Path = DATA / "import_samples" / name
    tables = compressed_tables(path) if "compressed" in name else open_stored(path).tables
    for unit in [1.0] if len(tables.means) > 100_000 else UNITS[::4]:
        raw = scaled(tables, unit)
        assert accepted(Stored("PLY", raw)), unit
        assert not accepted(Stored("PLY", activated(raw, scales=1))), unit
        assert not accepted(Stored("PLY", activated(raw, scales=2))), unit
        assert not accepted(Stored("PLY", activated(raw, opacities=1))), unit
