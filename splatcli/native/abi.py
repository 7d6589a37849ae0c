"""cuda/include/splat.h as ctypes: structs, constants, signatures. A test compiles the header and compares."""

from __future__ import annotations

import ctypes as c
from typing import Any

ABI_VERSION = 16
CHUNK = 256
TILE = 16
PROJECTED = 16
ISECT_GRAD = 16
POSE = 16
CHANNELS_AT_ONCE = 64
BOUNDS = 8
#: The result of a call where the GPU or its driver has failed.
DEVICE_FAULT = -2
#: The result of a call that CUDA refuses, on a device that is sound.
LAUNCH_REFUSED = -3
#: Places in Frame.counters.
COUNT_VISIBLE, COUNT_MAX_ISECTS, COUNT_ISECTS, COUNT_OVERFLOW = range(4)
COUNTERS = 4
#: View.camera_model by the name of a camera's model.
CAMERA_MODELS = {"pinhole": 0, "ortho": 1, "fisheye": 2}
FLOAT32 = 0
FLOAT64 = 1
#: Results of splat_best_isa, by the names of build.ISA_FLAGS.
ISAS = ("portable", "avx2", "avx512", "neon")


class _Sized(c.Structure):
    """A struct whose first field is its own size. Without slots ctypes would accept a misspelt field in silence."""

    __slots__ = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=c.sizeof(type(self)), **fields)


class Call(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("device", c.c_int32),
        ("stream", c.c_void_p),
        ("dtype", c.c_int32),
        ("threads", c.c_int32),
    ]


class View(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("width", c.c_int32),
        ("height", c.c_int32),
        ("sh_degree", c.c_int32),
        ("antialiased", c.c_int32),
        ("with_depth", c.c_int32),
        ("tile_row_begin", c.c_int32),
        ("tile_row_end", c.c_int32),
        ("viewmat", c.c_double * 16),
        ("fx", c.c_double),
        ("fy", c.c_double),
        ("cx", c.c_double),
        ("cy", c.c_double),
        ("z_near", c.c_double),
        ("z_far", c.c_double),
        ("filter_3d", c.c_void_p),
        ("bounds", c.c_void_p),
        ("camera_model", c.c_int32),
        ("reserved", c.c_int32),
    ]


class GaussianArrays(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("shN_count", c.c_int32),
        ("n", c.c_int64),
        ("means", c.c_void_p),
        ("quats", c.c_void_p),
        ("log_scales", c.c_void_p),
        ("logit_opacities", c.c_void_p),
        ("sh0", c.c_void_p),
        ("shN", c.c_void_p),
    ]


class Channels(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("count", c.c_int32),
        ("n", c.c_int64),
        ("colors", c.c_void_p),
        ("isect_grads", c.c_void_p),
        ("v_colors", c.c_void_p),
    ]


class Frame(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("with_abs", c.c_int32),
        ("projected", c.c_void_p),
        ("ids", c.c_void_p),
        ("chunk_counts", c.c_void_p),
        ("tiles_per_gauss", c.c_void_p),
        ("visible", c.c_int64),
        ("max_isects", c.c_int64),
        ("counters", c.c_void_p),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_int64),
        ("isect_grad_starts", c.c_void_p),
        ("tile_starts", c.c_void_p),
        ("tile_order", c.c_void_p),
        ("isect_gaussians", c.c_void_p),
        ("isect_grad_rows", c.c_void_p),
        ("isect_masks", c.c_void_p),
        ("isects", c.c_int64),
        ("tile_ends", c.c_void_p),
        ("isect_grads", c.c_void_p),
        ("channels", c.POINTER(Channels)),
    ]


class Images(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_int32),
        ("image", c.c_void_p),
        ("alpha", c.c_void_p),
        ("depth", c.c_void_p),
    ]


