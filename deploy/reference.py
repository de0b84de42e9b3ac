"""Writes docs/reference: settings, metrics, and the contracts as AsyncAPI and OpenAPI, all from the code itself.

`python -m deploy.reference` writes them; a test compares them with what is committed.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from prometheus_client import REGISTRY
from pydantic_settings import BaseSettings

import services
from deploy import asyncapi
from services.console import api as console
from services.ingest.api import Door, public_app
from shared.settings import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import ClientSession

    from shared.auth import Verifier
    from shared.postgres import Pool

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
SERVICES = ("ingest", "relay", "gateway", "receipts", "console")


def pages() -> dict[str, str]:
    """Every generated file by its name."""
    return {
        "settings.md": settings(),
        "metrics.md": metrics(),
        "asyncapi.json": _json(asyncapi.document()),
        # The routes are described and never called, so nothing has to stand behind the door.
        "openapi.json": _json(public_app(cast("Door", None)).openapi()),
        "openapi-console.json": _json(
            console.public_app(cast("Verifier", None), cast("ClientSession", None), {}, cast("Pool", None)).openapi()
        ),
    }


def settings() -> str:
    """The settings of each service as Markdown tables."""
    lines = ["# Settings", "", "Read from the environment once, at the start; a wrong value names the variable.", ""]
    for service in SERVICES:
        for model in _settings_of(service):
            is_own = model.__name__.lower() == f"{service}settings"
            title = f"## {service}" if is_own else f"### {(model.__doc__ or '').rstrip('.')}"
            lines += [title, "", *_table(model), ""]
    return "\n".join(lines)


def _table(model: type[BaseSettings]) -> Iterator[str]:
    yield "| variable | default | meaning |"
    yield "|---|---|---|"
    for name, field in sorted(model.model_fields.items()):
        if field.is_required():
            default = "required"
        elif field.default_factory is not None:
            default = "made at the start"
        else:
            default = "" if field.default is None else f"`{field.default}`"
        yield f"| `{PREFIX}{name.upper()}` | {default} | {field.description} |"


def metrics() -> str:
    """Every metric with its kind and meaning."""
    importlib.import_module("shared.metrics")
    for service in pkgutil.iter_modules(services.__path__):
        importlib.import_module(f"services.{service.name}.metrics")
    lines = ["# Metrics", "", "| metric | kind | meaning |", "|---|---|---|"]
    for family in sorted(REGISTRY.collect(), key=lambda family: family.name):
        if family.name.startswith("waybill_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join([*lines, ""])


def _settings_of(service: str) -> list[type[BaseSettings]]:
    """The service's own, then those of its commands."""
    module = importlib.import_module(f"services.{service}.settings")
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseSettings) and value.__module__ == module.__name__
    ]


def _json(document: dict[str, object]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
