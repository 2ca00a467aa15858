"""What both protocols of the engine share: requests in, output and statuses out."""
