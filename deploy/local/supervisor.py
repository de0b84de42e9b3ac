"""Keeps parts running: one that dies is started again, at the same address, until all are stopped."""

import asyncio
from collections.abc import Callable, Sequence

from deploy.local.parts import Part
from deploy.local.process import StartError
from shared.clock import Backoff

_POLL_SECONDS = 0.05
_BASE_SECONDS = 0.2
_CAP_SECONDS = 5.0


class Supervisor:
    """Parts in the order in which they are to be stopped; stores among them are watched, but the stack stops them.

    `changed` is called whenever a part got another process id, `told` with a line for people whenever one died or could
    not be started again.
    """

    def __init__(self, parts: Sequence[Part], *, changed: Callable[[], None], told: Callable[[str], None]) -> None:
        self._parts = parts
        self._changed = changed
        self._told = told

    async def start(self) -> None:
        """Start the parts that do not run yet, side by side, and wait until all of them serve.

        Raises `StartError` of the first that does not; those that run then are still to be stopped.
        """
        parts = [part for part in self._parts if not part.alive()]
        for part in parts:
            await part.start()
            self._changed()
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(part.ready())
        except* StartError as errors:
            raise errors.exceptions[0] from None

    async def keep(self) -> None:
        """Start each part again that dies, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for part in self._parts:
                group.create_task(self._keep(part), name=f"keep-{part.name}")

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop the parts in order, each within its own bound; `hurry` makes it kill what is left."""
        hurried = asyncio.create_task(hurry.wait())
        try:
            for part in self._parts:
                stopping = asyncio.create_task(part.stop())
                await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
                if hurried.done():
                    part.kill()
                await stopping
        finally:
            hurried.cancel()

    async def _keep(self, part: Part) -> None:
        backoff = Backoff(_BASE_SECONDS, _CAP_SECONDS)
        while True:
            while part.alive():  # noqa: ASYNC110 - the end of a process sets no event
                await asyncio.sleep(_POLL_SECONDS)
            self._told(f"{part.name} (process {part.pid}) ended; it is started again")
            try:
                await part.start()
                self._changed()
                await part.ready()
            except StartError as error:
                self._told(str(error))
                # Without a delay at first: who watches how long a recovery takes should not watch us wait.
                await asyncio.sleep(backoff.next())
            else:
                backoff.reset()
                self._told(f"{part.name} serves again as process {part.pid}")
