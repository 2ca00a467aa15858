"""Steps of layers with a recurrent state, and what loops over tokens in float64 make of them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.nn.functional import silu, softplus

from models.forward_context import AttentionMetadata
from models.kernels.recurrence.causal_conv import causal_conv
from models.kernels.recurrence.decayed_linear_attention import decayed_linear_attention
from models.kernels.recurrence.gated_delta_rule import gated_delta_rule
from models.kernels.recurrence.state_space import state_space
from models.state_cache import (
    StateCacheData,
    StateSpec,
    pages_after,
    read_conv,
    read_recurrent,
    write_conv,
    write_recurrent,
)
from tests.support.tolerances import assert_rows_close


@dataclass(frozen=True, kw_only=True)
class Step:
    """Requests of a step and their states, which are among other requests' blocks.

    most: of each request's query tokens that exact results are of; None: all.
    """

    cache: StateCacheData
    metadata: AttentionMetadata
    most: int | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First token of each request, and the end of its tokens."""
        spans = pairwise(self.metadata.query_start_loc.tolist())
        return [
            (start, end if self.most is None else min(end, start + self.most))
            for start, end in spans
        ]

    @property
    def num_tokens(self) -> int:
        return int(self.metadata.query_start_loc[-1])

    @property
    def lengths(self) -> torch.Tensor:
        """Query tokens of each request."""
        return self.metadata.query_start_loc.diff()

    def pages_after(self, counts) -> torch.Tensor:
        """Returns the pages of the states after as many of each request's query tokens."""
        starts = (self.metadata.seq_lens - self.lengths).clamp(min=0)
        return pages_after(self.cache, self.metadata.block_tables, starts.long() + counts)

    def recurrent(self) -> torch.Tensor:
        """Returns the states that the step begins with, in float64; zeros for new requests."""
        return self._of_old(read_recurrent(self.cache, self.pages_after(0)))

    def conv(self) -> torch.Tensor:
        """Returns the inputs that the step begins with, in float64."""
        return self._of_old(read_conv(self.cache, self.pages_after(0)))

    def kept(self):
        """Yields counts of query tokens and the requests that keep the state after as many."""
        yield self.lengths, self.lengths > 0
        if self.cache.num_slots > 1:
            for count in range(1, self.cache.num_slots):
                is_kept = (count < self.lengths) & (self.lengths <= self.cache.num_slots)
                yield torch.full_like(self.lengths, count), is_kept

    def _of_old(self, values: torch.Tensor) -> torch.Tensor:
        lengths = self.metadata.query_start_loc.diff()
        is_new = (self.metadata.seq_lens == lengths) & (lengths > 0)
        shape = (-1, *[1] * (values.dim() - 1))
        return values.double().masked_fill(is_new.view(shape), 0.0)

    def others(self) -> torch.Tensor:
        """Returns the cache's bytes, less the null block and the states that the step keeps."""
        cache = replace(self.cache, memory=self.cache.memory.clone())
        for counts, is_kept in self.kept():
            pages = self.pages_after(counts)[is_kept]
            write_recurrent(cache, pages, torch.zeros_like(read_recurrent(cache, pages)))
            write_conv(cache, pages, torch.zeros_like(read_conv(cache, pages)))
        return cache.memory[:, 1:]


