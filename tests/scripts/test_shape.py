"""scripts/shape.py: what it counts, and that it follows a training step to the kernel."""

from __future__ import annotations

import ast
from pathlib import Path

import shape


def test_lines_are_code_imports_or_neither() -> None:
    text = '"""Title."""\n\nimport os\nfrom a import (\n    b,\n)\n\n# why\nx = """one\n\ntwo"""  # here\n'
    assert shape.line_kinds(text, ast.parse(text)) == {"import": 4, "code": 3, "blank or comment": 4}


def test_circles_are_found_inside_functions_but_not_in_type_checking_blocks() -> None:
    texts = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "def f():\n    from p.c import x",
        "p.c": "import p.a",
        "p.d": "if TYPE_CHECKING:\n    from p.e import y\nelse:\n    import p.a",
        "p.e": "import p.d, os",
    }
    uses = shape.run_time_imports({name: ast.parse(text) for name, text in texts.items()})
    assert uses["p.d"] == {"p.a"}
    assert uses["p.e"] == {"p.d"}
    assert shape.circles(uses) == [["p.a", "p.b", "p.c"]]


def test_self_is_no_parameter() -> None:
    tree = ast.parse("class A:\n    def f(self, a, /, b, *c, d=1, **e): ...")
    assert shape.parameter_counts({"m": tree}) == {"m:f": 5}


def test_a_training_step_goes_from_the_command_to_the_kernel() -> None:
    figures = shape.figures(Path(shape.__file__).parents[1])
    modules = figures["modules from the command to the kernel"][1]
    assert modules[0] == "splatcli.cli"
    assert modules[-1] == "splatcli.native.backend"
    kinds = ("code", "import", "blank or comment")
    assert figures["lines of splatcli"][0] == sum(figures[f"  {kind}"][0] for kind in kinds)
