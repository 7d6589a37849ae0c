"""Several processes of one run: the only package that imports torch.distributed. docs/distributed.md"""

import importlib

from splatcli.distributed.process_group import Place, ProcessGroup, join, wrap_default_group

__all__ = ["Place", "ProcessGroup", "join", "wrap_default_group"]

#: Deprecated names, and what they name now: (module, name).
_DEPRECATED = {
    "World": ("splatcli.distributed.process_group", "ProcessGroup"),
    "world_of_group": ("splatcli.distributed.process_group", "wrap_default_group"),
    "render_sharded": ("splatcli.rasterizer.sharded", "render_sharded"),
}


def __getattr__(name: str) -> object:
    """Return what a deprecated name stands for."""
    if name in _DEPRECATED:
        module, current = _DEPRECATED[name]
        return getattr(importlib.import_module(module), current)
    raise AttributeError(f"module 'splatcli.distributed' has no attribute {name!r}")
