"""What both services share to be observed: logs, health, metrics, traces, errors, the server."""
