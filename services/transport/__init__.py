"""How bytes come in: TLS, connections, messages and calls within limits, health, the server."""
