"""The gRPC edge of the frontend: servicer, conversion, status."""
