"""The engine behind vllm.grpc.engine.VllmEngine, the protocol of a foreign gateway."""
