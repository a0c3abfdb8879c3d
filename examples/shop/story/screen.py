"""Prints the steps of the story, and beside them what the processes of the shop print."""

import asyncio
import textwrap
import time

from rich.console import Console

WIDTH = 100
COLOURS = {"no answer": "yellow", "declined": "red", "killed": "red", "409": "yellow", "charged": "green"}


class Screen:
    def __init__(self) -> None:
        self._console = Console(highlight=False, width=WIDTH + 20)
        self._began = time.monotonic()
        self.lines: list[str] = []
        """What the processes have printed."""

    def title(self, headline: str, explanation: str) -> None:
        self._console.print(f"\n[bold]{headline}[/]\n[dim]{explanation}[/]")

    def step(self, number: int, headline: str, explanation: str = "") -> None:
        self._console.print(f"\n[bold cyan]{number}[/]  [bold]{headline}[/]")
        for line in textwrap.wrap(explanation, WIDTH - 3):
            self._console.print(f"   {line}", style="dim")
        self._console.print()

    def say(self, who: str, text: str) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(f"   [dim]{seconds:5.1f} s[/]  [cyan]{who:<7}[/]", end="")
        self._console.print(text, style=_colour(text), markup=False)

    def check(self, rule: str, holds: bool) -> bool:
        self._console.print(f"   {'[green]ok[/]' if holds else '[bold red]NO[/]'}  {rule}")
        return holds

    def note(self, text: str) -> None:
        self._console.print(f"       {text}", style="dim", markup=False)

    def end(self, text: str) -> None:
        self._console.print(f"\n{text}\n")

    async def relay(self, who: str, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.lines.append(line.decode().rstrip())
            self.say(who, self.lines[-1])


def _colour(text: str) -> str:
    return next((colour for word, colour in COLOURS.items() if word in text), "")
