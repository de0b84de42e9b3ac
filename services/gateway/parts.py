"""What every connection of a gateway shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from services.gateway.acks import Acks
    from services.gateway.catchup import CatchUp
    from services.gateway.clock import Clock
    from services.gateway.connection import Connection
    from services.gateway.fanout import Fanout
    from services.gateway.group_receipts import SoFar
    from services.gateway.hello import Greeter
    from services.gateway.loading import Loader
    from services.gateway.sends import Sends
    from services.gateway.settings import GatewaySettings
    from services.gateway.social import Social
    from services.gateway.transitions import Transitions
    from shared.auth import Verifier
    from shared.postgres import Pool


@dataclass(frozen=True)
class Parts:
    """Made once.

    ``asking``: held by each read of Postgres that a client's frame asks for, so that they leave a share of the pool to
    catch-up, to those who come, and to readiness. ``spawn`` starts a task that the gateway owns.
    """

    settings: GatewaySettings
    pool: Pool
    verifier: Verifier
    fanout: Fanout
    catch_up: CatchUp
    asking: asyncio.Semaphore
    acks: Acks
    sends: Sends
    clock: Clock
    greeter: Greeter
    loader: Loader
    social: Social
    transitions: Transitions
    so_far: SoFar
    spawn: Callable[[Coroutine[None, None, None]], object]
    sessions: set[Connection]
