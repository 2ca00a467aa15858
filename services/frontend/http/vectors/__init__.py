"""Embeddings in OpenAI's form, rankings in Jina's and Cohere's, scores in vLLM's."""
