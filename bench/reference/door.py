"""The reference behind the same kind of door as ingest: `POST /v1/events` on FastAPI, in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

import msgspec
from fastapi import FastAPI, Request, Response

from bench.reference.seed_outbox import Design, Message, SeedOutbox, Stored, opened
from shared.auth import Verifier, bearer
from shared.runtime import http, run
from shared.settings import AuthSettings, load

HOST = "127.0.0.1"


class _Sends(msgspec.Struct, frozen=True):
    events: list[Message]


_SENDS = msgspec.json.Decoder(_Sends)
_ENCODER = msgspec.json.Encoder()


def app(outbox: SeedOutbox, verifier: Verifier) -> FastAPI:
    """The door. The messages of a request are written side by side, as far as the pool allows; all are waited for."""
    made = FastAPI(openapi_url=None)

    @made.post("/v1/events")
    async def write(request: Request) -> Response:
        await verifier.verify(bearer(request.headers.get("authorization")))
        sends = _SENDS.decode(await request.body()).events
        stored = await asyncio.gather(*(outbox.send(message) for message in sends))
        results = {"results": [_result(one) for one in stored]}
        return Response(_ENCODER.encode(results), media_type="application/json")

    @made.get("/unsent")
    async def unsent() -> Response:
        return Response(_ENCODER.encode(await outbox.unsent()), media_type="application/json")

    return made


def _result(stored: Stored) -> dict[str, object]:
    return {"status": 200 if stored.duplicate else 201, "event": stored}


async def _serve(options: argparse.Namespace, verifier: Verifier, stop: asyncio.Event) -> None:
    design = Design(pool=options.pool, push=options.push, writing=options.writing)
    async with (
        opened(options.postgres, options.kafka, options.topic, design) as outbox,
        http(app(outbox, verifier), HOST, options.port),
    ):
        print("ready", flush=True)
        await stop.wait()


def main() -> None:
    """Entry of `python -m bench.reference.door`; says `ready` on standard output once it serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgres", required=True)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pool", type=int, required=True)
    parser.add_argument("--writing", choices=("statements", "at_once"), required=True)
    parser.add_argument("--push", action="store_true")
    options = parser.parse_args()
    verifier = Verifier(load(AuthSettings))
    run("bench-reference", "warning", partial(_serve, options, verifier))


if __name__ == "__main__":
    main()
