"""The load generator of `octavo bench serving`."""
