"""Building blocks of the model files, tensor-parallel aware."""
