"""The page at the root of the HTTP API, for people who open it in a browser."""

import base64
import hashlib
import html

from starlette.responses import HTMLResponse

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:3rem auto;max-width:44rem;padding:0 1rem}"
    "code{background:#8883;padding:0 .2em}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
)
_CALLED = (
    ("POST /v1/chat/completions", "answers a conversation"),
    ("POST /v1/completions", "continues a prompt"),
    ("POST /v1/responses", "answers items with items"),
    ("POST /v1/messages", "answers a conversation in Anthropic's form"),
    ("POST /tokenize, /detokenize", "converts between text and token ids"),
)
_LINKS = (
    ("/v1/models", "the model that is served"),
    ("/openapi.json", "all endpoints, fields and answers, as an OpenAPI document"),
    ("/health", "whether requests are taken"),
    ("/metrics", "figures for Prometheus"),
    ("/version", "the version"),
)


def start_page(*, model: str | None, version: str | None) -> HTMLResponse:
    """Returns the page; it names neither model nor version that is None."""
    named = "" if model is None else f" with the model <code>{html.escape(model)}</code>"
    numbered = "" if version is None else f" {html.escape(version)}"
    called = "".join(
        f"<tr><td><code>{html.escape(call)}</code></td><td>{html.escape(meaning)}</td></tr>"
        for call, meaning in _CALLED
    )
    links = "".join(
        f'<tr><td><a href="{path}">{path}</a></td><td>{html.escape(meaning)}</td></tr>'
        for path, meaning in _LINKS
    )
    return HTMLResponse(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Octavo</title>'
        f"<style>{_STYLE}</style></head><body><h1>Octavo{numbered}</h1>"
        f"<p>This server runs a language model. It answers programs{named}, in the forms of"
        " OpenAI's and Anthropic's APIs: give a client this page's address, followed by"
        " <code>/v1</code> for OpenAI's, as its base URL.</p>"
        f"<h2>For programs</h2><table>{called}</table>"
        f"<h2>To look at</h2><table>{links}</table></body></html>",
        headers=_headers(),
    )


def _headers() -> dict[str, str]:
    """Returns headers that keep a browser from everything that the page does not need."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cache-control": "no-store",
    }
