"""Image files in URLs: data URLs, and https URLs of hosts that the operator names."""
