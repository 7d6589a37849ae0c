"""Every bit of a checkpoint, or a sample of them, flipped one at a time: each is noticed, or no reader uses it.

A flip is harmless when the file still loads and everything in it, tensors and numbers, is what it was.
"""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import fields
from pathlib import Path

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import Checkpoint
from tests.torture.harness import Case, Figure, main, refused, run_cases, workplace
from tests.torture.states import small_checkpoint


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: at most so many bits, drawn at random; a file has some 200,000."""
    start = time.monotonic()
    with workplace() as folder:
        path = folder / "flipped.pt"
        save_checkpoint(path, small_checkpoint(3, degree=0))
        bits = 8 * path.stat().st_size
        trials = min(count, bits)
        tally = run_cases(case_of(seed, path), trials)
    what = "one bit of a checkpoint is flipped: it is refused, or all that is loaded has the bits it had"
    return {"bit_flips": tally.figure(what, time.monotonic() - start, bits_of_the_file=bits)}


def case_of(seed: int, path: Path) -> Case:
    """Case i flips the i-th bit of a shuffled file, and none twice."""
    whole = path.read_bytes()
    original = digest(load_checkpoint(path))
    order = random.Random(seed).sample(range(8 * len(whole)), 8 * len(whole))

    def case(index: int) -> str:
        place, bit = divmod(order[index], 8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        found: list[Checkpoint] = []
        if refused(lambda: found.append(load_checkpoint(path))):
            return "refused"
        if digest(found[0]) != original:
            raise AssertionError(f"bit {bit} of byte {place} changes what is loaded")
        return "harmless"

    return case


def digest(checkpoint: Checkpoint) -> str:
    """Return a digest of everything that a checkpoint holds, to the last bit."""
    content = hashlib.sha256()
    for field in fields(Checkpoint):
        _feed(content, getattr(checkpoint, field.name))
    return content.hexdigest()


def _feed(content: hashlib._Hash, value: object) -> None:
    """Tensors and arrays by their bytes, containers by their parts, the rest by its words, which keep doubles exact."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tobytes"):
        content.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif hasattr(value, "model_dump_json"):
        content.update(value.model_dump_json().encode())
    elif isinstance(value, dict):
        _feed(content, [list(item) for item in sorted(value.items())])
    elif isinstance(value, list | tuple):
        content.update(f"[{len(value)}".encode())
        for part in value:
            _feed(content, part)
    elif hasattr(value, "__dataclass_fields__"):
        _feed(content, [[field.name, getattr(value, field.name)] for field in fields(value)])
    else:
        content.update(f"{type(value).__name__} {value!r};".encode())


if __name__ == "__main__":
    main(figures, 1_000_000)
