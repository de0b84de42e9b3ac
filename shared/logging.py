"""JSON logs on standard error, a line per entry. Names in use: `trace_id`, `conversation_id`, `event_id`."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(service: str, level: str) -> None:
    """Set logging up for this process; libraries' own records are written as JSON, too."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(LEVELS[level], logging.WARNING), force=True)


def trace_id(traceparent: str | None) -> str | None:
    """The trace id in a W3C `traceparent`."""
    return traceparent.split("-")[1] if traceparent else None


def logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose entries carry the module that wrote them."""
    made: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return made
