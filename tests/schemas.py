"""JSON Schema as a function: what the AsyncAPI document's schemas use of draft 7, and nothing else.

`jsonschema` takes more than a millisecond for a frame, and the tests see a hundred thousand of them. That both judge
alike is tested.
"""

import re
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any] | bool
Check = Callable[[Any], None]
"""Raises `MismatchError` for a value that the schema does not allow."""

_SAYS_NOTHING = {"title", "description", "default", "format", "examples"}
_OF_OBJECTS = ("properties", "required", "additionalProperties")


class MismatchError(AssertionError):
    """A value is not what its schema says. ``path``: where, from the inside out."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = list(path)

    def __str__(self) -> str:
        return f"{'.'.join(str(step) for step in reversed(self.path)) or 'the whole'}: {self.args[0]}"


def pattern(text: str) -> re.Pattern[str]:
    """A schema's pattern as Python's: `$` is the very end, and digits are ASCII."""
    return re.compile(re.sub(r"\$$", r"\\Z", text), re.ASCII)


def is_type(value: Any, name: str) -> bool:
    """An integer is one that is written as such: 1.0 is none, since no reader of ours takes it."""
    match name:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string" | "boolean" | "array" | "object" | "null":
            kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
            return isinstance(value, kinds[name])
    raise NotImplementedError(f"type {name}")


def compiled(schema: Schema, named: dict[str, Schema]) -> Check:
    """The check of a schema; ``named`` are those that `#/components/schemas/…` refers to. None refers to itself."""
    if isinstance(schema, bool):
        return _anything if schema else _nothing
    rest = {name: given for name, given in schema.items() if name not in _SAYS_NOTHING}
    checks: list[Check] = []
    if "$ref" in rest:
        checks.append(compiled(named[rest.pop("$ref").removeprefix("#/components/schemas/")], named))
    of_object = {name: rest.pop(name) for name in _OF_OBJECTS if name in rest}
    if of_object:
        checks.append(_object(named, **of_object))
    if "items" in rest:
        checks.append(_array(named, rest.pop("items"), rest.pop("additionalItems", True)))
    for name, given in rest.items():
        if name in ("anyOf", "oneOf"):
            checks.append(_some([compiled(one, named) for one in given], exactly_one=name == "oneOf"))
        elif name in _KEYWORDS:
            checks.append(_KEYWORDS[name](given))
        else:
            raise NotImplementedError(f"keyword {name}")
    if len(checks) == 1:
        return checks[0]

    def all_of(value: Any) -> None:
        for check in checks:
            check(value)

    return all_of


def _anything(_value: Any) -> None:
    return


def _nothing(_value: Any) -> None:
    raise MismatchError("must not be there")


def _object(
    named: dict[str, Schema],
    properties: dict[str, Schema] | None = None,
    required: tuple[str, ...] = (),
    additionalProperties: Schema = True,  # noqa: N803 - the keyword's own name and default
) -> Check:
    known = {name: compiled(schema, named) for name, schema in (properties or {}).items()}
    further = compiled(additionalProperties, named)

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            return
        for name in required:
            if name not in value:
                raise MismatchError("is missing", name)
        for name, member in value.items():
            try:
                known.get(name, further)(member)
            except MismatchError as mismatch:
                mismatch.path.append(name)
                raise

    return check


def _array(named: dict[str, Schema], items: Schema | list[Schema], additional: Schema) -> Check:
    first = [compiled(one, named) for one in items] if isinstance(items, list) else []
    others = compiled(additional if isinstance(items, list) else items, named)

    def check(value: Any) -> None:
        if not isinstance(value, list):
            return
        for place, element in enumerate(value):
            try:
                (first[place] if place < len(first) else others)(element)
            except MismatchError as mismatch:
                mismatch.path.append(place)
                raise

    return check


def _some(options: list[Check], *, exactly_one: bool) -> Check:
    def check(value: Any) -> None:
        fits, why = 0, ""
        for option in options:
            try:
                option(value)
            except MismatchError as mismatch:
                why = str(mismatch)
                continue
            fits += 1
            if not exactly_one:
                return
        if fits != 1:
            raise MismatchError(f"{fits} of {len(options)} ways fit; the last: {why}")

    return check


def _keyword(holds: Callable[[Any, Any], bool], message: str) -> Callable[[Any], Check]:
    def made(given: Any) -> Check:
        def check(value: Any) -> None:
            if not holds(value, given):
                raise MismatchError(f"{value!r:.200} {message} {given!r:.200}")

        return check

    return made


def _matches(given: str) -> Check:
    search = pattern(given).search

    def check(value: Any) -> None:
        if isinstance(value, str) and search(value) is None:
            raise MismatchError(f"{value!r:.200} does not match {given}")

    return check


def _is_number(value: Any) -> bool:
    return is_type(value, "number")


_KEYWORDS: dict[str, Callable[[Any], Check]] = {
    "type": _keyword(is_type, "is no"),
    "const": _keyword(lambda value, given: type(value) is type(given) and value == given, "is not"),
    "enum": _keyword(lambda value, given: isinstance(value, str) and value in given, "is none of"),
    "minimum": _keyword(lambda value, given: not _is_number(value) or value >= given, "is below"),
    "maximum": _keyword(lambda value, given: not _is_number(value) or value <= given, "is above"),
    "minItems": _keyword(lambda value, given: not isinstance(value, list) or len(value) >= given, "has fewer than"),
    "maxItems": _keyword(lambda value, given: not isinstance(value, list) or len(value) <= given, "has more than"),
    "maxLength": _keyword(lambda value, given: not isinstance(value, str) or len(value) <= given, "is longer than"),
    "maxProperties": _keyword(lambda value, given: not isinstance(value, dict) or len(value) <= given, "has more than"),
    "pattern": _matches,
}
