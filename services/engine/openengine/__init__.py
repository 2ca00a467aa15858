"""The OpenEngine protocol (openengine.v1) over the engine, by which NVIDIA Dynamo drives it."""
