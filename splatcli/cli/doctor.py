"""``splat doctor``: reports the hardware and software of this machine, with remedies for what does not work."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from splatcli.cli import options


@dataclass(frozen=True)
class DoctorArguments:
    """The options of ``splat doctor``."""

    fix: Annotated[
        bool, typer.Option("--fix", help="Print only the commands that would mend what is missing; nothing is run.")
    ] = False
    json: options.Json = False
    quiet: options.Quiet = False


def doctor(args: DoctorArguments) -> int:
    """Check driver, GPU, torch, compilers and extras, and render a test image on each device.

    Extras are the packages that single commands need. Builds the native library where it is missing, so that the next
    command starts at once. Ends with 0 when the CPU works, and with 4 when it does not.

    \b
    Examples:
      splat doctor
      splat doctor --fix
      splat doctor --json | python -m json.tool
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.tables import of_lines

    with open_output(json=args.json, quiet=args.quiet) as out:
        from splatcli.doctor import examine

        facts = examine()
        if args.fix and not facts["fix"]:
            out.message("nothing is missing")
        lines = _lines(facts)
        if args.fix:
            out.result(facts, facts["fix"])
        else:
            out.result(facts, _wrapped(lines), [of_lines(lines, 11)])
    return 0 if facts["ok"] else 4


def _wrapped(lines: list[str]) -> list[str]:
    """Return lines that fit a terminal, broken between words and indented as their values; elsewhere as they are."""
    if sys.stdout is None or not sys.stdout.isatty():
        return lines
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    wrapper.replace_whitespace = wrapper.expand_tabs = False
    return [part for line in lines for part in wrapper.wrap(line)]


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"splatcli   {facts['splatcli']}, Python {facts['python']}, {facts['system']}",
        f"torch      {facts['torch']}, " + (f"CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else "a CPU build"),
        f"driver     {_driver(facts)}",
    ]
    for index, gpu in enumerate(facts["gpus"]):
        lines.append(f"cuda:{index}     {_gpu(gpu)}")
    if not facts["gpus"]:
        lines.append("GPUs       torch finds none")
    if not facts["compiler"]["works"] and facts["backends"]["cpu"].get("works"):
        lines.append("compiler   none was found; the library for the CPU needs none")
    else:
        lines += _tool_lines("compiler ", facts["compiler"])
    lines += _tool_lines("nvcc     ", facts["nvcc"])
    lines.append(f"cache      {facts['cache'] or 'none: no folder for built libraries can be written'}")
    lines.append(f"memory     {facts['memory_bytes'] / 2**30:.1f} GiB")
    best = "" if facts["isa"] == facts["best_isa"] else f"; the processor has {facts['best_isa']}"
    lines.append(f"cores      {facts['cores']}, {facts['threads']} used; instruction set {facts['isa']}{best}")
    for name, backend in facts["backends"].items():
        lines += _backend_lines(name, backend)
    for name, extra in {"pycolmap": facts["pycolmap"], **facts["extras"]}.items():
        lines += _extra_lines(name, extra)
    return lines


def _extra_lines(name: str, extra: dict[str, Any]) -> list[str]:
    if extra["works"]:
        version = f" {extra['version']}" if extra["version"] else ""
        return [f"{name:<9}  {extra['found']}{version} ({extra['used_for']})"]
    return [f"{name:<9}  {extra['problem']} ({extra['used_for']})", *_remedy(extra)]


def _driver(facts: dict[str, Any]) -> str:
    if not (facts["driver"] or facts["driver_cuda"]):
        return "no NVIDIA driver"
    cuda = f", for CUDA up to {facts['driver_cuda']}" if facts["driver_cuda"] else ""
    return (facts["driver"] or "present") + cuda


def _gpu(gpu: dict[str, Any]) -> str:
    if gpu["name"] is None:
        return "torch cannot use it"
    return f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB"


def _tool_lines(label: str, tool: dict[str, Any]) -> list[str]:
    if tool["works"]:
        return [f"{label}  {tool['version']} ({tool['command']})"]
    return [f"{label}  {tool['problem']}", *_remedy(tool)]


def _backend_lines(name: str, backend: dict[str, Any]) -> list[str]:
    if backend["works"]:
        return [
            f"{name:<9}  works: {backend['why']}",
            f"           {backend['library']}",
            f"           test image: largest difference from the reference {backend['largest_difference']:.1e}",
        ]
    status = "unavailable" if name == "cuda" else "DOES NOT WORK"  # with a GPU the name is cuda:0
    return [f"{name:<9}  {status}: {backend['problem']}", *_remedy(backend)]


def _remedy(facts: dict[str, Any]) -> list[str]:
    return [f"           help: {facts['remedy']}"] if facts.get("remedy") else []
