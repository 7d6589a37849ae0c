"""The ctypes mirror of splat.h is the header: a C compiler is asked for every size, offset and constant."""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from splatcli.native import abi
from splatcli.native.build import find_compiler, source_root
from tests.native.cases import ISAS, NEEDS_COMPILER, float32

pytestmark = NEEDS_COMPILER

#: Names in abi.py of what the header defines or enumerates.
CONSTANTS = {
    "SPLAT_ABI_VERSION": abi.ABI_VERSION,
    "SPLAT_CHUNK": abi.CHUNK,
    "SPLAT_TILE": abi.TILE,
    "SPLAT_PROJECTED": abi.PROJECTED,
    "SPLAT_ISECT_GRAD": abi.ISECT_GRAD,
    "SPLAT_POSE": abi.POSE,
    "SPLAT_CHANNELS_AT_ONCE": abi.CHANNELS_AT_ONCE,
    "SPLAT_BOUNDS": abi.BOUNDS,
    "SPLAT_DEVICE_FAULT": abi.DEVICE_FAULT,
    "SPLAT_LAUNCH_REFUSED": abi.LAUNCH_REFUSED,
    "SPLAT_COUNT_VISIBLE": abi.COUNT_VISIBLE,
    "SPLAT_COUNT_MAX_ISECTS": abi.COUNT_MAX_ISECTS,
    "SPLAT_COUNT_ISECTS": abi.COUNT_ISECTS,
    "SPLAT_COUNT_OVERFLOW": abi.COUNT_OVERFLOW,
    "SPLAT_COUNTERS": abi.COUNTERS,
    "SPLAT_CAMERA_PINHOLE": abi.CAMERA_MODELS["pinhole"],
    "SPLAT_CAMERA_ORTHO": abi.CAMERA_MODELS["ortho"],
    "SPLAT_CAMERA_FISHEYE": abi.CAMERA_MODELS["fisheye"],
    "SPLAT_FLOAT32": abi.FLOAT32,
    "SPLAT_FLOAT64": abi.FLOAT64,
    "SPLAT_ISA_PORTABLE": abi.ISAS.index("portable"),
    "SPLAT_ISA_AVX2": abi.ISAS.index("avx2"),
    "SPLAT_ISA_AVX512": abi.ISAS.index("avx512"),
    "SPLAT_ISA_NEON": abi.ISAS.index("neon"),
}


def header() -> str:
    """splat.h without its comments."""
    text = (source_root() / "include" / "splat.h").read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def struct_fields() -> dict[str, list[str]]:
    """Field names of each struct, in the header's order."""
    found = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", header(), flags=re.DOTALL):
        declarations = [part for part in body.split(";") if part.strip()]
        found[name] = [
            re.sub(r"\[.*?\]", "", piece).replace("*", " ").split()[-1] for d in declarations for piece in d.split(",")
        ]
    return found


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the header compiled says: sizes, "Struct.field" offsets, "Struct.field#" widths and constants."""
    lines = [f'  say("{name}", {name});' for name in CONSTANTS]
    for struct, fields in struct_fields().items():
        lines.append(f'  say("{struct}", sizeof({struct}));')
        for name in fields:
            lines.append(f'  say("{struct}.{name}", offsetof({struct}, {name}));')
            lines.append(f'  say("{struct}.{name}#", sizeof((({struct}*)0)->{name}));')
    body = "\n".join(lines)
    source = (
        "#include <stddef.h>\n#include <stdio.h>\n#include <splat.h>\n"
        'static void say(const char* name, long long value) { printf("%s %lld\\n", name, value); }\n'
        f"int main(void) {{\n{body}\n  return 0;\n}}\n"
    )
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(source, encoding="utf-8")
    # As C, not C++: the header is a C ABI and has to stay one.
    command = [*shlex.split(find_compiler().command), "-x", "c", "-std=c99", "-Wall", "-Werror", "-pedantic"]
    include = f"-I{source_root() / 'include'}"
    subprocess.run([*command, include, "probe.c", "-o", "probe"], cwd=folder, check=True)
    out = subprocess.run([str(Path(folder) / "probe")], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


def test_the_same_structs_with_the_same_fields() -> None:
    mirror = {name: [field[0] for field in struct._fields_] for name, struct in abi.STRUCTS.items()}
    assert mirror == struct_fields()


@pytest.mark.parametrize("name", abi.STRUCTS)
def test_struct_layout(name: str, probe: dict[str, int]) -> None:
    struct = abi.STRUCTS[name]
    assert ctypes.sizeof(struct) == probe[name]
    for field, *_ in struct._fields_:
        descriptor = getattr(struct, field)
        assert (field, descriptor.offset) == (field, probe[f"{name}.{field}"])
        assert (field, descriptor.size) == (field, probe[f"{name}.{field}#"])


@pytest.mark.parametrize("name", abi.STRUCTS)
def test_structs_are_born_with_their_size(name: str, probe: dict[str, int]) -> None:
    assert abi.STRUCTS[name]().struct_size == probe[name]


def test_constants(probe: dict[str, int]) -> None:
    assert {name: probe[name] for name in CONSTANTS} == CONSTANTS
    defined = set(re.findall(r"\b(SPLAT_[A-Z0-9_]+)\b", header())) - {"SPLAT_H"}
    assert defined == CONSTANTS.keys(), "every constant of the header is compared"


def test_every_entry_has_a_signature_with_as_many_arguments() -> None:
    declared = dict(re.findall(r"^[\w ]+?\*? ?(splat_\w+)\(([^)]*)\);", header(), flags=re.MULTILINE))
    counts = {name: 0 if args == "void" else args.count(",") + 1 for name, args in declared.items()}
    assert counts == {name: len(arguments) for name, (_, arguments) in abi.SIGNATURES.items()}


@pytest.mark.parametrize("isa", ISAS)
def test_each_build_exports_the_entries_and_nothing_else(isa: str) -> None:
    library = float32(isa).library
    assert library.splat_abi_version() == abi.ABI_VERSION
    assert library.splat_best_isa() >= abi.ISAS.index(isa)
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", library._name], capture_output=True, text=True, check=False
    )
    if exported.returncode != 0:
        pytest.skip("no nm to list the symbols with")
    names = {line.split()[-1] for line in exported.stdout.splitlines()}
    assert {name for name in names if name.startswith("splat")} == abi.SIGNATURES.keys()
    # C++ runtime templates may be weak and visible; ours are hidden.
    assert not [name for name in names if "splat" in name and name not in abi.SIGNATURES]


@pytest.mark.parametrize("struct", abi._Sized.__subclasses__(), ids=lambda struct: struct.__name__)
def test_a_field_that_the_header_lacks_is_refused(struct: type[abi._Sized]) -> None:
    with pytest.raises(AttributeError):
        struct().misspelt = 1
