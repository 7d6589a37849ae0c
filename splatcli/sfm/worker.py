"""The process that does the work: ``python -m splatcli.sfm.worker``, a request on stdin, JSON lines on stdout.

It is a process of its own because C++ libraries abort, run out of memory and do not listen to Ctrl-C; whatever
happens to it, the one that started it can say so. Lines are ``{"phase", "done", "total"}`` on the way, and at the end
``{"facts"}`` or ``{"error"}``; stderr is pycolmap's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

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
        "inputs": asdict(inputs),
        "options": asdict(options),
        "folder": folder,
        "execution": {name: getattr(execution, name) for name in ("random_seed", "num_threads", "use_gpu")},
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
        worker.stdin.write(json.dumps(request, default=str))  # of paths
        worker.stdin.close()
    except BrokenPipeError:
        return {}
    for line in worker.stdout:
        if not line.endswith("\n"):  # it was killed while it wrote
            break
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


# --- in the process that does the work --------------------------------------------------------------------------------


def main() -> None:
    """Read the request, work, and write the result."""
    from splatcli.sfm.features import die_with_parent
    from splatcli.sfm.job import reconstruct

    die_with_parent()
    # What libraries print must not come between the lines: they get stderr.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)

    def progress(phase: str, done: int, total: int) -> None:
        _say(lines, {"phase": phase, "done": done, "total": total})

    try:
        inputs, options = _inputs_of(request["inputs"]), SfmOptions(**request["options"])
        execution = Execution(**request["execution"], listener=progress)
        _say(lines, {"facts": reconstruct(inputs, options, Path(request["folder"]), execution)})
    except SplatError as problem:
        _say(lines, {"error": problem.as_dict()})
    except OSError as error:
        refused = OutputError(f"structure from motion cannot go on: {error.strerror or error}", where=error.filename)
        _say(lines, {"error": refused.as_dict()})


def _inputs_of(request: dict[str, Any]) -> SfmInput:
    """Return the input that became JSON: tuples are lists there, and paths are words."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in request.items()
    }
    values["path"], folder = Path(values["path"]), values["mask_folder"]
    values["mask_folder"] = folder and Path(folder)
    return SfmInput(**values)


def _say(lines: TextIO, fact: dict[str, Any]) -> None:
    lines.write(json.dumps(fact) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
