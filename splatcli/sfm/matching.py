"""Matching of chosen pairs: descriptors, then the geometry of two views, by pycolmap and through its database."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2, vq

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.execution import Execution, Phase
from splatcli.sfm.features import Stored
from splatcli.sfm.options import Matching

#: COLMAP keeps the descriptors of about as many images as a block has pairs, and 3 MB each; making their search index
#: anew takes as long as matching a pair. Progress is known from block to block.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 256
#: A line of COLMAP's log at the beginning of a block.
_BLOCK = re.compile(rb"Processing block \[(\d+)/(\d+)\]")
#: Seconds between two looks at the log.
_LOOK_EVERY = 0.5
#: Matches that the geometry of two views must explain: COLMAP's own.
_MIN_INLIERS = 15
#: A second try: descriptors of nearest and second nearest may be this similar (0.8 at first), but the geometry must
#: explain this share of the matches, which keeps pairs that only look alike out.
_LOOSE_RATIO, _LOOSE_INLIERS = 0.9, 0.35


def match(
    database: Path,
    stored: Sequence[Stored],
    pairs: Sequence[Pair],
    execution: Execution,
    phase: Phase = "matching",
    *,
    loose: bool = False,
) -> int:
    """Match images pair by pair; return how many pairs are verified then.

    stored: images in the database. pairs: indices into ``stored``. loose: with a looser ratio test, and then guided by
    the geometry of the two views, which takes longer.
    """
    progress = execution.start(phase)
    matching = pycolmap.FeatureMatchingOptions()
    matching.use_gpu = execution.use_gpu
    matching.num_threads = execution.num_threads
    verification = pycolmap.TwoViewGeometryOptions()
    verification.min_num_inliers = _MIN_INLIERS
    verification.ransac.random_seed = execution.random_seed
    if loose:
        matching.sift.max_ratio = _LOOSE_RATIO
        matching.guided_matching = True
        verification.min_inlier_ratio = _LOOSE_INLIERS
    pairing = pycolmap.ImportedPairingOptions()
    pairing.match_list_path = database.with_name("pairs.txt")
    pairing.block_size = min(max(_SMALLEST_BLOCK, len(stored)), _LARGEST_BLOCK)
    _write_pairs(pairing.match_list_path, stored, pairs)
    with _blocks_of_log(
        lambda begun: progress(min((begun - 1) * pairing.block_size, len(pairs)), len(pairs))
    ) as cancelled:
        pycolmap.match_image_pairs(
            database,
            matching_options=matching,
            pairing_options=pairing,
            verification_options=verification,
            cancellation_token=cancelled,
        )
    progress(len(pairs), len(pairs))
    return len(verified_pairs(database))


@contextmanager
def _blocks_of_log(begun: Callable[[int], None]) -> Iterator[pycolmap.CancellationToken]:
    """Call ``begun`` with the number of each block that COLMAP begins, as its log says in the file that is stderr.

    COLMAP has no call for that. Where stderr is no file that can be read, as a terminal, ``begun`` is not called. What
    it raises cancels the token that is given, and is raised in the end.
    """
    ended, token = threading.Event(), pycolmap.CancellationToken()
    failures: list[BaseException] = []

    def look(place: int) -> None:
        while not ended.wait(_LOOK_EVERY):
            try:
                lines, newline, _ = os.pread(2, 1 << 16, place).rpartition(b"\n")
                place += len(lines + newline)
                for found in _BLOCK.findall(lines)[-1:]:
                    begun(int(found[0]))
            except BaseException as failure:
                failures.append(failure)
                token.cancel()
                return

    try:
        place = os.lseek(2, 0, os.SEEK_CUR)
        os.pread(2, 1, place)
    except OSError:
        yield token
        return
    looking = threading.Thread(target=look, args=(place,), daemon=True)
    looking.start()
    try:
        yield token
    finally:
        ended.set()
        looking.join()
        if failures:  # in place of InterruptedError
            raise failures[0]


def match_again(
    database: Path,
    stored: Sequence[Stored],
    pairs: Sequence[Pair],
    execution: Execution,
    phase: Phase = "matching again",
) -> list[Pair]:
    """Match ``pairs`` anew and loosely; return those that are verified then.

    The arguments are those of ``match``. Pairs that were verified before and would not be now keep their matches.
    """
    ids_of_pairs = image_ids(stored, pairs)
    with pycolmap.Database.open(database) as store:
        before = {pair: store.read_two_view_geometry(*pair) for pair in ids_of_pairs if _is_verified(store, pair)}
        with pycolmap.DatabaseTransaction(store):
            for pair in ids_of_pairs:
                store.delete_matches(*pair)
                store.delete_two_view_geometry(*pair)
    match(database, stored, pairs, execution, "matching again", loose=True)
    with pycolmap.Database.open(database) as store:
        with pycolmap.DatabaseTransaction(store):
            for pair, geometry in before.items():
                if not _is_verified(store, pair):
                    store.delete_two_view_geometry(*pair)
                    store.write_two_view_geometry(*pair, geometry)
        return [pair for pair, ids in zip(pairs, ids_of_pairs, strict=True) if _is_verified(store, ids)]


def delete_other_pairs(database: Path, stored: Sequence[Stored], pairs: Sequence[Pair]) -> None:
    """Delete the matches of all pairs but ``pairs``, which a call with another choice of pairs left.

    The arguments are those of ``match``.
    """
    wanted = set(image_ids(stored, pairs))
    with pycolmap.Database.open(database) as store:
        matched, _ = store.read_num_matches()
        verified, _ = store.read_two_view_geometry_num_inliers()
        with pycolmap.DatabaseTransaction(store):
            for pair in {pycolmap.pair_id_to_image_pair(number) for number in (*matched, *verified)}:
                if (min(pair), max(pair)) not in wanted:
                    store.delete_matches(*pair)
                    store.delete_two_view_geometry(*pair)


def pairs_with_matches(database: Path, stored: Sequence[Stored], pairs: Sequence[Pair]) -> list[Pair]:
    """Return those of ``pairs`` whose descriptors matched, whether or not the geometry of two views explains them.

    COLMAP keeps no matches of pairs with fewer than it asks of a geometry.
    """
    with pycolmap.Database.open(database) as store:
        return [
            pair
            for pair, ids in zip(pairs, image_ids(stored, pairs), strict=True)
            if store.exists_matches(*ids) and len(store.read_matches(*ids))
        ]


def verified_pairs(database: Path) -> dict[Pair, int]:
    """Return how many matches the geometry of two views explains, for each pair that is verified, as image ids."""
    with pycolmap.Database.open(database) as store:
        pairs, inliers = store.read_two_view_geometry_num_inliers()
    return {
        pycolmap.pair_id_to_image_pair(pair): int(count)
        for pair, count in zip(pairs, inliers, strict=True)
        if count >= _MIN_INLIERS
    }


def joined(pairs: Iterable[Pair], start: set[int]) -> set[int]:
    """Return the images that chains of pairs join with those of ``start``, with these; all in pairs without a start."""
    left = list(pairs)
    found = set(start) or {image for pair in left for image in pair}
    while ends := {image for pair in left if not found.isdisjoint(pair) for image in pair} - found:
        found |= ends
    return found


def image_ids(stored: Sequence[Stored], pairs: Sequence[Pair]) -> list[Pair]:
    """Return the ids of the images of each pair, the smaller first, as verified_pairs() has them."""
    return [(min(ids), max(ids)) for ids in ((stored[i].image_id, stored[j].image_id) for i, j in pairs)]


def _is_verified(store: pycolmap.Database, pair: tuple[int, int]) -> bool:
    if not store.exists_two_view_geometry(*pair):
        return False
    return len(store.read_two_view_geometry(*pair).inlier_matches) >= _MIN_INLIERS


def _write_pairs(path: Path, stored: Sequence[Stored], pairs: Sequence[Pair]) -> None:
    """Write COLMAP's list: two names a line, separated by a space."""
    path.write_text("".join(f"{stored[i].key} {stored[j].key}\n" for i, j in pairs), encoding="utf-8")


