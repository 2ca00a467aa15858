"""From a configuration to a worker that serves: device, memory, kernels, graphs."""
