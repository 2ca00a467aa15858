"""What both services share to be observed: logging, health, error interception, the server."""
