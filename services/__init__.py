"""Octavo's services: the engine, the frontend, and what people run against them."""
