"""Training: from a scene to Gaussians, as a stream of events. The package can be called: see splatcli.api.train()."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """The package has the name of the function, which an import of one of its modules would otherwise hide."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Train as splatcli.api.train() does."""
        import splatcli

        return splatcli.Trainer(*arguments, **options).run()


sys.modules[__name__].__class__ = _CallablePackage
