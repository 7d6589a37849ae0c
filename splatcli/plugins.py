"""Plug-ins: strategies, formats and scene readers of other packages, found through entry points.

A package names them in its pyproject.toml:

    [project.entry-points."splatcli.formats"]
    xyz = "its_package.xyz:FORMAT"

The names come from the metadata of installed packages. A plug-in's code is imported when its name is asked for and not
before, so a broken one harms only who asks for it. CONTRIBUTING.md shows what each group takes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from splatcli.errors import PluginError, SplatError, UsageError, is_out_of_memory

#: Callables of (Config, scene extent in world units) that return a train.densify.Strategy.
STRATEGIES = "splatcli.strategies"
#: Instances of formats.format.Format.
FORMATS = "splatcli.formats"
#: Readers of scenes; see scene/read.py.
READERS = "splatcli.readers"


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of another package, or several of one name, of which none can be chosen."""

    name: str
    points: tuple[EntryPoint, ...]

    def __str__(self) -> str:
        return " and ".join(
            f"{point.dist.name if point.dist else 'an unnamed package'} ({point.group}: {point.name} = {point.value})"
            for point in self.points
        )

    def load(self) -> object:
        """Import the plug-in and return the object that its entry point names. Raises UsageError, which names both."""
        if len(self.points) > 1:
            raise UsageError(f"several packages have a plug-in {self.name!r}: {self}", remedy="uninstall all but one")
        try:
            with self.running():
                return self.points[0].load()
        except OSError as error:  # here it is no file of the user
            raise self._raised(error) from error

    @contextlib.contextmanager
    def running(self, method: str = "") -> Iterator[None]:
        """Turn what the plug-in's code raises into a PluginError that names it; splatcli's own errors pass.

        method: where the code is, with its class, for the message. Out of memory passes, and files that fail.
        """
        try:
            yield
        except (SplatError, OSError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise self._raised(error, method) from error

    def _raised(self, error: BaseException, method: str = "") -> PluginError:
        first = next(iter(str(error).splitlines()), "")
        problem = f"{type(error).__name__}: {first}".removesuffix(": ")
        return self.fault(f"{method}() raised {problem}" if method else problem)

    def fault(self, what: str) -> PluginError:
        """Return the error for a plug-in that does not work."""
        return PluginError(
            f"the plug-in {self.name!r} does not work: {what}",
            where=self,
            remedy="update or uninstall that package; the fault is not splat's",
        )


def plugins(group: str) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, in the order of the names. Imports none of them."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        found[point.name] = (*found.get(point.name, ()), point)
    return {name: Plugin(name, found[name]) for name in sorted(found)}


def imported() -> list[Plugin]:
    """Return the plug-ins whose module this process has imported."""
    found = [plugin for group in (STRATEGIES, FORMATS, READERS) for plugin in plugins(group).values()]
    return [plugin for plugin in found if any(point.value.partition(":")[0] in sys.modules for point in plugin.points)]
