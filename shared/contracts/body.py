"""A body: the client's own bytes, kept as they came, and what they mean (protocol §1)."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import BadRequestError, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEPTH = 64
MAX_BYTES = 64 * 1024

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = "\0"
"""Marks a number in a parsed body: no string can begin with it, since NUL is refused."""


@dataclass(frozen=True, slots=True)
class Body:
    """``text``: as received, without surrounding space. ``value``: parsed, with each number as its digits behind a NUL.

    ``canonical``: the same for two bodies that are the same JSON value: names sorted, no space, numbers by digits.
    """

    text: str
    value: dict[str, object]
    canonical: bytes

    def get_str(self, name: str) -> str | None:
        """A string member, None if it is missing; `BadRequestError` for null and every other type."""
        if name not in self.value:
            return None
        found = self.value[name]
        if not isinstance(found, str) or found.startswith(_NUMBER):
            raise BadRequestError("expected a string", field=f"body.{name}")
        return found


def parse(raw: bytes, *, max_bytes: int = MAX_BYTES) -> Body:
    """Check a body's bytes.

    Raises `TooLargeError` over ``max_bytes``, and `BadRequestError` for what is no JSON object or holds a name twice,
    a NUL, a lone surrogate, a number that is none (NaN), or more than 64 levels.
    """
    raw = raw.strip(b" \t\r\n")
    if len(raw) > max_bytes:
        raise TooLargeError(f"a body has at most {max_bytes} bytes", field="body")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise BadRequestError("not valid UTF-8", field="body") from None
    if not text.startswith("{"):
        raise BadRequestError("expected an object", field="body")
    if text.count("{") + text.count("[") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise BadRequestError(f"nested over {MAX_DEPTH} levels", field="body")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_number, parse_float=_number, parse_constant=_constant
        )
        if "\\u0000" in text and _has_nul(json.loads(text, parse_int=str, parse_float=str)):
            raise BadRequestError("holds a NUL", field="body")
        canonical = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise BadRequestError("holds a lone surrogate", field="body") from None
    except json.JSONDecodeError as error:
        raise BadRequestError(f"not valid JSON: {error.msg}", field="body") from None
    return Body(text, value, canonical)


def digest(key: bytes, type_: str, target_seq: int | None, body: Body | None) -> bytes:
    """What sameness of a repeated client id is judged by, 16 bytes. Keyed, so that nobody can guess an erased body."""
    keyed = hashlib.blake2b(key=key[:64], digest_size=16)
    keyed.update(f"{type_}\n{target_seq or ''}\n".encode())
    if body is not None:
        keyed.update(body.canonical)
    return keyed.digest()


def _number(digits: str) -> str:
    return _NUMBER + digits


def _constant(name: str) -> object:
    raise BadRequestError(f"{name} is not a JSON number", field="body")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise BadRequestError("a name is given twice", field="body")
    return made


def _depth(text: str) -> int:
    deepest = depth = 0
    for char in _STRING.sub("", text):
        if char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


def _has_nul(value: object) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return _any_nul(value) or _any_nul(value.values())
    return isinstance(value, list) and _any_nul(value)


def _any_nul(values: Iterable[object]) -> bool:
    return any(_has_nul(value) for value in values)
