"""Ranks of an engine on another host: the program `octavo worker-node`."""
