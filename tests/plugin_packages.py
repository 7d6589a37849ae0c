"""Packages with entry points, as an installation would leave them, for tests of plug-ins."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, package: str, module: str, points: dict[str, dict[str, str]]) -> Path:
    """Put a module and its metadata into ``folder``, which has to be on sys.path; return the module's file.

    module: the source of ``{package}.py``. points: group -> name -> entry point.
    """
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join(
            line
            for group, named in points.items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
        )
    )
    path = folder / f"{package}.py"
    path.write_text(module)
    return path
