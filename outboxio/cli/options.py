"""Commands to paste: with the outbox that the operator has named, and with quotes where a shell needs quotes."""

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
_OWN_CODE = "module:outbox"  # in remedies that need the application's code


def remember(target: str | None, database: str | None, namespace: str | None) -> None:
    """Remember the words with which the command line has named the outbox. Further commands need the same words."""
    words = [] if target is None else [without_passwords(target)]
    words += [] if database is None else ["--database", without_passwords(database)]
    words += [] if namespace is None else ["--namespace", namespace]
    _where.set(tuple(words))


def pasted(name: str, *words: str) -> str:
    """A command for a shell: ``outboxio retry app.main:outbox --handler receipt``."""
    return shlex.join(["outboxio", name, *_where.get(), *words])


def with_outbox(told: str) -> str:
    """A command in words, such as the remedy of a finding, with the words that name the outbox."""
    words = told.split(" ", 2)
    where = _where.get()
    if len(words) < 2 or words[0] != "outboxio" or not where:
        return told
    if _OWN_CODE in told:
        is_code = ":" in where[0] and "://" not in where[0]
        return told.replace(_OWN_CODE, where[0]) if is_code else told
    return " ".join([words[0], words[1], shlex.join(where), *words[2:]])


# --- options that several commands share ----------------------------------------------------------
#
# Options that several commands share, each written once.
#
# A command takes a group of options as a parameter: ``def pause(common: Common, target: Target) -> None``. The
# decorator
# :func:`command` gives typer the options of the group one by one.


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
    """A group of options. A field that is annotated for typer is an option, with a default."""


class Common(Options, frozen=True):
    """The options of every command that works on an outbox."""

    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A database instead: [cyan]postgresql://host/name[/], [cyan]mysql://host/name[/], "
            "[cyan]mariadb://host/name[/] or [cyan]sqlite:///file.db[/]",
            show_default=False,
        ),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The namespace in that database. Default: $OUTBOXIO_NAMESPACE.",
                     show_default=False),
    ] = None  # fmt: skip
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")] = False

    def named(self, words: str | list[str] | None, most: int = 0) -> Named:
        """The outbox of the command line, with at most ``most`` further words. Needs no namespace."""
        words = [words] if isinstance(words, str) else words or []
        found = named(words, self.database, self.namespace)
        is_typed = self.database is None and bool(words) and found.target == words[0]
        remember(found.target if is_typed else None, self.database, self.namespace)
        if len(found.words) > most:
            raise TargetError(f"{found.words[most]!r} is one word too many")
        return found

    def of_namespace(self, words: str | list[str] | None, most: int = 0) -> Named:
        """The same, for a command that works on the rows of one namespace."""
        found = self.named(words, most)
        refuse_without_namespace(found)
        return replace(found, needs_rows=True)


class Command(TyperCommand):
    """A command with a usage line of plain words, and without types of switches and arguments in the help."""

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
        words = [
            str(parameter.metavar) if parameter.required or "[" in str(parameter.metavar) else f"[{parameter.metavar}]"
            for parameter in self.params
            if isinstance(parameter, TyperArgument)
        ]
        return ["[OPTIONS]", *words]


def _no_type(ctx: Any) -> None:
    """The type of an argument: none, because the help describes the argument."""


def command(app: typer.Typer, name: str | None = None, *, example: str, **options: Any) -> Callable[[Any], Any]:
    """Register a command. Each parameter whose type is a group of options becomes the options of the group."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, cls=Command, epilog=f"Example: [cyan]outboxio {example}[/]", **options)(spread(function))
        return function

    return register


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function with a parameter for each option, in place of a parameter for a group of options."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Options)}
    parameters = list[inspect.Parameter]()
    given = inspect.signature(function).parameters.values()
    for parameter in sorted(
        given, key=lambda parameter: groups.get(parameter.name) is Common
    ):  # the help ends with these
        if parameter.name in groups:
            parameters += _parameters_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @wraps(function)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            names = [field for field in group.__struct_fields__ if field in given]
            given[name] = group(**{field: given.pop(field) for field in names})
        function(**given)

    vars(call)["__signature__"] = inspect.Signature(sorted(parameters, key=_has_default))
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del vars(call)["__wrapped__"]  # typer would read the signature behind it
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
