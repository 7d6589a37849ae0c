"""The native side refuses what it cannot do with -1 and a message, which Python raises as a ResourceError."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from splatcli.errors import ResourceError, UsageError
from splatcli.gaussians import GROUPS
from splatcli.native import abi
from splatcli.native.backend import Backend, load_cuda, resolve_device
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.context import view_of
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.rasterizer.train_step import NativeEngine
from tests.native.cases import ISAS, NEEDS_COMPILER, float32, float64
from tests.rasterizer.scenes import random_scene

pytestmark = NEEDS_COMPILER


def arguments() -> dict[str, Any]:
    """One of each struct, small and sound, by short names; the tensors are kept alive beside them."""
    gaussians, camera = random_scene(1, 5)
    moments = AdamState.zeros_like(gaussians)
    backend = float32()
    arrays = backend.arrays(gaussians)
    image = torch.zeros(camera.height, camera.width, 3)
    adam = abi.Adam(
        step=1,
        beta1=0.9,
        beta2=0.999,
        eps=1e-15,
        exp_avg=backend.arrays(moments.exp_avg),
        exp_avg_sq=backend.arrays(moments.exp_avg_sq),
    )
    pointer = image.data_ptr()
    return {
        "call": abi.Call(dtype=abi.FLOAT32, threads=1),
        "view": view_of(camera, sh_degree=0, antialiased=False, with_depth=False),
        "gaussians": arrays,
        "frame": abi.Frame(),
        "images": abi.Images(image=pointer, alpha=pointer),
        "adam": adam,
        "grad": abi.ProjectGrad(gradients=ctypes.pointer(arrays)),
        "loss": abi.Loss(width=camera.width, height=camera.height, channels=3, images=1, image=pointer, target=pointer),
        "noise": abi.Noise(),
        "keep": (gaussians, moments, image),
    }


#: Entries by the structs that they take after SplatCall; None stands for a pointer that may be null, 0 for a number.
ENTRIES: dict[str, list[str | int | None]] = {
    "project": ["view", "gaussians", "frame", "adam"],
    "tile_row_isects": ["view", "gaussians", "frame", None],
    "bin_bytes": ["view", "frame"],
    "bin": ["view", "gaussians", "frame"],
    "blend": ["view", "frame", None, "images"],
    "blend_vjp": ["view", "frame", None, "images", "images", None, None],
    "sum_isect_grads": ["gaussians", "frame", None, None],
    "project_vjp": ["view", "gaussians", "frame", "grad"],
    "pose_vjp": ["view", "frame", None, 0, None],
    "loss_bytes": ["loss"],
    "loss": ["loss"],
    "adam": ["gaussians", "gaussians", "adam"],
    "noise": ["gaussians", "noise"],
}
STRUCT_CASES = [(entry, name) for entry, names in ENTRIES.items() for name in ["call", *dict.fromkeys(names)] if name]


def raw_call(entry: str, given: dict[str, Any]) -> tuple[int, str]:
    library = float32().library
    values = [given[name] if isinstance(name, str) else name for name in ENTRIES[entry]]
    code = getattr(library, f"splat_{entry}")(given["call"], *values)
    return code, library.splat_last_error().decode()


def test_the_entries_here_are_all_there_are() -> None:
    assert {f"splat_{name}" for name in ENTRIES} == abi.SIGNATURES.keys() - {
        "splat_abi_version",
        "splat_last_error",
        "splat_best_isa",
    }


@pytest.mark.parametrize("change", [-8, 8])
@pytest.mark.parametrize(("entry", "name"), STRUCT_CASES)
def test_a_struct_of_another_size_is_refused_and_named(entry: str, name: str, change: int) -> None:
    given = arguments()
    given[name].struct_size += change
    code, message = raw_call(entry, given)
    assert code == -1
    assert message.startswith(f"splat_{entry}: ")
    struct = {struct: key for key, struct in abi.STRUCTS.items()}[type(given[name])]
    assert struct in message, message


@pytest.mark.parametrize(("entry", "name"), [case for case in STRUCT_CASES if case != ("project", "adam")])
def test_a_null_struct_is_refused(entry: str, name: str) -> None:
    given = arguments()
    given[name] = None
    assert raw_call(entry, given)[0] == -1


@pytest.mark.parametrize("threads", [0, -3])
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_threads_are_refused(entry: str, threads: int) -> None:
    given = arguments()
    given["call"].threads = threads
    assert raw_call(entry, given) == (-1, f"splat_{entry}: threads must be at least 1")


@pytest.mark.parametrize("isa", ISAS)
def test_dtypes_that_a_build_lacks_are_refused(isa: str) -> None:
    library = float32(isa).library
    given = arguments()
    for dtype in (abi.FLOAT64, 7, -1):
        given["call"].dtype = dtype
        code = library.splat_loss_bytes(given["call"], given["loss"])
        if isa == "portable" and dtype == abi.FLOAT64:
            assert code > 0
        else:
            assert code == -1
            assert b"dtype" in library.splat_last_error()


def set_fields(struct: str, **values: int) -> Callable[[dict[str, Any]], None]:
    def spoil(given: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(given[struct], name, value)

    return spoil


def set_view(**values: int) -> Callable[[dict[str, Any]], None]:
    return set_fields("view", **values)


def set_mask_and_gradient(given: dict[str, Any]) -> None:
    given["loss"].mask = given["loss"].v_image = given["loss"].image


def set_gaussians(**values: int) -> Callable[[dict[str, Any]], None]:
    return set_fields("gaussians", **values)


@pytest.mark.parametrize(
    ("entry", "spoil", "words"),
    [
        ("project", set_view(width=0), "no pixels"),
        ("project", set_view(height=-1), "no pixels"),
        ("project", set_view(sh_degree=5), "sh_degree"),
        ("blend", set_view(tile_row_end=3), "tile rows"),
        ("blend", set_view(tile_row_begin=2), "tile rows"),
        ("project", set_view(sh_degree=-1), "sh_degree"),
        ("project", set_gaussians(n=-1), "n is negative"),
        ("project", set_gaussians(n=2**31), "n is negative or beyond"),
        ("bin", lambda given: setattr(given["frame"], "max_isects", 2**32), "tile intersections"),
        ("bin", lambda given: setattr(given["frame"], "visible", 3), "workspace"),
        ("loss", lambda given: setattr(given["loss"], "width", 0), "no pixels"),
        ("loss", lambda given: setattr(given["loss"], "images", 0), "no pixels"),
        ("loss", lambda given: setattr(given["loss"], "images", 2**31 - 1), "more than 2^31 - 1 rows"),
        ("loss", lambda given: setattr(given["loss"], "channels", 2), "neither 1 nor 3"),
        ("loss", lambda given: setattr(given["loss"], "border", 10**6), "border leaves no pixel"),
        ("loss", set_mask_and_gradient, "with a mask there is no gradient"),
        ("adam", lambda given: setattr(given["adam"], "step", 0), "counted from 1"),
        # Numbers that would let the kernels read or write beyond what they were given.
        ("project", set_gaussians(shN_count=5), "sh"),
        ("project", lambda given: (set_view(sh_degree=3)(given), set_gaussians(shN_count=8)(given)), "sh"),
        ("project_vjp", lambda given: (set_view(sh_degree=4)(given), set_gaussians(shN_count=15)(given)), "sh"),
        ("adam", lambda given: setattr(given["adam"].exp_avg, "n", 4), "moments"),
        ("adam", lambda given: setattr(given["adam"].exp_avg_sq, "shN_count", 0), "moments"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(entry: str, spoil: Callable[[dict[str, Any]], Any], words: str) -> None:
    given = arguments()
    spoil(given)
    code, message = raw_call(entry, given)
    assert code == -1
    assert words in message, message


def test_a_refusal_is_a_resource_error_with_the_words() -> None:
    backend = Backend(float32().library, torch.float32, 0)
    with pytest.raises(ResourceError, match="splat_loss_bytes: threads must be at least 1"):
        backend.call("loss_bytes", arguments()["loss"])


def test_the_last_error_is_a_threads_own() -> None:
    library = float32().library
    given = arguments()
    given["call"].threads = 0
    assert library.splat_loss_bytes(given["call"], given["loss"]) == -1
    seen: list[bytes] = []
    other = threading.Thread(target=lambda: seen.append(library.splat_last_error()))
    other.start()
    other.join()
    assert seen == [b""]
    assert b"threads" in library.splat_last_error()


# --- the same at the boundary in Python ------------------------------------------------------------------------------


def test_float64_is_served_by_the_portable_build_and_others_are_refused() -> None:
    assert float64().library is float32("portable").library
    assert Backend.cpu(torch.float64, isa=ISAS[-1]).library is float32("portable").library
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        with pytest.raises(TypeError, match="float32 or float64"):
            Backend.cpu(dtype)


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (torch.zeros(4, 3, dtype=torch.float64), TypeError, "float64"),
        (torch.zeros(4, 3, dtype=torch.float16), TypeError, "float16"),
        (torch.zeros(4, 3, dtype=torch.int32), TypeError, "int32"),
        (torch.zeros(3, 4).T, TypeError, "strides"),
        (torch.zeros(1, 3).expand(4, 3), TypeError, "strides"),
        (torch.zeros(4, 3, device="meta"), TypeError, "meta"),
        (torch.zeros(4, 2), ValueError, "shape"),
        (torch.zeros(12), ValueError, "shape"),
        (torch.zeros(5, 3), ValueError, "shape"),
    ],
)
def test_a_tensor_that_does_not_fit_never_becomes_a_pointer(
    tensor: torch.Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        float32().pointer(tensor, 4, 3)


def step(engine: NativeEngine, **changes: Any) -> float:
    gaussians, camera = random_scene(2, 20, sh_degree=1)
    arguments: dict[str, Any] = {
        "camera": camera,
        "target": torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8),
        "lrs": dict.fromkeys(GROUPS, 1e-3),
        "sh_degree": 1,
        "background": torch.zeros(3),
        "ssim_lambda": 0.2,
        "antialiased": False,
        "stats": None,
    }
    adam = changes.pop("adam", AdamState.zeros_like(gaussians))
    return engine.step(changes.pop("gaussians", gaussians), adam, StepInputs(**{**arguments, **changes}))


def test_a_step_with_parts_that_do_not_belong_together_is_refused() -> None:
    engine = NativeEngine(float32())
    assert step(engine) > 0
    fewer, _ = random_scene(2, 19, sh_degree=1)
    lower, _ = random_scene(2, 20, sh_degree=0)
    for other in (fewer, lower):
        with pytest.raises((ValueError, ResourceError)):
            step(engine, adam=AdamState.zeros_like(other))
    for degree in (2, 5, -1):
        with pytest.raises((ValueError, ResourceError)):
            step(engine, sh_degree=degree)
    with pytest.raises(ValueError, match="shape"):
        step(engine, target=torch.zeros(3, 3, 3, dtype=torch.uint8))
    with pytest.raises(TypeError):
        step(engine, target=torch.zeros(29, 37, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="shape"):
        step(engine, background=torch.zeros(4))
    assert step(engine) > 0, "the engine is as good as before"


def test_the_device_of_a_text() -> None:
    assert resolve_device("cpu") == "cpu"
    for text in ("gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", ""):
        with pytest.raises(UsageError, match="is no device"):
            resolve_device(text)
    if not torch.cuda.is_available():
        assert resolve_device("auto") == "cpu"
        with pytest.raises(ResourceError, match="there is no cuda: torch sees 0 GPUs"):
            resolve_device("cuda")


@pytest.mark.parametrize("call", ["current_device", "get_device_capability"])
def test_a_gpu_that_torch_cannot_use_is_passed_over(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old driver, or one whose GPU another process has for itself, counts its GPUs all the same."""

    def refuse(*_: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update it.")

    monkeypatch.setattr("splatcli.native.backend.load_cuda", load_cuda.__wrapped__)
    simulated: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0}
    for name, value in (simulated | {call: refuse}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(ResourceError, match="torch cannot use cuda: The NVIDIA driver") as caught:
        resolve_device("cuda")
    assert "Please update" not in caught.value.what
    assert "--device cpu" in str(caught.value.remedy)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == "cpu"
    assert "There is a GPU, but it cannot be used; going on with the CPU." in caplog.text
