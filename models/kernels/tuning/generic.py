"""Tables of GPUs that none were measured on, and of all with --gpu-tables generic.

Kernels that run on any GPU have Hopper's tiles, which shrink at the launch until they fit shared
memory; none was timed on another card. Products of one and two tokens are torch's.
"""

from dataclasses import replace

from models.kernels.tuning import hopper

TABLES = replace(hopper.TABLES, vectors=(), fp8_vectors=())
