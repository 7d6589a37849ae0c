"""The request of a run: the settings and options of its command line, by which the same command finds it again."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.cli.model import newest_checkpoint
from splatcli.errors import OutputError, UsageError
from splatcli.sizes import listed

if TYPE_CHECKING:
    from splatcli.cli.console import Output
    from splatcli.config import Config

#: Settings whose values may be absolute paths.
_PLACES = ("data.scene", "data.points", "model.init")

#: Differences that a message lists.
_LISTED = 8

#: Settings that others follow, such as learning rates and schedules; the number of steps follows the batch size.
_LEADING = ("strategy.name", "train.batch_size", "model.init", "train.iterations")


@dataclass(frozen=True)
class RunRequest:
    """The settings of a command line as they are before the scene is read, and options.

    build: makes the settings with others under dotted keys, schedules scaled to them. options: those that are no
    settings, as JSON. values: dotted keys whose values differ from those of the command line.
    """

    build: Callable[[Mapping[str, Any]], Config]
    options: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> RunRequest:
        """Return the request with other values under dotted keys."""
        return replace(self, values={**self.values, **values})

    def as_json(self) -> dict[str, Any]:
        """Return settings and options as the run's folder stores them; paths are absolute."""
        from splatcli.config import NAMED_STARTS, flat_settings

        settings = flat_settings(self.build(self.values), as_json=True)
        if settings["model.init"] not in NAMED_STARTS:
            settings["model.init"] = os.path.abspath(settings["model.init"])
        return {**settings, **self.options}


def earlier_run(place: Path, request: RunRequest, out: Output) -> Path | None:
    """Return the newest checkpoint of the run in ``place`` that has an equal ``request``; None without a run.

    Raises OutputError as check_request().
    """
    newest = newest_checkpoint(place, out=out, allow_older=True) if place.is_dir() else None
    # A run of an earlier version, or a copy, has no request: RunDir.create() refuses its folder.
    return newest if newest is not None and check_request(place, request) else None


def check_request(
    place: Path,
    request: RunRequest,
    *,
    otherwise: str = "move it aside with --overwrite, or choose another -o",
    alike: Collection[str] = (),
) -> bool:
    """Return whether the run in ``place`` has a request. Raise OutputError if it differs; it lists the differences.

    otherwise: what can be done beside continuing that run. alike: keys whose values are known to mean the same.
    """
    from splatcli.checkpoint.run_dir import REQUEST
    from splatcli.train.changed_settings import shown

    try:
        before = json.loads((place / REQUEST).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(before, dict):
        return False
    now = request.as_json()
    keys = [key for key in _changed(before, request) if key not in alike]
    scene = _present_scene(place) if "data.scene" in keys else None
    if _equal("data.scene", scene, now["data.scene"]):
        keys.remove("data.scene")
    if keys:
        changes = [f"{key} was {shown(before[key])}, is now {shown(now[key])}" for key in keys]
        steps, done = now["train.iterations"], before.get("train.iterations")
        longer = f" --iterations {steps}" if isinstance(done, int) and steps > done else ""
        is_gone = scene is not None and not os.path.exists(scene)
        moved = f" --data {shlex.quote(now['data.scene'])}" if is_gone else ""
        go_on = f"splat resume {shlex.quote(str(place))}{longer}{moved}"
        raise OutputError(
            f"the output folder holds a run with other settings: {listed(changes, _LISTED, '; ')}",
            where=place,
            remedy=f"continue it with {go_on}, {otherwise}",
        )
    return True


def _present_scene(place: Path) -> str | None:
    """Return the folder of the scene that the newest checkpoint of a run names: ``splat resume --data`` changes it."""
    from splatcli.checkpoint.container import read_container

    newest = newest_checkpoint(place, allow_older=True)
    return None if newest is None else read_container(newest, digests=False, mmap=True).manifest.dataset.root


def _changed(before: Mapping[str, Any], request: RunRequest) -> list[str]:
    """Return the keys in which a request differs from an earlier one, without those that only follow others of them.

    The number of steps comes first.
    """
    now = request.as_json()
    different = [key for key in now if key in before and not _equal(key, before[key], now[key])]
    left, causes = different, {}
    for key in _LEADING:
        if key not in left:
            continue
        causes[key] = before[key]
        try:
            as_before = request.with_values(causes).as_json()
        except UsageError:  # a value that only an earlier version takes
            return different
        left = [one for one in different if not _equal(one, before[one], as_before[one])]
    keys = [key for key in different if key in causes or key in left]
    return sorted(keys, key=lambda key: key != "train.iterations")


def _equal(key: str, before: object, now: object) -> bool:
    """Return whether two values of a request mean the same: what is there may be named by a link."""
    if key in _PLACES and isinstance(before, str) and isinstance(now, str) and os.path.isabs(before):
        return os.path.realpath(before) == os.path.realpath(now)
    return before == now
