"""Functions whose work is in the native library, where torch sees nothing of it: how torch is to treat them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def graph_break(function: _Function) -> _Function:
    """Let torch.compile() call ``function`` as it is. Dynamo would trace the code around the library for a minute.

    torch.compiler.disable() does so, and imports dynamo, which takes a second. These are torch's own marks: of the
    function, for dynamo that meets a call of it; of its code, for frames that are executed.
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


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let gradients of the gradients that ``backward`` returns be an error, as torch's decorator of this name does.

    torch's returns constants where the incoming gradients are constants, as those of a mean are. They depend on the
    inputs all the same: a penalty on the gradient would silently have no effect.
    """

    def without_first(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        return backward(ctx, *gradients)

    marked: Any = torch.autograd.function.once_differentiable(without_first)

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> Any:
        return marked(ctx, torch.zeros((), requires_grad=True), *gradients)

    return call
