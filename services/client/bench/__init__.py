"""The load generator behind `octavo bench serving`."""
