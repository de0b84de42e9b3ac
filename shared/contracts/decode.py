"""Decoding with errors that name the field, and what can still be read of a text that is not valid JSON."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from shared.errors import BadRequestError

_PATH = re.compile(r" - at `([^`]*)`$")
_NAMED = re.compile(r"(?:required|unknown) field `([^`]*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")

Some = TypeVar("Some")


def bad_request(error: msgspec.ValidationError, *, fallback: str | None = None) -> BadRequestError:
    """Msgspec's complaint as ours: `$.ranges[0][1]` becomes the dotted path `ranges.0.1`."""
    text = str(error)
    path = _PATH.search(text)
    steps = [name or index for name, index in _STEP.findall(path.group(1))] if path else []
    named = _NAMED.search(text)
    if named:
        steps.append(named.group(1))
    return BadRequestError(_PATH.sub("", text), field=".".join(steps) or fallback)


def decode(decoder: msgspec.json.Decoder[Some], text: bytes | str, *, fallback: str) -> Some:
    """Decode, or raise `BadRequestError`; ``fallback`` is the field to name when the text is no JSON at all."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise bad_request(error, fallback=fallback) from None
    except (msgspec.DecodeError, UnicodeError):
        raise BadRequestError("not valid JSON", field=fallback) from None
    except RecursionError:
        raise BadRequestError("nested too deeply", field=fallback) from None


# No part of it can fail once it has begun, so that nothing is tried twice and a walk is linear in the text: a string
# that does not end goes on to the end of the text.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]:,]|[^\s"{}\[\]:,]+', re.DOTALL)
_NAME = msgspec.json.Decoder(str)
_ANY = msgspec.json.Decoder(msgspec.Raw)

_DEEPER = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}

LOOK_BYTES = 8 * 1024
"""So far a text that is not valid JSON is looked at: whoever sends such texts must not cost more than a good one."""


def members(text: bytes, *, most: int = LOOK_BYTES) -> dict[str, bytes]:
    """The values of a JSON object's own names, cut out without looking into them.

    For a text that does not decode (NaN, 10,000 levels, half a surrogate): so that its `rid` can still be answered and
    the member at fault be named. Returns what it understood; `{}` for anything that is no object. Of a text of over
    ``most`` bytes only these are looked at, and the last value may be cut off (see `at_fault`).
    """
    found: dict[str, bytes] = {}
    depth, name, start, expects_name = 0, None, 0, False
    for token in _TOKEN.finditer(text, 0, most):
        word = token[0]
        if depth > 1:
            depth += _DEEPER.get(word, 0)
        elif depth == 0 and word != b"{":
            return {}
        elif word in (b"{", b"["):
            depth += 1
            expects_name = expects_name or depth == 1
        elif word in (b",", b"}"):
            if name is not None:
                found[name] = text[start : token.start()].strip()
            name, expects_name = None, True
            if word == b"}":
                return found
        elif word == b":":
            start = token.end()
        elif expects_name and word.startswith(b'"'):
            try:
                name = _NAME.decode(word)
            except (msgspec.MsgspecError, UnicodeError):
                return found
            expects_name, start = False, token.end()
        elif word == b"]":
            depth -= 1
    if name is not None and len(text) > most:
        found[name] = text[start:most].strip()
    return found


def at_fault(found: dict[str, bytes], *, cut: bool = False) -> str | None:
    """Which of the `members` is no JSON; ``cut``: the last one may lack its end, which is no fault of its own."""
    for at, (name, text) in enumerate(found.items(), start=1):
        if not is_json(text, cut=cut and at == len(found)):
            return name
    return None


def is_json(text: bytes, *, cut: bool = False) -> bool:
    """Whether it is one value; ``cut``: or the beginning of one."""
    try:
        # The beginning of a number need not be a number.
        _ANY.decode(text.rstrip(b"+-.0123456789eE") if cut else text)
    except msgspec.MsgspecError as error:
        return cut and "truncated" in str(error)
    except (UnicodeError, RecursionError):
        return False
    return True


def elements(text: bytes) -> list[bytes] | None:
    """The elements of a JSON array, cut out without looking into them: for a text that does not decode, as `members`.

    None if the brackets of the text are not those of one array.
    """
    found: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(text):
        word = token.group()
        if depth == 0 and (word != b"[" or found or start):
            return None
        if depth == 1 and word in (b",", b"]"):
            found.append(text[start : token.start()].strip())
            start = token.end()
        if word in (b"{", b"["):
            depth += 1
            start = token.end() if depth == 1 else start
        elif word in (b"}", b"]"):
            depth -= 1
    if depth != 0 or not start:
        return None
    return [] if found == [b""] else found