#: Up to so many images every pair is matched. Of more, chosen pairs register as many and are a third to half of all
#: (docs/sfm.md).
EXHAUSTIVE_UP_TO = 60
#: Images that a model lacks are matched with all others if those are no more pairs than this.
MOST_RETRIED = 20_000
#: Neighbours in name order that are matched on either side, and beyond them those at distances 16, 32, ... 512.
OVERLAP = 10
_FAR = tuple(2**k for k in range(4, 10))
#: Images that look most alike which each image is matched with.
NEIGHBOURS = 20
#: Numbers in a name.
_NUMBERS = re.compile(r"([0-9]+)")
#: Typical descriptors by whose residuals an image is described, and how many descriptors they are learnt from.
_WORDS = 32
_SAMPLES = 20_000

Pair = tuple[int, int]


def how_to_match(asked: Matching, num_images: int, *, video: bool) -> Matching:
    """Return ``asked``; for "auto" exhaustive up to EXHAUSTIVE_UP_TO images, sequential beyond and for videos."""
    if asked != "auto":
        return asked
    return "exhaustive" if num_images <= EXHAUSTIVE_UP_TO and not video else "sequential"


def choose_pairs(how: Matching, descriptors: list[NDArray[np.uint8]], seed: int) -> list[Pair]:
    """Return pairs (i, j), i < j, ascending. descriptors: [N_i, 128] of each image, in name order.

    "sequential" takes neighbours in the order and, so that a path that comes back is closed, those that look alike;
    "retrieval" takes only these.
    """
    count = len(descriptors)
    if how == "exhaustive":
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    pairs = set(alike(descriptors, NEIGHBOURS, seed))
    if how == "sequential":
        steps = (*range(1, OVERLAP + 1), *_FAR)
        pairs |= {(i, i + step) for i in range(count) for step in steps if i + step < count}
    return sorted(pairs)