def make_step(
    query_lens, spec, *, unit_bytes=None, regions=2, device="cpu", new=(0, 3), seed=0,
    num_dummies=0, num_slots=1,
):  # fmt: skip
    """Draws states, which are of requests by numbers of tokens; all other bytes are NaNs.

    new: requests without computed tokens. num_dummies: requests of one token, in the null block.
    num_slots: states of a request.
    """
    generator = torch.Generator(device).manual_seed(seed)
    unit_bytes = unit_bytes or 5 * max(spec.row_bytes, 64)
    num_requests = len(query_lens)
    # Drawn first: equal for any number of slots.
    states = (spec.num_heads, spec.head_rows, spec.head_columns)
    inputs = (spec.conv_width - 1, spec.conv_channels)
    recurrent = torch.randn(num_requests, *states, generator=generator, device=device)
    conv = torch.randn(num_requests, *inputs, generator=generator, device=device)
    num_pages = -(-spec.num_units(unit_bytes) // regions)
    num_blocks = 2 + num_requests * num_slots * num_pages
    memory = torch.full((regions, num_blocks, unit_bytes), 255, dtype=torch.uint8, device=device)
    memory[:, 0] = 0
    cache = StateCacheData(memory=memory, spec=spec, num_slots=num_slots)
    order = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    pages = order[: num_blocks - 2].view(num_requests, num_slots, num_pages).int()
    # Tables are wider than states.
    shape = (num_requests + num_dummies, num_slots, num_pages + 3)
    tables = torch.zeros(shape, device=device).int()
    tables[:num_requests, :, :num_pages] = pages
    tables = tables.flatten(1)
    lengths = torch.tensor([*query_lens, *[1] * num_dummies], device=device)
    seq_lens = lengths + 7
    for request in new:
        if request < num_requests and query_lens[request]:
            seq_lens[request] = query_lens[request]
            recurrent[request] = conv[request] = torch.nan
    first = pages_after(cache, tables, (seq_lens - lengths).long())[:num_requests]
    write_recurrent(cache, first, recurrent.to(spec.dtype))
    write_conv(cache, first, conv.to(spec.conv_dtype))
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    metadata = AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=seq_lens.int(),
        row_ids=torch.arange(len(lengths), device=device).int(),
        block_tables=tables,
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        groups=(),
        max_seqlen_q=max(1, *query_lens),
        max_seqlen_k=int(seq_lens.max()),
    )
    return Step(cache=cache, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ConvCase:
    """A step of a causal convolution."""

    step: Step
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    activates: bool

    def run(self) -> torch.Tensor:
        return run_into_new(self, self.x, self.x.shape)

    def run_into(self, output: torch.Tensor) -> None:
        causal_conv(
            self.x, self.weight, self.bias, output, self.step.cache, self.step.metadata,
            activates=self.activates,
        )  # fmt: skip

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the inputs kept after the step."""
        kept, weight = self.step.conv(), self.weight.double()
        outputs = []
        for request, (start, end) in enumerate(self.step.spans):
            for token in range(start, end):
                window = torch.cat((kept[request], self.x[token : token + 1].double()))
                outputs.append((window * weight.T).sum(0))
                kept[request] = window[1:]
        output = torch.stack(outputs)
        if self.bias is not None:
            output += self.bias.double()
        return silu(output) if self.activates else output, kept


def make_conv_case(
    step, *, dtype=torch.float32, has_bias=True, activates=True, num_padding=0, seed=1
):
    spec, device = step.cache.spec, step.cache.memory.device
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    channels = spec.conv_channels
    return ConvCase(
        step=step,
        x=draw(step.num_tokens + num_padding, channels + 8)[:, :channels],
        weight=draw(channels, spec.conv_width),
        bias=draw(channels) if has_bias else None,
        activates=activates,
    )


@dataclass(frozen=True, kw_only=True)
class DeltaCase:
    """A step of the gated delta rule."""

    step: Step
    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    num_k_heads: int
    beta_scale: float = 1.0
    decay_floor: float = 0.0

    def run(self) -> torch.Tensor:
        spec = self.step.cache.spec
        return run_into_new(self, self.qkv, (len(self.qkv), spec.num_heads, spec.head_columns))

    def run_into(self, output: torch.Tensor) -> None:
        gated_delta_rule(
            self.qkv, self.a, self.b, self.a_log, self.dt_bias, output, self.step.cache,
            self.step.metadata, num_k_heads=self.num_k_heads,
            head_k_dim=self.step.cache.spec.head_rows, beta_scale=self.beta_scale,
            decay_floor=self.decay_floor,
        )  # fmt: skip

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the states after the step."""
        spec, states = self.step.cache.spec, self.step.recurrent()
        dim, heads = spec.head_rows, spec.num_heads
        keys = self.num_k_heads * dim
        qkv = self.qkv.double()
        repeats = heads // self.num_k_heads
        q, k = (
            x.unflatten(1, (-1, dim)).repeat_interleave(repeats, 1)
            for x in (qkv[:, :keys], qkv[:, keys : 2 * keys])
        )
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * dim**-0.5
        v = qkv[:, 2 * keys :].unflatten(1, (heads, -1))
        a = self.a.double().reshape(len(qkv), heads, -1)
        a, rate = a + self.dt_bias.double().view(heads, -1), self.a_log.double().exp()[:, None]
        if self.decay_floor:
            decay = (self.decay_floor * (rate * a).sigmoid()).exp()
        else:
            decay = (-rate * softplus(a)).exp()
        beta = self.b.double().sigmoid() * self.beta_scale
        output = torch.zeros_like(v)
        for request, (start, end) in enumerate(self.step.spans):
            state = states[request]
            for t in range(start, end):
                state = state * decay[t, :, :, None]
                error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
                state = state + k[t, :, :, None] * (beta[t, :, None] * error)[:, None]
                output[t] = torch.einsum("hk,hkv->hv", q[t], state)
            states[request] = state
        return output[: self.step.num_tokens], states


def state_spec(num_heads, rows, columns, dtype=torch.float32):
    """Returns a recurrent state, with some inputs of a convolution after it."""
    return StateSpec(
        num_heads=num_heads, head_rows=rows, head_columns=columns, dtype=dtype,
        conv_channels=5, conv_width=4,
    )  # fmt: skip


def make_delta_case(
    step,
    num_k_heads,
    *,
    dtype=torch.float32,
    decays_channels=False,
    num_padding=0,
    seed=1,
    **options,
):
    spec, device = step.cache.spec, step.cache.memory.device
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    heads, dim = spec.num_heads, spec.head_rows
    num_tokens = step.num_tokens + num_padding
    width = 2 * num_k_heads * dim + heads * spec.head_columns
    num_gates = heads * dim if decays_channels else heads
    a = draw(num_tokens, num_gates + 4).to(dtype)[:, :num_gates]
    return DeltaCase(
        step=step,
        qkv=draw(num_tokens, width + 8).to(dtype)[:, :width],
        a=a.unflatten(1, (heads, dim)) if decays_channels else a,
        b=draw(num_tokens, heads + 2).to(dtype)[:, :heads],
        a_log=torch.rand(heads, generator=generator, device=device) * 3 - 2,
        dt_bias=draw(num_gates) - 1.5,
        num_k_heads=num_k_heads,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class SpaceCase:
    """A step of a state-space rule."""

    step: Step
    xbc: torch.Tensor
    dt: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    num_groups: int
    dt_limits: tuple[float, float] = (0.001, 3.0)

    def run(self) -> torch.Tensor:
        spec = self.step.cache.spec
        return run_into_new(self, self.xbc, (len(self.xbc), spec.num_heads, spec.head_rows))

    def run_into(self, output: torch.Tensor) -> None:
        state_space(
            self.xbc, self.dt, self.a_log, self.dt_bias, self.d, output, self.step.cache,
            self.step.metadata, num_groups=self.num_groups,
            state_size=self.step.cache.spec.head_columns, dt_limits=self.dt_limits,
        )  # fmt: skip

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the states after the step."""
        spec, groups = self.step.cache.spec, self.num_groups
        heads, size = spec.num_heads, groups * spec.head_columns
        x, b, c = self.xbc.double().split((heads * spec.head_rows, size, size), dim=1)
        x = x.unflatten(1, (heads, -1))
        b, c = (
            each.unflatten(1, (groups, -1)).repeat_interleave(heads // groups, 1) for each in (b, c)
        )
        dt = softplus(self.dt.double() + self.dt_bias.double()).clamp(*self.dt_limits)
        decay = (dt * -self.a_log.double().exp()).exp()
        output, states = decayed(self.step, c, b, x * dt[..., None], decay, transposes=True)
        output += (x * self.d.double()[:, None])[: len(output)]
        return output, states


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """A step of decayed linear attention."""

    step: Step
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    scale: float = 0.3

    def run(self) -> torch.Tensor:
        return run_into_new(self, self.v, self.v.shape)

    def run_into(self, output: torch.Tensor) -> None:
        decayed_linear_attention(
            self.q, self.k, self.v, self.slopes, output, self.step.cache, self.step.metadata,
            scale=self.scale,
        )  # fmt: skip

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the states after the step."""
        decay = (-self.slopes.double()).exp().expand(len(self.q), -1)
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        output, states = decayed(self.step, q, k, v, decay)
        return output * self.scale, states


def decayed(step, q, k, v, decay, *, transposes=False):
    """Returns the outputs of decayed states that take up products, and the states."""
    states = step.recurrent()
    output = torch.zeros_like(v)
    for request, (start, end) in enumerate(step.spans):
        state = states[request].mT if transposes else states[request]
        for t in range(start, end):
            state = state * decay[t, :, None, None] + k[t, :, :, None] * v[t, :, None]
            output[t] = torch.einsum("hk,hkv->hv", q[t], state)
        states[request] = state.mT if transposes else state
    return output[: step.num_tokens], states


def make_space_case(step, num_groups, *, dtype=torch.float32, num_padding=0, seed=1):
    spec, device = step.cache.spec, step.cache.memory.device
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    heads, num_tokens = spec.num_heads, step.num_tokens + num_padding
    width = heads * spec.head_rows + 2 * num_groups * spec.head_columns
    return SpaceCase(
        step=step,
        xbc=draw(num_tokens, width + 8).to(dtype)[:, :width],
        dt=draw(num_tokens, heads + 2).to(dtype)[:, :heads],
        a_log=torch.rand(heads, generator=generator, device=device) * 3 - 2,
        dt_bias=draw(heads) - 1.5,
        d=draw(heads),
        num_groups=num_groups,
    )


def make_linear_case(step, *, dtype=torch.float32, num_padding=0, seed=1):
    spec, device = step.cache.spec, step.cache.memory.device
    generator = torch.Generator(device).manual_seed(seed)
    heads, num_tokens = spec.num_heads, step.num_tokens + num_padding
    shape = (num_tokens, 3 * heads, spec.head_rows)
    q, k, v = torch.randn(shape, generator=generator, device=device).to(dtype).split(heads, dim=1)
    slopes = 0.5 ** torch.arange(1, heads + 1, device=device).float()
    return LinearCase(step=step, q=q, k=k, v=v, slopes=slopes)


def run_into_new(case, x, shape):
    """Runs a case; returns its output, which has the dtype of x."""
    output = x.new_full(shape, torch.nan)
    case.run_into(output)
    return output


def check(case, *, tolerance=None, state_tolerance=None) -> torch.Tensor:
    """Compares a case's output and states with the exact ones; returns the output."""
    exact, _ = case.exact()
    step = case.step
    expected = []
    for counts, is_kept in step.kept():
        part = replace(case, step=replace(step, most=int(counts.max())))
        expected.append((counts, is_kept, part.exact()[1]))
    others = step.others()
    output = case.run()
    lengths, owned = step.lengths, step.metadata.block_tables[:, 0] > 0
    # Dummy requests share a state.
    is_real = owned.repeat_interleave(lengths)
    assert_rows_close(output[: len(exact)][is_real], exact[is_real], tolerance)
    read = read_conv if isinstance(case, ConvCase) else read_recurrent
    for counts, is_kept, exact_states in expected:
        states, is_kept = read(step.cache, step.pages_after(counts)), is_kept & owned
        if is_kept.any():
            assert_rows_close(states[is_kept], exact_states[is_kept], state_tolerance)
    assert torch.equal(step.others(), others)
    return output
