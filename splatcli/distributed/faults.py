"""Faults of one process in a form that the others can be told."""

from __future__ import annotations

import json

from splatcli.errors import DistributedError, SplatError
from splatcli.train.monitor import as_splat_error, is_out_of_memory


def problem_of(error: Exception) -> str:
    """``error`` as JSON."""
    known = as_splat_error(error) if is_out_of_memory(error) else error
    if not isinstance(known, SplatError):
        return json.dumps({"code": SplatError.exit_code, "what": words_of(error), "where": None, "help": None})
    return json.dumps({"code": known.exit_code, "what": known.what, "where": known.where, "help": known.remedy})


def told_problem(rank: int, text: str) -> SplatError:
    """What the other ranks raise for the problem of ``rank``: an error of its kind, or DistributedError for a bug."""
    told = json.loads(text)
    kinds = {kind.exit_code: kind for kind in SplatError.__subclasses__()}
    kind = kinds.get(told["code"], DistributedError)
    return kind(f"rank {rank}: {told['what']}", where=told["where"], remedy=told["help"])


def words_of(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, SplatError):
        return error.what
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
