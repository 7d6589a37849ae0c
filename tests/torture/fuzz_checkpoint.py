"""Malformed checkpoints: spoiled bytes, spoiled members under valid CRCs, and nonsense under valid digests."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.render.camera_files import cameras_json
from splatcli.train.state import TrainState
from tests.torture.harness import Case, Figure, fuzz, main, refused, rng_of
from tests.torture.mutate import FLOATS, INTEGERS, STRINGS, any_value, spoil_bytes, spoil_json
from tests.torture.states import small_checkpoint


def figures(count: int, seed: int) -> dict[str, Figure]:
    what = "a malformed ckpt.pt is loaded: it is refused with a message, or what is loaded is sound"
    return fuzz("fuzz_checkpoint", what, case_of, count, seed)


@dataclass(frozen=True)
class Sound:
    """A sound checkpoint: the file, its members, and what torch sees in it."""

    whole: bytes
    members: dict[str, bytes]
    stored: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> Sound:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        return cls(path.read_bytes(), members, torch.load(path, weights_only=True))


def case_of(seed: int, folder: Path) -> Case:
    path = folder / "fuzz.pt"
    originals = []
    for count in (0, 12):
        save_checkpoint(path, small_checkpoint(count))
        originals.append(Sound.of(path))

    def case(index: int) -> str:
        rng = rng_of(seed, index)
        path.write_bytes(rng.choice(_WAYS)(rng, rng.choice(originals)))
        return "refused" if refused(lambda: _read(path)) else "read"

    return case


def _read(path: Path) -> None:
    """Everything that commands do with a checkpoint before they draw or train."""
    checkpoint = load_checkpoint(path)
    for name, tensor in checkpoint.gaussians.items():
        assert tensor.shape[0] == len(checkpoint.gaussians), name
        assert tensor.isfinite().all(), name
    for camera in checkpoint.cameras:
        assert camera.viewmat.shape == (4, 4)
        assert np.isfinite(camera.viewmat).all()
    cameras_json(checkpoint.cameras)
    refused(lambda: TrainState.from_checkpoint(checkpoint))


# --- ways to spoil one -----------------------------------------------------------------------------------------------


def _bytes(rng: random.Random, sound: Sound) -> bytes:
    return spoil_bytes(rng, sound.whole)


def _members(rng: random.Random, sound: Sound) -> bytes:
    return spoil_members(rng, sound.members)


def spoil_members(rng: random.Random, sound: dict[str, bytes]) -> bytes:
    """Members with other bytes, names or packing, in a zip whose checksums are right."""
    members = dict(sound)
    pickle = next(name for name in members if name.endswith("data.pkl"))
    for _ in range(rng.randint(1, 2)):
        name = pickle if rng.random() < 0.6 and pickle in members else rng.choice(list(members))
        match rng.randrange(6):
            case 0:
                del members[name]
            case 1:
                members[rng.choice(["archive/", "", "../", "archive/data/", "b/", "archive/code/"]) + "x"] = b"1"
            case 2:
                members[name + rng.choice(["", "0", "/", ".pkl"])] = members.pop(name)
            case _:
                members[name] = spoil_bytes(rng, members[name])
        if not members:
            break
    buffer = io.BytesIO()
    packing = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for name, content in members.items():
            archive.writestr(name or "x", content)
    return buffer.getvalue()


def _manifest(rng: random.Random, sound: Sound) -> bytes:
    """A manifest of nonsense with a digest that is right."""
    document = json.loads(sound.stored["manifest"])
    if rng.random() < 0.3:
        section = rng.choice([document, *(part for part in document.values() if isinstance(part, dict))])
        section[rng.choice([*section, "new"])] = any_value(rng)
    else:
        document = spoil_json(rng, document)
    return _signed({**sound.stored, "manifest": json.dumps(document)})


def _tensors(rng: random.Random, sound: Sound) -> bytes:
    """Tensors that do not belong, and a manifest that vouches for them; or does not."""
    stored = dict(sound.stored)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([key for key, value in sound.stored.items() if isinstance(value, Tensor)])
        tensor = sound.stored[name]
        stored.pop(name, None)
        match rng.randrange(6):
            case 0:
                pass
            case 1:
                new = rng.choice(["get_scaling", "strategy.x", "rng.x", "_xyz2", "adam.exp_avg._xyz", *STRINGS[:6]])
                stored[new] = tensor
            case 2 if tensor.is_floating_point() and tensor.numel():
                stored[name] = with_odd_number(rng, tensor)
            case 3:
                stored[rng.choice([name, "note", 7, None, b"x"])] = rng.choice([1, "text", None, [tensor], {"a": 1}])
            case _:
                stored[name] = rng.choice(ODD)(tensor)
    if rng.random() < 0.8:
        document = json.loads(stored["manifest"])
        document["tensors"] = [spec for item in stored.items() if (spec := _spec(document, *item)) is not None]
        stored["manifest"] = json.dumps(document)
    return _signed(stored)


def with_odd_number(rng: random.Random, tensor: Tensor) -> Tensor:
    spoiled = tensor.detach().clone()
    # Through a tensor, since 1e39 cannot be assigned to float32.
    spoiled.reshape(-1)[rng.randrange(spoiled.numel())] = torch.tensor(rng.choice(FLOATS)).to(spoiled.dtype)
    return spoiled


#: Other tensors made of a sound one.
ODD: list[Callable[[Tensor], object]] = [
    lambda tensor: tensor.double(),
    lambda tensor: tensor.half(),
    lambda tensor: tensor.to(torch.int64),
    lambda tensor: tensor.to(torch.bool),
    lambda tensor: tensor.bfloat16(),
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: tensor.reshape(-1),
    lambda tensor: tensor[:5].clone() if tensor.dim() else tensor,
    lambda tensor: tensor[None],
    lambda tensor: tensor.new_zeros(()),
    lambda tensor: tensor.new_zeros(3, 0, 5),
    lambda tensor: tensor.new_zeros(1).expand(10**12),
    lambda tensor: tensor.new_zeros(100)[10:20],
    lambda tensor: tensor.new_zeros(4, 3).T,
    lambda tensor: tensor.to_sparse(),
    lambda tensor: torch.nn.Parameter(tensor.float()),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.repeat(3, *[1] * (tensor.dim() - 1)) if tensor.dim() else tensor,
]


def _spec(document: dict[str, Any], name: object, tensor: object) -> dict[str, Any] | None:
    """The manifest entry that an honest writer would make for a tensor."""
    if not isinstance(name, str) or type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
        return None
    known = {spec["name"]: spec for spec in document["tensors"]}
    spec = dict(known.get(name, document["tensors"][0]))
    small = tensor.is_contiguous() and tensor.dtype not in (torch.bfloat16, torch.complex64)
    content = tensor.detach().reshape(-1).numpy().tobytes() if small else b""
    spec.update(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype)[6:], nbytes=tensor.nbytes)
    spec["sha256"] = hashlib.sha256(content).hexdigest()
    return spec


def _signed(stored: dict[Any, Any]) -> bytes:
    text = stored["manifest"]
    if isinstance(text, str):
        stored["manifest_sha256"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    return buffer.getvalue()


def _foreign(rng: random.Random, sound: Sound) -> bytes:
    """Something else altogether."""
    buffer = io.BytesIO()
    thing: Any = rng.choice(
        [
            any_value(rng),
            {"manifest": any_value(rng), "manifest_sha256": any_value(rng)},
            {"splats": {"means": torch.zeros(2, 3)}, "step": rng.choice(INTEGERS[:10])},
            ((1, torch.zeros(3)), 30_000),
            torch.zeros(3),
        ]
    )
    torch.save(thing, buffer, _use_new_zipfile_serialization=rng.random() < 0.8)
    return spoil_bytes(rng, buffer.getvalue()) if rng.random() < 0.3 else buffer.getvalue()


_WAYS = [_bytes, _members, _members, _manifest, _manifest, _manifest, _tensors, _tensors, _foreign]


if __name__ == "__main__":
    main(figures, 100_000)