class Adam(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_int32),
        ("step", c.c_int64),
        ("beta1", c.c_double),
        ("beta2", c.c_double),
        ("eps", c.c_double),
        ("lr", c.c_double * 6),
        ("exp_avg", GaussianArrays),
        ("exp_avg_sq", GaussianArrays),
        ("sh_last_step", c.c_void_p),
        ("decay_table", c.c_void_p),
        ("decay_rows", c.c_int64),
        ("opacity_reg", c.c_double),
        ("scale_reg", c.c_double),
        ("total", c.c_int64),
        ("size_power", c.c_double),
        ("log_size", c.c_double),
    ]


class Noise(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_int32),
        ("seed", c.c_uint64),
        ("step", c.c_int64),
        ("scale", c.c_double),
        ("threshold", c.c_double),
        ("steepness", c.c_double),
        ("counters", c.c_void_p),
        ("first", c.c_int64),
    ]


class ProjectGrad(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("reserved", c.c_int32),
        ("gradients", c.POINTER(GaussianArrays)),
        ("adam", c.POINTER(Adam)),
        ("pose_partials", c.c_void_p),
        ("grad2d", c.c_void_p),
        ("count", c.c_void_p),
    ]


class Loss(_Sized):
    __slots__ = ()
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("width", c.c_int32),
        ("height", c.c_int32),
        ("target_is_u8", c.c_int32),
        ("channels", c.c_int32),
        ("images", c.c_int32),
        ("border", c.c_int32),
        ("reserved", c.c_int32),
        ("ssim_lambda", c.c_double),
        ("image", c.c_void_p),
        ("target", c.c_void_p),
        ("v_image", c.c_void_p),
        ("workspace", c.c_void_p),
        ("l1", c.c_double),
        ("ssim", c.c_double),
        ("means", c.c_void_p),
        ("counters", c.c_void_p),
        ("mask", c.c_void_p),
    ]


#: Structs by their names in splat.h.
STRUCTS: dict[str, type[c.Structure]] = {
    "SplatCall": Call,
    "SplatView": View,
    "SplatGaussians": GaussianArrays,
    "SplatChannels": Channels,
    "SplatFrame": Frame,
    "SplatImages": Images,
    "SplatAdam": Adam,
    "SplatProjectGrad": ProjectGrad,
    "SplatLoss": Loss,
    "SplatNoise": Noise,
}

_call, _view, _gaussians, _frame, _images = (c.POINTER(s) for s in (Call, View, GaussianArrays, Frame, Images))

#: Result and argument types of every entry.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "splat_abi_version": (c.c_int32, []),
    "splat_last_error": (c.c_char_p, []),
    "splat_best_isa": (c.c_int32, []),
    "splat_project": (c.c_int32, [_call, _view, _gaussians, _frame, c.POINTER(Adam)]),
    "splat_tile_row_isects": (c.c_int32, [_call, _view, _gaussians, _frame, c.c_void_p]),
    "splat_bin_bytes": (c.c_int64, [_call, _view, _frame]),
    "splat_bin": (c.c_int32, [_call, _view, _gaussians, _frame]),
    "splat_blend": (c.c_int32, [_call, _view, _frame, c.c_void_p, _images]),
    "splat_blend_vjp": (c.c_int32, [_call, _view, _frame, c.c_void_p, _images, _images, c.c_void_p, c.c_void_p]),
    "splat_sum_isect_grads": (c.c_int32, [_call, _gaussians, _frame, c.c_void_p, c.c_void_p]),
    "splat_project_vjp": (c.c_int32, [_call, _view, _gaussians, _frame, c.POINTER(ProjectGrad)]),
    "splat_pose_vjp": (c.c_int32, [_call, _view, _frame, c.c_void_p, c.c_int64, c.c_void_p]),
    "splat_loss_bytes": (c.c_int64, [_call, c.POINTER(Loss)]),
    "splat_loss": (c.c_int32, [_call, c.POINTER(Loss)]),
    "splat_adam": (c.c_int32, [_call, _gaussians, _gaussians, c.POINTER(Adam)]),
    "splat_noise": (c.c_int32, [_call, _gaussians, c.POINTER(Noise)]),
}
