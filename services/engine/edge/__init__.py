"""Code that both gRPC protocols of the engine share."""
