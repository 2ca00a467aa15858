"""The gRPC edge: servicer, conversion, status."""
