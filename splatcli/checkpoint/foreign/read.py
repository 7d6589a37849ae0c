"""Reads torch files of other programs without trusting them: the zip, every checksum, every word of the pickle.

weights_only=True alone is not enough: it builds bytearrays of any size, and finds a second pickle under another
spelling of the first one's name. So the pickle is read as a list of instructions first. Only those that rebuild tensors
and plain containers may be there; numbers of numpy, in schedulers and learning rates, are replaced by nothing.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from splatcli.checkpoint.container import check_crc, examine, name_for_torch, pickle_of, unreadable
from splatcli.checkpoint.foreign import gsplat, inria, nerfstudio
from splatcli.checkpoint.foreign.imported import ImportedModel
from splatcli.errors import ModelFileError
from splatcli.sizes import listed

#: The programs whose checkpoints are read; of models of one step the first program's wins.
PROGRAMS = (inria.PROGRAM, gsplat.PROGRAM, nerfstudio.PROGRAM)


def read_foreign(path: Path) -> ImportedModel:
    """Return the model in a torch file of one of PROGRAMS, its space not checked yet.

    Raises ModelFileError for a damaged or hostile file, and for one that holds no known model.
    """
    stored = load_foreign(path)
    for program in PROGRAMS:
        if program.recognises(stored):
            return program.read(stored, path, load_foreign)
    raise ModelFileError(
        f"no model that is known here: {_outline(stored)}",
        where=path,
        remedy="known are checkpoints of splat, of the original program (chkpnt*.pth), of gsplat and of nerfstudio, "
        "and PLY files",
    )


def newest_foreign(folder: Path) -> Path | None:
    """Return the PLY or checkpoint of the highest step in the run folder of another program; None without any.

    The PLY wins where both are of that step, and the first of several shards.
    """
    found = []
    for order, (pattern, name) in enumerate(place for program in PROGRAMS for place in program.places):
        for path in sorted(folder.glob(pattern)):
            if match := re.match(name, path.relative_to(folder).as_posix()):
                found.append((int(match[1]), -order, path))
    # max() returns the first of equals, which is rank 0.
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _outline(stored: object) -> str:
    """Return a few words on the content of a file."""
    if isinstance(stored, dict):
        keys = [str(key)[:40] for key in stored]
        return f"a dictionary of {listed(keys, 8)}" if keys else "nothing"
    if isinstance(stored, tuple | list):
        return f"a {type(stored).__name__} of {len(stored)} values"
    return f"a {type(stored).__name__}"


# --- the pickle

#: The pickle holds names and shapes only; a few kilobytes are usual. An instruction of one byte can make an object of
#: sixty, which this keeps below what any machine has.
_MAX_PICKLE = 1 << 20
#: No name is longer, and some text codecs take time that grows with the square of it.
_MAX_TEXT = 4096

#: The instructions that torch.save writes for tensors, numbers, strings and plain containers, in pickle protocol 2.
_OPCODES = frozenset(
    (
        *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "BINPERSID", "GLOBAL", "REDUCE", "BUILD"),
    )
)

_STORED_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
#: Names that torch knows how to read safely: tensors, and what optimizers and schedulers keep beside them.
_TORCH_GLOBALS = frozenset(
    [
        *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch Size", "torch device"),
        *("collections OrderedDict", "collections Counter", "_codecs encode"),
        *(f"torch {kind}Storage" for kind in _STORED_KINDS),
        *(f"torch {dtype}" for dtype in _DTYPES),
    ]
)

_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since
#: Names of numpy that learning rates and scene sizes bring along; ``_Nothing`` replaces them.
_NUMPY_GLOBALS = frozenset(
    [
        *("numpy dtype", "numpy ndarray"),
        *(f"{module} {name}" for module in _NUMPY_MODULES for name in ("scalar", "_reconstruct")),
    ]
)


class _Nothing:
    """Replaces a number of numpy, which no model needs, so that numpy's functions need not be trusted."""

    def __init__(self, *args: object) -> None:
        """Build nothing."""

    def __setstate__(self, state: object) -> None:
        """Fill in nothing."""


def load_foreign(path: Path) -> object:
    """Return the content of a file of ``torch.save``, tensors on the CPU, once the file has been examined.

    Runs no code. Allocates no more than the file is large; tensors may still be views that pretend to be huge.
    Raises ModelFileError for everything that is not an undamaged file of tensors and plain containers.
    """
    examine(path, lambda archive: _check_members(archive, path))
    stand_ins: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
        (_Nothing, name.replace(" ", ".")) for name in _NUMPY_GLOBALS
    ]
    try:
        with torch.serialization.safe_globals(stand_ins), name_for_torch(path) as name:
            # Not mapped: a mapped storage may claim more bytes than its member has, and torch shows its neighbours'.
            return torch.load(name, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # RuntimeError, ValueError, UnpicklingError, EOFError, ... by the kind of damage
        raise unreadable(error, path) from None


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    """Check every checksum, those of tensors too, since no digest guards them; then the pickle."""
    for member in archive.infolist():
        check_crc(archive, member)
    pickle = pickle_of(archive)
    if pickle.file_size > _MAX_PICKLE:
        raise ModelFileError(
            f"the pickle inside has {pickle.file_size:,} bytes; {_MAX_PICKLE:,} are allowed for names and shapes",
            where=path,
        )
    _check_pickle(archive.read(pickle), path)


def _check_pickle(content: bytes, path: Path) -> None:
    for opcode, argument, position in pickletools.genops(content):
        fault = _fault(opcode.name, argument)
        if fault is not None:
            raise ModelFileError(
                f"the pickle inside {fault}; nothing was run",
                where=f"{path}, byte {position} of data.pkl",
                remedy="in the program that wrote it, save the tensors alone, or export a PLY",
            )


def _fault(opcode: str, argument: object) -> str | None:
    """Return why an instruction of a pickle is refused; None when it is harmless."""
    if opcode not in _OPCODES:
        return f"uses {opcode}, which no model needs"
    if opcode == "PROTO" and argument != 2:
        return f"is of protocol {argument}, not 2"
    if opcode == "GLOBAL" and argument not in _TORCH_GLOBALS | _NUMPY_GLOBALS:
        return f"names {str(argument)[:100].replace(' ', '.')!r}, which no model needs"
    if isinstance(argument, str) and len(argument) > _MAX_TEXT:
        return f"holds a text of {len(argument):,} characters"
    return None
