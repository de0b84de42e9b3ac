"""The description of the API. Bodies are decoded by msgspec, so FastAPI has to be told of their models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi

from services.ingest import schemas

if TYPE_CHECKING:
    from fastapi import FastAPI
    from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """What a route adds to its description for a JSON body of this model."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Make the app's OpenAPI document complete: request bodies, bearer tokens, problem JSON."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = made.setdefault("components", {})
            named = components.setdefault("schemas", {})
            for model in (schemas.Sends, schemas.Create, schemas.Settings):
                schema = model.model_json_schema(ref_template=_REF)
                named.update(schema.pop("$defs", {}))
                named[model.__name__] = schema
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
            made["security"] = [{"bearer": []}]
            for path in made["paths"].values():
                for operation in path.values():
                    problem = operation["responses"]["default"]["content"]
                    problem["application/problem+json"] = problem.pop("application/json")
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to extend the document
