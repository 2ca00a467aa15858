"""One program for each client, run in its environment."""
