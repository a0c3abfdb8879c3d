"""``outboxio completion``: the script with which a shell completes the command."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Literal

import typer

VARIABLE = "_OUTBOXIO_COMPLETE"
"""The environment variable through which the script of a shell asks for completions."""

completion: Any = import_module("typer.completion")  # its types are not exported

Shell = Literal["bash", "zsh", "fish", "powershell"]


def script(shell: Shell) -> str:
    """The script of a shell."""
    return str(completion.get_completion_script(prog_name="outboxio", complete_var=VARIABLE, shell=shell))


def answer_shells() -> None:
    """Let the command answer a shell that completes. Nothing without a question of a shell."""
    if VARIABLE in os.environ:
        completion.completion_init()


def print_script(shell: Shell) -> None:
    typer.echo(script(shell))
