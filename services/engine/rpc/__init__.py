"""The gRPC edge of the engine: servicer, conversion, status, session streams."""
