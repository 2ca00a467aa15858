"""Tests of helper processes run on the services' own event loop too."""

import asyncio

import uvloop


def pytest_asyncio_loop_factories(config, item):
    """uvloop's pipes fail in ways that asyncio's do not."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
