"""Registers the operators that layers do not call, but a compiler's passes insert."""

import models.ops.communication.all_reduce_norm
import models.ops.elementwise.rms_norm
import models.ops.elementwise.rotary
import models.ops.elementwise.silu_and_mul
import models.ops.linear.all_reduce_norm_linear
import models.ops.linear.feed_forward
import models.ops.linear.linear_residual
import models.ops.linear.norm_linear
import models.ops.linear.packed_residual
import models.ops.moe.shared_expert  # noqa: F401
