"""The state of every service, as each one's own `/readyz` tells it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import aiohttp
from pydantic import BaseModel, Field, ValidationError

from services.console.metrics import LOOKS

if TYPE_CHECKING:
    from collections.abc import Mapping

ASK_S = 3.0
"""Longer than a service takes to answer with a check that timed out."""

Status = Literal["ok", "failing", "away"]


class ServiceHealth(BaseModel):
    """`away`: no answer that can be read; `failing` names what does not work and why."""

    status: Status
    failing: dict[str, str] = Field(default_factory=dict)


class Health(BaseModel):
    """`ok` if every service is."""

    status: Literal["ok", "failing"]
    services: dict[str, ServiceHealth]


async def look(session: aiohttp.ClientSession, services: Mapping[str, str]) -> Health:
    """Ask all at once; ``services`` are private base addresses by name. Takes at most `ASK_S` seconds."""
    answers = await asyncio.gather(*(_ask(session, url) for url in services.values()))
    found = dict(zip(services, answers, strict=True))
    for answer in answers:
        LOOKS.labels(answer.status).inc()
    all_ok = all(answer.status == "ok" for answer in answers)
    return Health(status="ok" if all_ok else "failing", services=found)


async def _ask(session: aiohttp.ClientSession, url: str) -> ServiceHealth:
    try:
        async with asyncio.timeout(ASK_S), session.get(f"{url.rstrip('/')}/readyz") as answer:
            said = ServiceHealth.model_validate_json(await answer.read())
    except ValidationError:
        return ServiceHealth(status="away", failing={"answer": "not that of a Waybill service"})
    except (aiohttp.ClientError, TimeoutError) as error:
        return ServiceHealth(status="away", failing={"answer": type(error).__name__})
    return said