def name_order(names: Sequence[str]) -> list[int]:
    """Return the indices of names in the order of their folders and files, numbers by their value: 2.png before 10.png.

    Names are relative paths with forward slashes.
    """

    def parts(name: str) -> list[Any]:
        # Text and numbers take turns, beginning with text.
        return [int(part) if at % 2 else part for at, part in enumerate(_NUMBERS.split(name.casefold()))]

    def key(index: int) -> tuple[Any, ...]:
        path = PurePosixPath(names[index])
        return [parts(folder) for folder in path.parent.parts], parts(path.name), names[index]

    return sorted(range(len(names)), key=key)


def sequences(names: Sequence[str]) -> list[list[int]]:
    """Return the indices of names in name order, those of each folder in a list of their own."""
    found: dict[PurePosixPath, list[int]] = {}
    for index in name_order(names):
        found.setdefault(PurePosixPath(names[index]).parent, []).append(index)
    return list(found.values())


def neighbours(images: Sequence[int], reach: int) -> list[Pair]:
    """Return the pairs of ``images``, in the order in which they were taken, that are at most ``reach`` apart."""
    return [(first, other) for at, first in enumerate(images) for other in images[at + 1 : at + 1 + reach]]


def pairs_to_retry(pairs: Sequence[Pair], unregistered: set[int], source: Sequence[str | None]) -> list[Pair]:
    """Return the pairs of the images ``unregistered`` with all others, ascending; of ``pairs`` where they are too many.

    source: for each image the panorama that it is a face of, or None; faces of one panorama are no pair.
    """
    count = len(source)
    if len(unregistered) * count <= MOST_RETRIED:
        pairs = sorted({(min(i, j), max(i, j)) for i in unregistered for j in range(count) if i != j})
        return [(i, j) for i, j in pairs if source[i] is None or source[i] != source[j]]
    return [(i, j) for i, j in pairs if i in unregistered or j in unregistered]


def most_alike(pairs: Sequence[Pair], descriptors: list[NDArray[np.uint8]], count: int, seed: int) -> list[Pair]:
    """Return the ``count`` of ``pairs`` whose images look most like each other, ascending; all where they are fewer."""
    if len(pairs) <= count:
        return sorted(pairs)
    vectors = describe(descriptors, seed)
    likeness = np.array([float(vectors[i] @ vectors[j]) for i, j in pairs])
    return sorted(pairs[index] for index in np.argsort(-likeness, kind="stable")[:count])


def alike(descriptors: list[NDArray[np.uint8]], neighbours: int, seed: int) -> list[Pair]:
    """Pair each image with the ``neighbours`` that look most like it; return ascending pairs (i, j), i < j.

    Images without features are like none.
    """
    vectors = describe(descriptors, seed)
    seeing = np.flatnonzero(np.linalg.norm(vectors, axis=1))
    likeness = vectors[seeing] @ vectors[seeing].T
    np.fill_diagonal(likeness, -np.inf)
    count = max(0, min(neighbours, len(seeing) - 1))
    nearest = seeing[np.argsort(-likeness, axis=1, kind="stable")[:, :count]]
    return sorted(
        {(min(int(i), int(j)), max(int(i), int(j))) for i, row in zip(seeing, nearest, strict=True) for j in row}
    )


def describe(descriptors: list[NDArray[np.uint8]], seed: int) -> NDArray[np.float32]:
    """Return [N, words * 128], a unit vector for each image: VLAD over words that are learnt from these very images.

    For each word the residuals of the descriptors nearest to it are summed, normalised by themselves, so that a
    texture that repeats does not outweigh the rest. An image without features is the zero vector.
    """
    generator = np.random.default_rng(seed)
    everything = [unit(rows) for rows in descriptors]
    share = max(1, _SAMPLES // max(1, len(everything)))
    sample = np.concatenate([rows[generator.permutation(len(rows))[:share]] for rows in everything])
    if len(sample) < 2:
        return np.zeros((len(everything), 1), dtype=np.float32)
    words, _ = kmeans2(sample, min(_WORDS, len(sample)), minit="points", rng=generator, missing="warn")
    vectors = np.zeros((len(everything), *words.shape), dtype=np.float32)
    for vector, rows in zip(vectors, everything, strict=True):
        if len(rows):
            nearest, _ = vq(rows, words)
            np.add.at(vector, nearest, rows - words[nearest])
            vector /= np.maximum(np.linalg.norm(vector, axis=1, keepdims=True), 1e-12)
    return unit(vectors.reshape(len(vectors), -1))


def unit(rows: NDArray[np.uint8] | NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows [N, K] at length 1; those of zeros stay."""
    values = rows.astype(np.float32)
    return np.asarray(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12))
