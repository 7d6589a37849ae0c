"""Functions that torch.compile() calls as they are, with a graph break before and after.

Their work is in a library behind ctypes. Dynamo would trace the Python code around it, for most of a minute, and see
nothing of the library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def graph_break(function: _Function) -> _Function:
    """Mark ``function``, as torch.compiler.disable() does, without importing dynamo, which takes a second.

    torch's own marks: of the function, for dynamo that meets a call of it; of its code, for frames that are executed.
    """
    inner: Any = inspect.unwrap(function)  # of torch.no_grad()
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(inner.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # a torch with other names for them
        disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled
    function.__dict__["_torchdynamo_disable"] = inner.__dict__["_torchdynamo_disable"] = True
    return function
