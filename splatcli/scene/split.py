"""Which views are trained on and which are held out."""

from __future__ import annotations

from splatcli.errors import SceneError
from splatcli.scene.source import SceneSource


def split_views(
    source: SceneSource, names: list[str], test_every: int, notes: list[str]
) -> tuple[list[int], list[int]]:
    """Indices of training and held-out views: the layout's own split, else every n-th in name order.

    names: of all views, sorted.
    Raises SceneError when none is left to train on.
    """
    everyone = list(range(len(names)))
    if source.test is not None:
        test = [i for i in everyone if names[i] in source.test]
        held = set(test)
        train = [i for i in everyone if i not in held and (source.train is None or names[i] in source.train)]
        if not test:
            notes.append("the scene holds no views out: there will be no figures of quality")
    elif test_every == 0:
        train, test = everyone, []
    elif len(names) < test_every:
        notes.append(f"only {len(names)} views: none is held out (one in {test_every} would be)")
        train, test = everyone, []
    else:
        train = [i for i in everyone if i % test_every]
        test = [i for i in everyone if i % test_every == 0]
    if not train:
        raise SceneError(
            f"no view is left to train on: of {len(names)} views {len(test)} are held out",
            where=source.file,
            remedy="hold fewer out with splat train --test-every (0 holds none out)"
            if source.test is None
            else "correct the lists of file names for training and testing",
        )
    return train, test
