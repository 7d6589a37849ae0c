"""Matching of chosen pairs: descriptors, then the geometry of two views, by pycolmap and through its database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.pairs import Pair

#: Pairs are matched in about so many portions, between which progress is told, but no smaller ones than this.
_PORTIONS, _SMALLEST = 50, 16


def match(
    database: Path,
    names: Sequence[str],
    pairs: Sequence[Pair],
    *,
    seed: int,
    threads: int,
    gpu: bool,
    progress: Callable[[int, int], None],
) -> int:
    """Matches photos pair by pair; returns how many pairs hold together geometrically.

    names: of the images in the database, without spaces. pairs: indices into ``names``.
    """
    matching = pycolmap.FeatureMatchingOptions()
    matching.use_gpu = gpu
    matching.num_threads = threads
    verification = pycolmap.TwoViewGeometryOptions()
    verification.ransac.random_seed = seed
    listed = database.with_name("pairs.txt")
    pairing = pycolmap.ImportedPairingOptions()
    pairing.match_list_path = listed
    portion = max(_SMALLEST, -(-len(pairs) // _PORTIONS))
    for start in range(0, len(pairs), portion):
        part = pairs[start : start + portion]
        _write_pairs(listed, names, part)
        pycolmap.match_image_pairs(
            database, matching_options=matching, pairing_options=pairing, verification_options=verification
        )
        progress(start + len(part), len(pairs))
    with pycolmap.Database.open(database) as store:
        _, inliers = store.read_two_view_geometry_num_inliers()
    return sum(count >= verification.min_num_inliers for count in inliers)


def _write_pairs(path: Path, names: Sequence[str], pairs: Sequence[Pair]) -> None:
    """COLMAP's list: two names a line, separated by a space."""
    path.write_text("".join(f"{names[i]} {names[j]}\n" for i, j in pairs), encoding="utf-8")
