"""The process that does the work: ``python -m splatcli.sfm.worker``, a request on stdin, JSON lines on stdout.

It is a process of its own because C++ libraries abort, run out of memory and do not listen to Ctrl-C; whatever
happens to it, the one that started it can say so. Lines are ``{"phase", "done", "total"}`` on the way, and at the end
``{"facts"}`` or ``{"error"}``; stderr is pycolmap's log.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from splatcli.errors import OutputError, SplatError
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import die_with_parent
from splatcli.sfm.images import SfmInput
from splatcli.sfm.job import reconstruct
from splatcli.sfm.options import SfmOptions


def main() -> None:
    """Read the request, work, and write the result."""
    die_with_parent()
    # What libraries print must not come between the lines: they get stderr.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    masks = None if request["mask_folder"] is None else Path(request["mask_folder"])
    inputs = SfmInput(
        Path(request["path"]),
        tuple(request["names"]),
        request["masks"],
        masks,
        videos=tuple(request["videos"]),
        videos_beside=tuple(request["videos_beside"]),
        static_masks=request["static_masks"],
    )

    def progress(phase: str, done: int, total: int) -> None:
        _say(lines, {"phase": phase, "done": done, "total": total})

    try:
        options = SfmOptions(**request["options"])
        folder = Path(request["folder"])
        execution = Execution(request["random_seed"], request["num_threads"], request["use_gpu"], progress)
        facts = reconstruct(inputs, options, folder, execution)
        _say(lines, {"facts": facts})
    except SplatError as problem:
        _say(lines, {"error": problem.as_dict()})
    except OSError as error:
        refused = OutputError(f"structure from motion cannot go on: {error.strerror or error}", where=error.filename)
        _say(lines, {"error": refused.as_dict()})


def _say(lines: TextIO, fact: dict[str, Any]) -> None:
    lines.write(json.dumps(fact) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
