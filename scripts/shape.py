"""Measure the shape of the code: lines, modules, imports, long signatures, and the way from the command to the kernel.

    python scripts/shape.py [--tree DIR] [--list] [--no-training]

DIR is a checkout of the project (this one by default). --list names the modules and functions behind each figure.
The last figures come from one step of `splat train` on the sample scene; --no-training leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Modules with fewer lines and functions with more parameters than these are counted.
SMALL_MODULE, MANY_PARAMETERS = 60, 8


def module_texts(package: Path) -> dict[str, str]:
    """The modules of a package: dotted name -> text."""
    texts = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        texts[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return texts


def line_kinds(text: str, tree: ast.Module) -> Counter[str]:
    """The lines of a module by kind: import, blank or comment (docstrings among them), and code."""
    kinds = dict.fromkeys(range(1, len(text.splitlines()) + 1), "blank or comment")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            kinds.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), "code"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds.update(dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "import"))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds.update(dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "blank or comment"))
    return Counter(kinds[line] for line in range(1, len(text.splitlines()) + 1))


def run_time_imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Each module's imports from the package, inside functions too, but not under TYPE_CHECKING."""

    def imports(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in trees else node.module
        skips = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in node.orelse if skips else ast.iter_child_nodes(node):
            yield from imports(child)

    return {name: {used for used in imports(tree) if used in trees} - {name} for name, tree in trees.items()}


def circles(uses: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for used in sorted(uses[name]):
            if used not in index:
                visit(used)
            if used in stack:
                lowest[name] = min(lowest[name], lowest[used])
        if lowest[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in uses:
        if name not in index:
            visit(name)
    return found


def parameter_counts(trees: dict[str, ast.Module]) -> dict[str, int]:
    """The number of parameters of each function, without self and cls: "module:function" -> number."""
    counts = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                of = node.args
                every = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]
                counts[f"{name}:{node.name}"] = sum(one.arg not in ("self", "cls") for one in every)
    return counts


#: Runs the command in sys.argv up to the first training step; prints the splatcli functions that call splat_project.
FOLLOW = """
import json, os, sys, threading
from splatcli.cli import main
latest = []
def watch(frame, event, argument):
    if event != "call" or frame.f_code.co_name != "call" or not frame.f_globals["__name__"].startswith("splatcli."):
        return
    if frame.f_locals.get("name") == "project":
        latest.clear()
        while frame is not None:
            module = frame.f_globals["__name__"]
            if module.startswith("splatcli"):
                latest.append(f"{module}:{frame.f_code.co_name}")
            frame = frame.f_back
    elif frame.f_locals.get("name") == "project_vjp":
        print("STACK " + json.dumps(latest[::-1]), file=sys.stderr, flush=True)
        os._exit(0)
threading.setprofile(watch)
sys.setprofile(watch)
main()
"""


def way_to_the_kernel(tree: Path) -> list[str]:
    """The splatcli functions on the stack of one training step when it calls splat_project: "module:function"."""
    with tempfile.TemporaryDirectory(prefix="splat-shape-") as folder:
        words = ["train", "data/samples/courtyard", "-n", "1", "--device", "cpu", "--set", "data.resolution=8"]
        done = subprocess.run(
            [sys.executable, "-c", FOLLOW, *words, "-o", str(Path(folder) / "run"), "-q"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
    stacks = [line.removeprefix("STACK ") for line in done.stderr.splitlines() if line.startswith("STACK ")]
    if done.returncode or not stacks:
        raise SystemExit(f"shape: splat train ended with {done.returncode}: {done.stderr[-2000:]}")
    stack: list[str] = json.loads(stacks[0])
    return stack


def figures(tree: Path, *, training: bool = True) -> dict[str, tuple[int, list[str]]]:
    """Each figure of a checkout, with what it counts."""
    texts = module_texts(tree / "splatcli")
    parsed = {name: ast.parse(text) for name, text in texts.items()}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    kinds = sum((line_kinds(text, parsed[name]) for name, text in texts.items()), Counter[str]())
    uses = run_time_imports(parsed)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, used in uses.items():
        for one in used:
            importers[one].add(name)
    single = [f"{name} <- {next(iter(users))}" for name, users in sorted(importers.items()) if len(users) == 1]
    small = [f"{name} {lines}" for name, lines in lengths.items() if lines < SMALL_MODULE]
    many = [f"{name} {count}" for name, count in parameter_counts(parsed).items() if count > MANY_PARAMETERS]
    rings = [" ".join(ring) for ring in circles(uses)]
    tests = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (tree / "tests").rglob("*.py")}
    found: dict[str, tuple[int, list[str]]] = {"lines of splatcli": (sum(lengths.values()), [])}
    found |= {f"  {kind}": (kinds[kind], []) for kind in ("code", "import", "blank or comment")}
    found |= {
        "modules": (len(texts), []),
        "modules with one importer": (len(single), single),
        f"modules under {SMALL_MODULE} lines": (len(small), small),
        f"functions with more than {MANY_PARAMETERS} parameters": (len(many), many),
        "import circles at run time": (len(rings), rings),
        "lines of tests": (sum(tests.values()), []),
    }
    if training:
        stack = way_to_the_kernel(tree)
        modules = list(dict.fromkeys(call.split(":")[0] for call in stack))
        found["modules from the command to the kernel"] = (len(modules), modules)
        found["calls from the command to the kernel"] = (len(stack), stack)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="shape", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="a checkout of the project")
    parser.add_argument("--list", action="store_true", help="name what each figure counts")
    parser.add_argument("--no-training", action="store_true", help="leave out the way to the kernel")
    options = parser.parse_args(argv)
    for name, (value, named) in figures(options.tree.resolve(), training=not options.no_training).items():
        print(f"{name:40}{value:8,}")
        if options.list:
            print("".join(f"    {one}\n" for one in named), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
