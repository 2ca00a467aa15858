"""The vLLM gRPC protocol (vllm.grpc.engine.VllmEngine) over the engine."""
