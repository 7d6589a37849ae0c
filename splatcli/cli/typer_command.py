"""Commands made of declarations: their flags, the parsing, the help.

The options of a command are a frozen dataclass, its one parameter. A field with a ``typer.Option`` is a flag; a field
that is a dataclass itself is a group of flags that commands share (options.py); a field with ``SettingFlags`` takes the
flags that splatcli/config/settings.py declares beside the settings. ``__post_init__`` refuses options that exclude each
other.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from splatcli.cli.console import announce
from splatcli.cli.help import Records, folded, in_order, write_panels
from splatcli.errors import SplatError, UsageError

if TYPE_CHECKING:
    from splatcli.config import Flag


class Command(TyperCommand):
    """A command that makes its flags when they are first needed: ``splat --help`` does without them.

    everyday: the flags that ``--help`` shows, under the heading Essentials; ``--help-all`` shows all flags, under the
    headings that they name (``rich_help_panel``). Without everyday flags ``--help`` shows all of them.
    """

    function: ClassVar[Callable[[Any], int]]
    everyday: ClassVar[tuple[str, ...]] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        if not self.params:
            self.params, self.callback = _parse_with(type(self).function)
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            self._check_names(ctx, args)
        return super().parse_args(ctx, args)

    def _check_names(self, ctx: Any, args: list[str]) -> None:
        """Raise UsageError for an empty name of a file or folder, which means this folder, and for a second file of -o.

        The first comes from a variable that is not set. Of two files the parser would drop the first; of two folders
        the later one replaces that of an alias or a script, as with other options.
        """
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        paths = set(_path_names(_options_class(type(self).function)))
        for one in self.get_params(ctx):
            where = one.metavar.strip("[].") if one.param_type_name == "argument" else one.opts[0]
            value = given.get(one.name)
            if one.name in paths and "" in (value if isinstance(value, list | tuple) else (value,)):
                raise UsageError("the name is empty", where=where, remedy="perhaps a variable of the shell is not set")
            if "-o" in one.opts and one.metavar != "DIR" and order.count(one) > 1:
                raise UsageError(
                    "it is given twice", where=where, remedy="name one output, and others in commands of their own"
                )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one.metavar for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *arguments]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        text, _, examples = inspect.cleandoc(self.help or "").partition("\b\nExamples:\n")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)
        if examples:
            formatter.write("\n  Examples:\n")
            for example in examples.splitlines():
                formatter.write("".join(f"{line}\n" for line in folded(f"  {example}", formatter.width)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, Records] = {}
        short = bool(self.everyday) and not ctx.meta.get(_HELP_ALL)
        hidden = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or (parameter.name == "help_all" and not self.everyday):
                continue
            panel = self.panel_of(parameter)
            if short and panel not in ("Arguments", "Essentials"):
                hidden += 1
                continue
            name = parameter.metavar if parameter.param_type_name == "argument" else record[0]
            panels.setdefault(panel, []).append((name, record[1]))
        for name in ("Arguments", "Essentials"):
            panels.get(name, []).sort(key=lambda one: self._place(one[0]))
        write_panels(formatter, dict(in_order(panels)))
        if hidden:
            formatter.write(f"\n{hidden} more flags: {ctx.command_path} --help-all\n")

    def panel_of(self, parameter: Any) -> str:
        """Return the heading that a parameter is listed under."""
        if parameter.param_type_name == "argument":
            return "Arguments"
        if not self.everyday:
            return getattr(parameter, "rich_help_panel", None) or "Options"
        if {*parameter.opts, "help", "help_all"} & {*self.everyday, parameter.name}:
            return "Essentials"
        return getattr(parameter, "rich_help_panel", None) or "Expert"

    def _place(self, names: str) -> int:
        """Return where a line of the help stands among the everyday flags."""
        words = names.replace(",", " ").split()
        return next((at for at, flag in enumerate(self.everyday) if flag in words), len(self.everyday))


class Group(TyperGroup):
    """The list of commands, under the headings that they are added with."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        panels: dict[str, Records] = {}
        for name, command in commands:
            panel = str(getattr(command, "rich_help_panel", None) or "Commands")
            panels.setdefault(panel, []).append((name, command.get_short_help_str(_WHOLE)))
        records = [record for one in self.get_params(ctx) if (record := one.get_help_record(ctx)) is not None]
        write_panels(formatter, {**panels, "Options": records})


#: More characters than the first sentence of a command's help has.
_WHOLE = 1000

#: Where a context notes that all flags are wanted.
_HELP_ALL = "splatcli.help_all"


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with all flags, and end."""
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def add_command(
    app: typer.Typer,
    name: str,
    function: Callable[[Any], int],
    kind: type[Command] = Command,
    *,
    panel: str,
    everyday: tuple[str, ...] = (),
) -> None:
    """Make ``function`` the command ``name``: its parameter is a dataclass of options, its docstring the help.

    panel: the heading of ``splat --help`` that it is listed under. everyday: see Command.
    """

    def stub() -> None:
        """Stand for the command until its flags are made."""

    stub.__doc__ = function.__doc__
    members = {"function": staticmethod(function), "everyday": everyday}
    app.command(name, cls=type(kind.__name__, (kind,), members), rich_help_panel=panel)(stub)


def _parse_with(function: Callable[[Any], int]) -> tuple[list[Any], Callable[..., Any] | None]:
    """Return Typer's parameters of a command, and the call of ``function`` with what is given for them."""
    options_class = _options_class(function)

    def call(**given: Any) -> int:
        arguments = _build(options_class, given)
        _check_paths(options_class, given)
        if not arguments.quiet and function.__name__ != "docs":  # which loads none
            name = function.__name__ if function.__name__ != "evaluate" else "eval"
            announce(f"splat {name}: loading libraries")
        return function(arguments)

    help_all = typer.Option("--help-all", help="Show all flags and exit.", callback=_show_all, is_eager=True)
    kind: Any = Annotated[bool, help_all]
    more = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    call.__signature__ = inspect.Signature([*_parameters(options_class), more])  # type: ignore[attr-defined]
    call.__annotations__ = {}
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command()(call)
    made = typer.main.get_command(single)
    return list(made.params), made.callback


