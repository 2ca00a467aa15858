"""The wire under every API: sockets, bodies as bytes, headers, ids, statuses."""
