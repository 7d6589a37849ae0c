"""Several processes on one thing: the only place that imports torch.distributed. docs/distributed.md"""

from splatcli.distributed.joining import Place, join, world_of_group
from splatcli.distributed.sharded import render_sharded
from splatcli.distributed.world import World

__all__ = ["Place", "World", "join", "render_sharded", "world_of_group"]
