"""Starts a worker from a configuration: device, memory, kernels, graphs."""