def _options_class(function: Callable[[Any], int]) -> Any:
    (found,) = (hint for name, hint in get_type_hints(function).items() if name != "return")
    return found


def _path_names(options_class: Any) -> Iterator[str]:
    """Yield the names of the parameters that take files and folders; settings are not among them."""
    for one, hint, flags in _fields(options_class):
        if flags is None and dataclasses.is_dataclass(hint):
            yield from _path_names(hint)
        elif flags is None and _takes_path(hint):
            yield one.name


def _takes_path(hint: Any) -> bool:
    return hint is Path or any(_takes_path(part) for part in get_args(hint))


def _fields(options_class: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, SettingFlags | None]]:
    """Yield the fields of a class of options, each with its type and, where it takes settings, their flags."""
    hints = get_type_hints(options_class, include_extras=True)
    for one in dataclasses.fields(options_class):
        hint = hints[one.name]
        flags = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, SettingFlags)]
        yield one, hint, flags[0] if flags else None


@dataclass(frozen=True)
class Exists:
    """The error of a path that a command reads and that is not there, raised before any library is loaded."""

    what: str
    remedy: str
    error: type[SplatError] = UsageError

    def check(self, path: Path) -> None:
        """Raise ``error`` for a path that is not there, OSError for one that the system cannot follow or read."""
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise self.error(self.what, where=path, remedy=self.remedy) from None


def _check_paths(options_class: Any, given: Mapping[str, Any]) -> None:
    """Check the paths of all fields that are declared with Exists."""
    for one, hint, _ in _fields(options_class):
        for rule in getattr(hint, "__metadata__", ()):
            if isinstance(rule, Exists) and given[one.name] is not None:
                paths = given[one.name] if isinstance(given[one.name], list) else [given[one.name]]
                for path in paths:
                    try:
                        rule.check(path)
                    except OSError as error:  # others the command reports when it reads
                        if error.errno == errno.ENAMETOOLONG:
                            raise


def _parameters(options_class: Any) -> Iterator[inspect.Parameter]:
    for one, hint, flags in _fields(options_class):
        if flags is not None:
            yield from flags.parameters()
        elif dataclasses.is_dataclass(hint):
            yield from _parameters(hint)
        else:
            default = inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default
            yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _build(options_class: Any, given: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for one, hint, flags in _fields(options_class):
        if flags is not None:
            values[one.name] = flags.given(given)
        elif dataclasses.is_dataclass(hint):
            values[one.name] = _build(hint, given)
        else:
            values[one.name] = given[one.name]
    return options_class(**values)


@dataclass(frozen=True)
class SettingFlags:
    """The flags of settings, for a field that holds their values: dotted key -> value.

    keys: None takes all settings that have flags. help: for keys whose flags mean something else in this command.
    negatable: whether switches can turn a setting off, too.
    """

    keys: tuple[str, ...] | None = None
    help: Mapping[str, str] = field(default_factory=dict)
    negatable: bool = False

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield a parameter for each flag."""
        from splatcli.config import sections, setting_fields

        for name, key, flag in self._flags():
            info = setting_fields()[key]
            kind: Any = (flag.type or _plain_type(info.annotation)) if flag.metavar else bool
            names = flag.names if flag.metavar else self._switch(flag)
            text, default = flag.help or info.description or "", flag.default
            if key in self.help:
                text = self.help[key]
            elif default is None and flag.metavar and info.default is not None:
                default = str(info.default)
            option = typer.Option(
                *names,
                metavar=flag.metavar,
                help=text.replace("`", "") + (f"  [default: {default}]" if default and key not in self.help else ""),
                rich_help_panel=flag.panel or sections()[key.partition(".")[0]].panel,
                show_default=False,
            )
            annotation: Any = Annotated[kind | None, option]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that flags were given for. Raises UsageError for two flags of one setting."""
        found: dict[str, Any] = {}
        source: dict[str, str] = {}
        for name, key, flag in self._flags():
            value = values[name]
            if value is None:
                continue
            if key in found:
                raise exclusion(source[key], flag.names[0])
            found[key] = flag.value if value is True and not flag.metavar else value
            source[key] = flag.names[0]
        return found

    def _flags(self) -> Iterator[tuple[str, str, Flag]]:
        """Yield (parameter, key, flag) of each flag."""
        from splatcli.config import setting_flags

        flags = setting_flags()
        for key in flags if self.keys is None else self.keys:
            for number, flag in enumerate(flags[key]):
                yield f"{key.replace('.', '_')}_{number}", key, flag

    def _switch(self, flag: Flag) -> tuple[str, ...]:
        return tuple(f"{name}/--no-{name[2:]}" for name in flag.names) if self.negatable else flag.names


def _plain_type(annotation: Any) -> type:
    """Return the type as which the command line reads the values of a setting."""
    kinds = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((kind for kind in (bool, int, float) if kind in kinds), str)


def exclusion(*flags: str, remedy: str = "give one") -> UsageError:
    """Return the error of flags that exclude each other."""
    return UsageError(f"{' and '.join(flags)} exclude each other", where=flags[0], remedy=remedy)
