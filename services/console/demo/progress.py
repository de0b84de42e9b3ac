"""The bar that shows how far the demo is, on standard error."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.console.demo.play import Outcome, Play

_EVERY_S = 0.2


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something without a measure goes on."""
    with Console(stderr=True).status(what):
        yield


async def shown(play: Play) -> Outcome:
    """Play, with the bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        sent = progress.add_task("sent", total=play.messages)
        acked = progress.add_task("committed", total=play.messages)

        def update() -> None:
            progress.update(sent, completed=play.sent, description=f"sent ({play.doing})")
            progress.update(acked, completed=play.observer.acked)

        async def draw() -> None:
            while True:
                update()
                await asyncio.sleep(_EVERY_S)

        drawing = asyncio.create_task(draw())
        try:
            return await play.play()
        finally:
            drawing.cancel()
            update()
