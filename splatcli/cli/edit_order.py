"""The order of ``splat edit``'s command line: which operation applies to which model, and after which other one.

Typer keeps no order among different options. So the words are rewritten before they are parsed: each operation becomes
a value of one hidden option, together with the model that it applies to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from splatcli.cli.typer_command import Command
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.edit.operations import Operation

#: Operations, by their flags, and short names of some.
_OPERATIONS = (
    *("--translate", "--rotate", "--level", "--align-to", "--scale", "--scale-from", "--crop", "--crop-out"),
    *("--filter", "--sh-degree", "--simplify", "--clean", "--reorder"),
)
_SHORT = {"-t": "--translate", "-r": "--rotate", "-s": "--scale"}
#: Operations whose value may be left out: the values that they take, and the one that is meant then.
_OPTIONAL = {"--clean": (("light", "normal", "strong"), "normal")}
#: The option of the output file.
OUTPUT = ("-o", "--output")
#: The hidden option that carries operations in their order: "TARGET FLAG VALUE".
ORDERED = "--ordered-operation"
#: Targets of operations beside the number of a model: all models together, and a model that is not named yet.
_ALL, _NONE = "all", "none"


class EditCommand(Command):
    """Keeps the order of operations among each other, the models and ``-o``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name
            for one in self.get_params(ctx)
            if one.param_type_name == "option" and not one.is_flag
            for name in one.opts
        }
        return super().parse_args(ctx, in_order(args, takes_value))


def in_order(words: Sequence[str], takes_value: set[str]) -> list[str]:
    """Return a command line in which each operation says what it applies to.

    That is the model named last before it; after ``-o`` all models together. takes_value: names of options with one.
    """
    done: list[str] = []
    target, models = _NONE, 0
    pending = deque(words)
    while pending:
        word = pending.popleft()
        if word == "--":
            return [*done, word, *pending]
        if word == "-" or not word.startswith("-"):
            target, models = str(models), models + 1
            done.append(word)
            continue
        name, value = _split(word, takes_value)
        if name == ORDERED:
            raise UsageError("there is no such option", where=name, remedy="splat edit --help-all")
        if name not in takes_value:
            done.append(word)
            continue
        if value is None and name in _OPTIONAL:
            values, default = _OPTIONAL[name]
            value = pending.popleft() if pending and pending[0] in values else default
        if value is None and pending:
            value = pending.popleft()
        if value is None:
            done.append(word)  # and the parser says that a value is missing
        elif (flag := _SHORT.get(name, name)) in _OPERATIONS:
            done += [ORDERED, f"{target} {flag} {value}"]
        else:
            done += [word] if word != name else [word, value]
        if name in OUTPUT:
            target = _ALL
    return done


def _split(word: str, takes_value: set[str]) -> tuple[str, str | None]:
    """Return the option in a word, and the value that is written in the same word."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name, value if equals else None
    if word[:2] in takes_value:
        return word[:2], word[2:] or None
    return word, None


def operations_by_model(ordered: Sequence[str], models: int) -> tuple[list[list[Operation]], list[Operation]]:
    """Return the operations of each model, and those of all together. Raises UsageError.

    ordered: the values of the hidden option. models: how many there are.
    """
    from splatcli.edit.operations import parse_operation

    own: list[list[Operation]] = [[] for _ in range(models)]
    together: list[Operation] = []
    for text in ordered:
        target, flag, value = (*text.split(" ", 2), "", "")[:3]
        operation = parse_operation(flag, value)
        if target == _ALL:
            together.append(operation)
        elif target != _NONE:
            own[int(target)].append(operation)
        elif models == 1:
            own[0].append(operation)
        else:
            raise UsageError(
                "it stands before all of several models",
                where=f"{flag} {value}",
                remedy="name it after a model for that one, after -o FILE for all together",
            )
    return own, together
