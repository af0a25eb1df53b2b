"""The application: routes, what guards them, and the OpenAPI document. Layer 8."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from pyggml_dflash import __version__
from pyggml_dflash.api import Engine
from pyggml_dflash.serve import problems
from pyggml_dflash.serve.admin import admin_routes
from pyggml_dflash.serve.chat import chat_routes
from pyggml_dflash.serve.completions import completion_routes
from pyggml_dflash.serve.guard import Guard
from pyggml_dflash.serve.messages import message_routes
from pyggml_dflash.serve.page import page_routes
from pyggml_dflash.serve.reports import report_routes
from pyggml_dflash.serve.responses import response_routes
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.settings import ServeOptions
from pyggml_dflash.serve.text_routes import text_routes

ROUTES: Final = (
    chat_routes,
    completion_routes,
    response_routes,
    message_routes,
    text_routes,
    report_routes,
    admin_routes,
    page_routes,
)


def create_app(engine: Engine, options: ServeOptions | None = None) -> FastAPI:
    """An ASGI application in front of an engine, which stays the caller's to close."""
    service = Service(ServeOptions() if options is None else options)
    service.open(engine)
    return app_of(service)


def app_of(service: Service) -> FastAPI:
    """The application of a service whose engine may come later."""
    app = FastAPI(
        title="pyggml_dflash",
        version=__version__,
        summary="GGUF language models behind OpenAI's and Anthropic's HTTP interfaces.",
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
    )
    problems.install(app)
    for routes in ROUTES:
        app.include_router(routes(service))
    options = service.options
    app.add_middleware(Guard, options=options, metrics=service.metrics)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
