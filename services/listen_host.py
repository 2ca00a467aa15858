"""The form of an address to listen on."""


def bracketed(host: str) -> str:
    """Returns an IPv6 address in brackets, as host:port has it; any other host as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
