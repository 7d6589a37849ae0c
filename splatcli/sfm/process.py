"""Starting the worker, listening to it, and saying what became of it when it did not say so itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splatcli import errors
from splatcli.errors import ResourceError, SplatError
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.photos import Footage

Tell = Callable[[str, int, int], None]

_SMALLER = "--max-image-size 1000, --max-features 4000 or fewer photos take less memory"
#: Bytes at the end of the worker's log in which the reason of a crash is looked for.
_LOG_TAIL = 16 << 10


def run_worker(
    footage: Footage, options: SfmOptions, folder: Path, *, threads: int, gpu: bool, tell: Tell
) -> dict[str, Any]:
    """The facts of a reconstruction made in ``folder``. Raises what the worker met, ResourceError when it crashed.

    Whatever ends this call, Ctrl-C included, the worker has ended too when it returns.
    """
    request = {
        "path": str(footage.path),
        "names": footage.names,
        "masks": dict(footage.masks),
        "mask_folder": None if footage.mask_folder is None else str(footage.mask_folder),
        "options": options.as_dict(),
        "folder": str(folder),
        "threads": threads,
        "gpu": gpu,
    }
    # The worker has no terminal to be stopped from, and must find this very package, installed or not.
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    log = folder / "log"
    with log.open("wb") as errors_to:
        worker = subprocess.Popen(
            [sys.executable, "-m", "splatcli.sfm.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_to,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            encoding="utf-8",
        )
        try:
            outcome = _listen(worker, request, tell)
            worker.wait()
        finally:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
    if "facts" in outcome:
        log.unlink()
        return dict(outcome["facts"])
    if "error" in outcome:
        raise _rebuilt(outcome["error"])
    raise crashed(worker.returncode, log)


def _listen(worker: subprocess.Popen[str], request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The last word of the worker; empty when it ended without one."""
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
        tell(fact["phase"], fact["done"], fact["total"])
    return {}


def crashed(code: int, log: Path) -> SplatError:
    """The error for a worker that ended without a word. code: as Popen.returncode, negative for a signal."""
    if code == -signal.SIGKILL:
        return ResourceError(
            "structure from motion was killed, most likely because the machine ran out of memory", remedy=_SMALLER
        )
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    reason = _last_words(log)
    if "MemoryError" in reason or "bad_alloc" in reason:
        return ResourceError("the machine ran out of memory during structure from motion", remedy=_SMALLER)
    return ResourceError(
        f"pycolmap ended {how} during structure from motion" + (f": {reason}" if reason else ""),
        remedy=f"{_SMALLER}; or compute cameras with COLMAP, and name the scene's folder",
    )


def _last_words(log: Path) -> str:
    """The last line of a log that says something, without pycolmap's stamp of time and place."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    telling = [line for line in lines if line[:1] in ("E", "F") and "] " in line[:90]] or lines
    telling = [line for line in telling if line.strip() and not line.startswith((" ", "***"))]
    return telling[-1].split("] ", 1)[-1].strip()[:300] if telling else ""


def _rebuilt(facts: dict[str, Any]) -> SplatError:
    """The worker's error, of the kind that it was there."""
    kinds = {
        kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SplatError)
    }
    return kinds[facts["error"]](facts["what"], where=facts["where"], remedy=facts["help"])
