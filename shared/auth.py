"""Who a token speaks for (protocol §2)."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeGuard, cast, get_args

import aiohttp
import jwt

from shared.contracts.words import is_name
from shared.errors import UnauthenticatedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.settings import AuthSettings

Scope = Literal["user", "service", "admin", "gateway"]

LEEWAY_S = 10
MAX_TOKEN_ID = 256
_STORABLE = re.compile(r"[^\0\ud800-\udfff]*")
_ASYMMETRIC = ["RS256", "ES256", "EdDSA"]
_JWKS_TTL_S = 300.0
_SEEN_S = 300.0
_MOST_SEEN = 20_000
"""A token that was verified is not verified again for a while: services show the same one with each request."""

_JWKS_RETRY_S = 5.0
"""An unknown key id makes the set be read again, but not more often than this: anybody can name one."""


@dataclass(frozen=True, slots=True)
class Claims:
    """``subject``: a user id, or a service's name. ``expires_at``: seconds since the epoch, without the leeway.

    ``issued_at`` (seconds since the epoch) and ``token_id`` are the token's `iat` and `jti`, if it has them: it may be
    revoked by either.
    """

    subject: str
    scope: Scope
    device: str | None
    expires_at: float
    issued_at: float | None = None
    token_id: str | None = None


class Verifier:
    """Checks tokens against a shared secret, a JWK set, or both."""

    def __init__(self, settings: AuthSettings) -> None:
        self._secret = settings.auth_secret.get_secret_value() if settings.auth_secret else None
        self._jwks = settings.auth_jwks
        self._audience = settings.auth_audience
        self._issuer = settings.auth_issuer
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._seen: OrderedDict[str, tuple[Claims, float]] = OrderedDict()

    async def verify(self, token: str | None) -> Claims:
        """The claims of a token. Raises `UnauthenticatedError`; `UnavailableError` if no JWK set could be read."""
        if not token:
            raise UnauthenticatedError("a token is needed")
        claims, until = self._seen.get(token, (None, 0.0))
        if claims is None or time.time() >= until:
            claims = await self._verify(token)
            self._seen[token] = claims, min(time.time() + _SEEN_S, claims.expires_at + LEEWAY_S)
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        return claims

    async def _verify(self, token: str) -> Claims:
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            key: str | jwt.PyJWK
            if algorithm == "HS256" and self._secret is not None:
                key = self._secret
            elif algorithm in _ASYMMETRIC and self._jwks is not None:
                key = await self._key(header.get("kid"), str(algorithm))
            else:
                raise UnauthenticatedError("the token's algorithm is not accepted")
            claims = jwt.decode(
                token,
                key,
                algorithms=[str(algorithm)],
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_aud": self._audience is not None},
            )
        except jwt.ExpiredSignatureError:
            raise UnauthenticatedError("the token has expired") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
            raise UnauthenticatedError("the token is not valid") from None
        return _claims(claims)

    async def _key(self, kid: str | None, algorithm: str) -> jwt.PyJWK:
        age = time.monotonic() - self._read_at
        if age > _JWKS_TTL_S or (kid not in self._keys and age > _JWKS_RETRY_S):
            async with self._reading:
                if time.monotonic() - self._read_at >= age:
                    await self._read()
        key = self._keys.get(kid)
        if key is None and kid is None and len(self._keys) == 1:
            key = next(iter(self._keys.values()))
        if key is None or key.algorithm_name != algorithm:
            raise UnauthenticatedError("the token's key is not known")
        return key

    async def _read(self) -> None:
        source = self._jwks or ""
        try:
            if source.startswith(("http://", "https://")):
                timeout = aiohttp.ClientTimeout(total=5)
                async with aiohttp.ClientSession(timeout=timeout) as session, session.get(source) as answer:
                    answer.raise_for_status()
                    text = await answer.text()
            else:
                text = await asyncio.to_thread(Path(source).read_text, encoding="utf-8")
            read = jwt.PyJWKSet.from_dict(json.loads(text))
        except (OSError, TimeoutError, aiohttp.ClientError, ValueError, jwt.PyJWTError) as error:
            if not self._keys:
                raise UnavailableError("the set of keys cannot be read", retry_after_ms=1000) from error
        else:
            self._keys = {key.key_id: key for key in read.keys}
        self._read_at = time.monotonic()


def _claims(claims: Mapping[str, object]) -> Claims:
    subject, scope, device = claims.get("sub"), claims.get("scope", "user"), claims.get("device")
    if not is_name(subject):
        raise UnauthenticatedError("the token's sub is not a user id")
    if scope not in get_args(Scope):
        raise UnauthenticatedError("the token's scope is not known")
    if device is not None and not is_name(device):
        raise UnauthenticatedError("the token's device is not a device id")
    issued_at, token_id = claims.get("iat"), claims.get("jti")
    if token_id is not None and not _is_token_id(token_id):
        raise UnauthenticatedError(f"the token's jti is not a text of at most {MAX_TOKEN_ID} characters")
    return Claims(
        subject,
        cast("Scope", scope),
        device,
        float(cast("float", claims["exp"])),
        None if issued_at is None else float(cast("float", issued_at)),
        token_id,
    )


def _is_token_id(value: object) -> TypeGuard[str]:
    # What could not be stored could not be revoked: no NUL, no lone surrogate.
    return isinstance(value, str) and 0 < len(value) <= MAX_TOKEN_ID and _STORABLE.fullmatch(value) is not None


def mint(secret: str, subject: str, *, scope: Scope = "user", ttl_s: float = 3600, device: str | None = None) -> str:
    """An HS256 token: for local use, and for a service's calls to another."""
    now = time.time()
    claims: dict[str, object] = {
        "sub": subject,
        "scope": scope,
        "exp": int(now + ttl_s),
        "iat": round(now, 6),  # not whole seconds: what is issued just after a revocation counts as issued after it
        "jti": secrets.token_hex(16),
    }
    if device is not None:
        claims["device"] = device
    return jwt.encode(claims, secret, algorithm="HS256")


def bearer(header: str | None) -> str | None:
    """The token of an `Authorization` header, or None."""
    kind, _, token = (header or "").partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None
