"""The OpenAPI description of the server, and a page that shows it."""

import html
import json
import re
from typing import Any

from pydantic.json_schema import models_json_schema

from headlong.server.api import ENDPOINTS, Endpoint
from headlong.version import __version__

WHERE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}
REFUSALS = {
    "400": "The body is not what this endpoint takes; the message says why.",
    "401": "The API key is missing or wrong.",
    "403": "The server was called by a name that it does not answer to.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too long.",
    "415": "The body is not JSON.",
    "429": "As many answers run or wait as may; ask again after Retry-After seconds.",
    "500": "Something broke inside the server.",
    "503": "The server is stopping.",
}


def description(name: str) -> dict[str, Any]:
    """Everything that `ENDPOINTS` says, as OpenAPI 3.1."""
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body]
    made, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=WHERE)
    references = {body: made[body, "validation"] for body in bodies}
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths[endpoint.described] = {endpoint.method.lower(): _operation(endpoint, references)}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Headlong: {name}", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(endpoint: Endpoint, references: dict[Any, Any]) -> dict[str, Any]:
    kinds = ["text/plain" if endpoint.text else "application/json", *["text/event-stream"] * endpoint.streams]
    refused = {"content": {"application/json": {"schema": {"$ref": WHERE.format(model="Error")}}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handler.__name__,
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {} for kind in kinds}},
            **{status: {"description": told, **refused} for status, told in REFUSALS.items()},
        },
    }
    if endpoint.body:
        content = {"application/json": {"schema": references[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    names = re.findall(r"{(\w+)", endpoint.path)
    if names:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if endpoint.path.startswith(("/v1", "/metrics")):
        operation["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return operation


def page(described: dict[str, Any]) -> str:
    """The description for people: a list of endpoints and the schemas of their bodies."""
    parts = [f"<h1>{html.escape(described['info']['title'])} {described['info']['version']}</h1>"]
    parts.append('<p>All of it as JSON: <a href="/openapi.json">/openapi.json</a></p>')
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                parts.append(_details(f"{body['$ref'].rpartition('/')[2]}", described))
    for name in described["components"]["schemas"]:
        parts.append(f'<div id="{html.escape(name)}">{_details(name, described)}</div>')
    return PAGE.format(title=html.escape(described["info"]["title"]), body="\n".join(parts))


def _details(name: str, described: dict[str, Any]) -> str:
    schema = json.dumps(described["components"]["schemas"][name], indent=2, ensure_ascii=False)
    return f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(schema)}</pre></details>"


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ overflow-x: auto; font-size: 0.85rem; }}
</style>
{body}
</html>
"""
