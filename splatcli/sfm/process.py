"""Start the worker process, send its request, read its progress, and turn its end into facts or an error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from splatcli import errors
from splatcli.disk import free_bytes
from splatcli.errors import OutputError, ResourceError, SplatError
from splatcli.progress import Listener
from splatcli.scene._pycolmap import ALONE
from splatcli.sfm.execution import Execution
from splatcli.sfm.images import SfmInput
from splatcli.sfm.options import SMALLER, SfmOptions

#: Bytes that are free on a disk that is not full.
_LEAST_FREE = 1 << 16
#: Bytes at the end of the worker's log in which the reason of a crash is looked for.
_LOG_TAIL = 16 << 10


def run_worker(inputs: SfmInput, options: SfmOptions, folder: Path, execution: Execution) -> dict[str, Any]:
    """Run the worker in ``folder``; return its facts. Raises the worker's error, ResourceError when it crashed.

    Whatever ends this call, Ctrl-C included, the worker has ended too when it returns.
    """
    request = {
        "path": str(inputs.path),
        "names": inputs.names,
        "videos": inputs.videos,
        "videos_beside": inputs.videos_beside,
        "masks": dict(inputs.masks),
        "mask_folder": None if inputs.mask_folder is None else str(inputs.mask_folder),
        "static_masks": inputs.static_masks,
        "options": options.as_dict(),
        "folder": str(folder),
        "random_seed": execution.random_seed,
        "num_threads": execution.num_threads,
        "use_gpu": execution.use_gpu,
    }
    # The worker has no terminal to be stopped from, and must find this very package, installed or not.
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    log = folder / "log"
    with log.open("w+b") as errors_to:  # the worker reads in it, see matching.py
        worker = subprocess.Popen(
            [sys.executable, "-m", "splatcli.sfm.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_to,
            env={**os.environ, "PYTHONPATH": paths, ALONE: "1"},
            text=True,
            encoding="utf-8",
        )
        try:
            outcome = _listen(worker, request, execution.listener)
            worker.wait()
        finally:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what was not read of a long request
                        pipe.close()
    if "facts" in outcome:
        log.unlink()
        return dict(outcome["facts"])
    if "error" in outcome:
        raise _rebuilt(outcome["error"])
    raise crashed(worker.returncode, log)


def _listen(worker: subprocess.Popen[str], request: dict[str, Any], progress: Listener) -> dict[str, Any]:
    """Return the last word of the worker; empty when it ended without one."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
    except BrokenPipeError:
        return {}
    for line in worker.stdout:
        fact: dict[str, Any] = json.loads(line)
        if "phase" not in fact:
            return fact
        progress(fact["phase"], fact["done"], fact["total"])
    return {}


def crashed(code: int, log: Path) -> SplatError:
    """Return the error for a worker that ended without a word. code: as Popen.returncode, negative for a signal.

    log: lies in the folder that the worker wrote to.
    """
    if code == -signal.SIGKILL:
        return ResourceError(
            "structure from motion was killed, most likely because the machine ran out of memory", remedy=SMALLER
        )
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    reason = _last_words(log)
    if "MemoryError" in reason or "bad_alloc" in reason:
        return ResourceError("the machine ran out of memory during structure from motion", remedy=SMALLER)
    if "disk is full" in reason or free_bytes(log.parent) < _LEAST_FREE:  # SQLite's words, if there was room for them
        return OutputError(
            "the disk became full during structure from motion",
            where=log.parent,
            remedy="free some space, or choose another place with -o",
        )
    return ResourceError(
        f"pycolmap ended {how} during structure from motion" + (f": {reason}" if reason else ""),
        remedy=f"{SMALLER}; or compute cameras with COLMAP, and name the scene's folder",
    )


def _last_words(log: Path) -> str:
    """Return the last line of a log that says something, without pycolmap's stamp of time and place."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    telling = [line for line in lines if line[:1] in ("E", "F") and "] " in line[:90]] or lines
    telling = [line.removeprefix("  what():  ") for line in telling]
    telling = [line for line in telling if line.strip() and not line.startswith((" ", "***", "PC: @"))]
    return telling[-1].split("] ", 1)[-1].strip()[:300] if telling else ""


def _rebuilt(facts: dict[str, Any]) -> SplatError:
    """Return the worker's error, of the kind that it was there."""
    kinds = {
        kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SplatError)
    }
    return kinds[facts["error"]](facts["what"], where=facts["where"], remedy=facts["help"])
