"""The HTTP server: OpenAI's and Anthropic's shapes in front of one `Engine`. Layer 8.

Knows requests and `api`, nothing of what lies behind it. Needs the packages of the extra `serve`.
"""

from __future__ import annotations

from pyggml_dflash.extras import install_hint

try:
    import fastapi as _fastapi  # noqa: F401
    import prometheus_client as _prometheus_client  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"the server needs the package {error.name}; install what is missing with: {install_hint('serve')}",
        name=error.name,
    ) from error
