"""The shared options of commands, and commands to paste, with the operator's target and shell quoting."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any, get_type_hints

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace
from typer.core import TyperArgument, TyperCommand, TyperOption

from outboxio.cli.target import Named, TargetError, named, refuse_without_namespace
from outboxio.support.text import without_passwords

_where: ContextVar[tuple[str, ...]] = ContextVar("where", default=())
_OWN_CODE = "module:outbox"  # in fixes that need the application's code


def remember(target: str | None, database: str | None, namespace: str | None) -> None:
    """Remember how the command line names the outbox: commands to paste repeat these arguments."""
    arguments = [] if target is None else [without_passwords(target)]
    arguments += [] if database is None else ["--database", without_passwords(database)]
    arguments += [] if namespace is None else ["--namespace", namespace]
    _where.set(tuple(arguments))


def pasted(name: str, *arguments: str) -> str:
    """Return a command for a shell: ``outboxio retry app.main:outbox --handler receipt``."""
    return shlex.join(["outboxio", name, *_where.get(), *arguments])


def with_outbox(command: str) -> str:
    """Return a command, such as the fix of a finding, with the arguments that name the outbox."""
    parts = command.split(" ", 2)
    where = _where.get()
    if len(parts) < 2 or parts[0] != "outboxio" or not where:
        return command
    if _OWN_CODE in command:
        is_code = ":" in where[0] and "://" not in where[0]
        return command.replace(_OWN_CODE, where[0]) if is_code else command
    return " ".join([parts[0], parts[1], shlex.join(where), *parts[2:]])


# --- options that several commands share ----------------------------------------------------------
#
# A command takes a group of options as a parameter: ``def pause(common: Common, target: Target) -> None``. The
# decorator :func:`command` passes the options of the group to typer one by one.


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="Your outbox, as in [cyan]app.main:outbox[/], a callable that returns it, or a database URL. "
        "Default: $OUTBOXIO_TARGET, or [cyan]target[/] in the table [cyan]tool.outboxio[/] of pyproject.toml.",
        show_default=False,
    ),
]


class Options(Struct, frozen=True):
    """A group of options. Each field that is annotated for typer is an option with a default."""


class Common(Options, frozen=True):
    """The options of every command that works on an outbox."""

    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A database instead of an outbox: [cyan]postgresql://host/name[/], [cyan]mysql://host/name[/], "
            "[cyan]mariadb://host/name[/] or [cyan]sqlite:///file.db[/]",
            show_default=False,
        ),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The namespace in this database. Default: $OUTBOXIO_NAMESPACE.",
                     show_default=False),
    ] = None  # fmt: skip
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False

    def named(self, arguments: str | list[str] | None, limit: int = 0) -> Named:
        """Return the outbox that the command line names, with at most ``limit`` further arguments."""
        arguments = [arguments] if isinstance(arguments, str) else arguments or []
        found = named(arguments, self.database, self.namespace)
        is_typed = self.database is None and bool(arguments) and found.target == arguments[0]
        remember(found.target if is_typed else None, self.database, self.namespace)
        if len(found.arguments) > limit:
            raise TargetError(f"unexpected argument {found.arguments[limit]!r}")
        return found

    def of_namespace(self, arguments: str | list[str] | None, limit: int = 0) -> Named:
        """Return the same, for a command on the rows of one namespace."""
        found = self.named(arguments, limit)
        refuse_without_namespace(found)
        return replace(found, needs_rows=True)


class Command(TyperCommand):
    """A command whose usage line and help leave out the types of flags and arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
            elif isinstance(parameter, TyperArgument):
                vars(parameter)["display_type_rich"] = _no_type

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        names = [
            str(parameter.metavar) if parameter.required or "[" in str(parameter.metavar) else f"[{parameter.metavar}]"
            for parameter in self.params
            if isinstance(parameter, TyperArgument)
        ]
        return ["[OPTIONS]", *names]


def _no_type(ctx: Any) -> None:
    """Show no type for an argument: the help describes it."""


def command(app: typer.Typer, name: str | None = None, *, example: str, **options: Any) -> Callable[[Any], Any]:
    """Register a command. A parameter whose type is a group of options is replaced by these options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, cls=Command, epilog=f"Example: [cyan]outboxio {example}[/]", **options)(spread(function))
        return function

    return register


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with one parameter per option in place of each group of options."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Options)}
    parameters = list[inspect.Parameter]()
    declared = inspect.signature(function).parameters.values()
    for parameter in sorted(
        declared, key=lambda parameter: groups.get(parameter.name) is Common
    ):  # listed last in the help
        if parameter.name in groups:
            parameters += _parameters_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @wraps(function)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            names = [field for field in group.__struct_fields__ if field in values]
            values[name] = group(**{field: values.pop(field) for field in names})
        function(**values)

    vars(call)["__signature__"] = inspect.Signature(sorted(parameters, key=_has_default))
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del vars(call)["__wrapped__"]  # or typer would read the original signature
    return call


def _parameters_of(group: type[Options]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in msgspec.structs.fields(group)
        if hasattr(hints[field.name], "__metadata__")
    ]


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY
