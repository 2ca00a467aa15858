"""Registers the operators that layers do not call, but a compiler's passes insert."""

import models.ops.elementwise.rms_norm
import models.ops.elementwise.rotary
import models.ops.elementwise.silu_and_mul
import models.ops.experts.shared_expert
import models.ops.products.adapted_linear
import models.ops.products.all_reduce_norm_linear
import models.ops.products.feed_forward
import models.ops.products.linear_residual
import models.ops.products.norm_linear
import models.ops.products.packed_residual
import models.ops.ranks.all_reduce_norm  # noqa: F401
