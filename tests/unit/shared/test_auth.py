"""Tokens: who is let in as whom, and who is not."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from pydantic import SecretStr

from shared import auth
from shared.auth import Claims, Verifier, bearer, mint
from shared.errors import UnauthenticatedError, UnavailableError
from shared.settings import AuthSettings

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "a secret of more than thirty-two bytes"


def settings(**fields: object) -> AuthSettings:
    defaults = {"auth_secret": SecretStr(SECRET), "auth_jwks": None, "auth_audience": None, "auth_issuer": None}
    return AuthSettings.model_construct(**{**defaults, **fields})


def token(**claims: object) -> str:
    now = int(time.time())
    return jwt.encode({"sub": "ann", "exp": now + 60, **claims}, SECRET, algorithm="HS256")


async def test_a_token_is_its_claims() -> None:
    now = int(time.time())
    claims = await Verifier(settings()).verify(mint(SECRET, "ann", ttl_s=60, device="phone"))
    assert (claims.subject, claims.scope, claims.device) == ("ann", "user", "phone")
    assert claims.expires_at == pytest.approx(now + 60, abs=2)
    assert (await Verifier(settings()).verify(token(scope="service"))).scope == "service"


@pytest.mark.promise("protocol.2.token")
@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "x",
        "a.b.c",
        jwt.encode({"sub": "ann", "exp": int(time.time()) + 60}, "", algorithm="none"),
        jwt.encode({"sub": "ann", "exp": int(time.time()) + 60}, SECRET + "!", algorithm="HS256"),
        jwt.encode({"sub": "ann", "exp": int(time.time()) + 60}, SECRET * 2, algorithm="HS512"),
        jwt.encode({"sub": "ann"}, SECRET, algorithm="HS256"),
        token(exp=int(time.time()) - auth.LEEWAY_S - 2),
        token(nbf=int(time.time()) + auth.LEEWAY_S + 60),
        token(iat=int(time.time()) + auth.LEEWAY_S + 60),
        token(exp="soon"),
        token(sub="ann bob"),
        token(sub="a" * 65),
        token(sub=""),
        token(scope="root"),
        token(scope=["user"]),
        token(device="my phone"),
    ],
    # Not the tokens: they hold the time, and processes that share a run have to find the same names.
    ids=itertools.count(),
)
async def test_what_is_refused(bad: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        await Verifier(settings()).verify(bad)


@pytest.mark.promise("protocol.2.token")
async def test_the_leeway_is_granted() -> None:
    late = token(exp=int(time.time()) - auth.LEEWAY_S + 3)
    assert (await Verifier(settings()).verify(late)).subject == "ann"


@pytest.mark.promise("protocol.2.token")
async def test_audience_and_issuer_are_held_where_they_are_set() -> None:
    strict = Verifier(settings(auth_audience="chat", auth_issuer="id"))
    assert (await strict.verify(token(aud=["other", "chat"], iss="id"))).subject == "ann"
    for wrong in ({}, {"aud": "chat"}, {"iss": "id"}, {"aud": "x", "iss": "id"}, {"aud": "chat", "iss": "x"}):
        with pytest.raises(UnauthenticatedError):
            await strict.verify(token(**wrong))
    assert (await Verifier(settings()).verify(token(aud="anything"))).subject == "ann"


def public(key: Any, kid: str, algorithm: str) -> dict[str, Any]:
    kinds = {
        "RS256": jwt.algorithms.RSAAlgorithm,
        "ES256": jwt.algorithms.ECAlgorithm,
        "EdDSA": jwt.algorithms.OKPAlgorithm,
    }
    return {**json.loads(kinds[algorithm].to_jwk(key.public_key())), "kid": kid, "alg": algorithm}


def signed(key: Any, kid: str | None, algorithm: str, sub: str = "ann") -> str:
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode({"sub": sub, "exp": int(time.time()) + 60}, key, algorithm=algorithm, headers=headers)


KEYS = {
    "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


@pytest.mark.promise("protocol.2.jwks")
@pytest.mark.parametrize("algorithm", KEYS)
async def test_a_set_of_keys_from_a_file(tmp_path: Path, algorithm: str) -> None:
    key = KEYS[algorithm]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [public(key, "one", algorithm)]}))
    verifier = Verifier(settings(auth_jwks=str(file)))
    assert await verifier.verify(signed(key, "one", algorithm)) == Claims(
        "ann", "user", None, pytest.approx(time.time() + 60, abs=2)
    )
    assert (await verifier.verify(signed(key, None, algorithm))).subject == "ann"
    with pytest.raises(UnauthenticatedError):
        await verifier.verify(signed(key, "two", algorithm))
    # A public key must not pass as the secret of an HS256 token.
    with pytest.raises(UnauthenticatedError):
        await Verifier(settings(auth_jwks=str(file), auth_secret=None)).verify(token())


@pytest.mark.promise("protocol.2.jwks")
async def test_keys_are_cached_and_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    served = {"keys": [public(old, "old", "ES256")]}
    asked = 0

    async def keys(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response(served)

    app = web.Application()
    app.router.add_get("/keys", keys)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        verifier = Verifier(settings(auth_jwks=f"http://127.0.0.1:{port}/keys"))
        for _ in range(3):
            await verifier.verify(signed(old, "old", "ES256"))
        assert asked == 1
        served["keys"] = [public(new, "new", "ES256")]
        with pytest.raises(UnauthenticatedError):  # an unknown id does not make the set be read at once again
            await verifier.verify(signed(new, "new", "ES256"))
        assert asked == 1
        monkeypatch.setattr(auth, "_JWKS_RETRY_S", 0.0)
        assert (await verifier.verify(signed(new, "new", "ES256"))).subject == "ann"
        assert asked == 2
    finally:
        await runner.cleanup()
    # The server is away now: what is known goes on, until a key is missing.
    assert (await verifier.verify(signed(new, "new", "ES256"))).subject == "ann"
    with pytest.raises(UnavailableError):
        await Verifier(settings(auth_jwks=f"http://127.0.0.1:{port}/keys")).verify(signed(new, "new", "ES256"))


async def test_a_token_that_was_verified_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier(settings())
    text = token(exp=int(time.time()) + 5)
    assert await verifier.verify(text) is await verifier.verify(text)
    now = time.time()
    monkeypatch.setattr(auth, "time", SimpleNamespace(time=lambda: now + 5 + auth.LEEWAY_S + 1))
    monkeypatch.setattr(auth.jwt, "decode", Mock(side_effect=jwt.ExpiredSignatureError))
    with pytest.raises(UnauthenticatedError):
        await verifier.verify(text)


async def test_few_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MOST_SEEN", 3)
    verifier = Verifier(settings())
    for n in range(10):
        await verifier.verify(token(sub=f"u{n}"))
    assert len(verifier._seen) == 3


def test_a_bearer_header() -> None:
    assert bearer("Bearer abc") == bearer("bearer  abc") == "abc"
    assert bearer(None) is bearer("") is bearer("Basic abc") is bearer("Bearer ") is None


async def test_what_a_token_may_be_revoked_by() -> None:
    before = time.time()
    minted = await Verifier(settings()).verify(mint(SECRET, "ann"))
    assert minted.issued_at is not None
    assert before - 1e-5 <= minted.issued_at <= time.time()
    other = await Verifier(settings()).verify(mint(SECRET, "ann"))
    assert minted.token_id is not None
    assert other.token_id not in (None, minted.token_id)
    bare = await Verifier(settings()).verify(token())
    assert (bare.issued_at, bare.token_id) == (None, None)
    told = await Verifier(settings()).verify(token(iat=12.5, jti="é" * auth.MAX_TOKEN_ID))
    assert (told.issued_at, told.token_id) == (12.5, "é" * auth.MAX_TOKEN_ID)


@pytest.mark.parametrize("jti", ["", "x" * (auth.MAX_TOKEN_ID + 1), "a\0b", "\ud800", 7])
async def test_a_token_that_could_not_be_revoked_is_refused(jti: object) -> None:
    with pytest.raises(UnauthenticatedError):
        await Verifier(settings()).verify(token(jti=jti))
