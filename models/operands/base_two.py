"""Softmax in base two: exp(x) is 2 ** (x * LOG2_E), and GPUs compute powers of two."""

import math

LOG2_E = math.log2(math.e)
