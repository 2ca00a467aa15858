"""How kernels are built and launched."""
