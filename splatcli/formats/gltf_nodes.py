"""Where the nodes of a glTF put a mesh: the transforms of a node and of all that it hangs under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from scipy.spatial.transform import Rotation

from splatcli.formats.quantisation import Doubles

Index = Annotated[int, Field(ge=0, lt=1 << 40)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Three = Annotated[list[Real], Field(min_length=3, max_length=3)]
Four = Annotated[list[Real], Field(min_length=4, max_length=4)]
Sixteen = Annotated[list[Real], Field(min_length=16, max_length=16)]


class Node(BaseModel):
    """A node, with the names of glTF."""

    model_config = ConfigDict(extra="ignore")

    mesh: Index | None = None
    children: list[Index] = []
    matrix: Sixteen | None = None
    translation: Three = [0.0, 0.0, 0.0]
    rotation: Four = [0.0, 0.0, 0.0, 1.0]
    scale: Three = [1.0, 1.0, 1.0]

    def local(self) -> Doubles:
        """[4, 4] for column vectors, from the node's frame to its parent's. Raises ValueError for no rotation."""
        if self.matrix is not None:
            return np.array(self.matrix).reshape(4, 4).T  # glTF goes column by column
        placed = np.eye(4)
        placed[:3, :3] = Rotation.from_quat(self.rotation).as_matrix() * np.array(self.scale)
        placed[:3, 3] = self.translation
        return placed


def placement(nodes: Sequence[Node], mesh: int) -> Doubles:
    """[4, 4] for column vectors, from the frame of ``mesh`` to the scene's; the identity where no node has it.

    Raises ValueError, whose text tells what is wrong, for nodes that are no tree and for a mesh in several places.
    """
    holders = [place for place, node in enumerate(nodes) if node.mesh == mesh]
    if len(holders) > 1:
        raise ValueError(f"{len(holders)} nodes show the Gaussians, {holders[0]} and {holders[1]} among them")
    parents: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for child in node.children:
            if child >= len(nodes) or parents.setdefault(child, place) != place:
                raise ValueError(f"node {place} has the child {child}, which there is not or which is another's")
    matrix: Doubles = np.eye(4)
    passed: set[int] = set()
    above = holders[0] if holders else None
    while above is not None:
        if above in passed:
            raise ValueError(f"node {above} hangs under itself")
        passed.add(above)
        try:
            matrix = nodes[above].local() @ matrix
        except ValueError as error:
            raise ValueError(f"node {above}: {error}") from None
        above = parents.get(above)
    return matrix
