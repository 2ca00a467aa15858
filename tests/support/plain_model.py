"""A model written with torch's functions and transformers' conventions, without our operators."""

import torch
from torch import nn
from torch.nn import functional

from models.compile_support import support_torch_compile
from models.kv_cache import KVCacheSpec
from models.layers.attention import Attention

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER, VOCAB, NUM_LAYERS = 32, 4, 2, 8, 24, 50, 3
EPS = 1e-5


def functional_norm(x, weight):
    return functional.rms_norm(x, weight.shape, weight, EPS)


def transformers_norm(x, weight):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + EPS)).to(dtype)


def llama_norm(x, weight):
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return (x.float() * scale).type_as(x) * weight


def float32_norm(x, weight):
    squares = torch.mean(torch.square(x.float()), dim=-1, keepdim=True)
    return (weight.float() * (x.float() / torch.sqrt(EPS + squares))).to(x.dtype)


def chunk_gate(x):
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def split_gate(x):
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return up * (gate * gate.sigmoid())


def slice_gate(x):
    return functional.silu(x[..., :INNER]) * x[..., INNER:]


def in_place(residual, x):
    residual += x
    return residual


NORMS = (functional_norm, transformers_norm, llama_norm, float32_norm)
GATES = (chunk_gate, split_gate, slice_gate)
SUMS = (lambda residual, x: residual + x, lambda residual, x: x + residual, torch.add, in_place)


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, (k * cos) + (rotate_half(k) * sin)


class PlainLayer(nn.Module):
    """Attention and feed-forward, every operation a call of its own."""

    def __init__(self, index, norm, gate, add, has_head_norms, bias):
        super().__init__()
        self.norm, self.gate, self.add = norm, gate, add
        self.attn = Attention(index)
        sizes = [(NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, 2 * INNER]
        self.qkv = nn.Linear(HIDDEN, sizes[0], bias=bias)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=bias)
        self.gate_up = nn.Linear(HIDDEN, sizes[1], bias=bias)
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(HIDDEN) + 0.5) for _ in range(2))
        self.head_norms = nn.ParameterList(
            nn.Parameter(torch.rand(HEAD_DIM) + 0.5) for _ in range(2 * has_head_norms)
        )

    def forward(self, x, cos, sin):
        x = self.add(x, self.attend(self.norm(x, self.norms[0]), cos, sin))
        return self.add(x, self.down(self.gate(self.gate_up(self.norm(x, self.norms[1])))))

    def attend(self, x, cos, sin):
        sizes = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
        q, k, v = (part.view(-1, part.shape[-1] // HEAD_DIM, HEAD_DIM)
                   for part in self.qkv(x).split(sizes, dim=-1))  # fmt: skip
        if len(self.head_norms):
            q, k = self.norm(q, self.head_norms[0]), self.norm(k, self.head_norms[1])
        q, k = rotate(q, k, cos, sin)
        return self.out(self.attn(q.contiguous(), k, v).reshape(x.shape[0], -1))


@support_torch_compile({"input_ids": 0, "positions": 0})
class PlainModel(nn.Module):
    """A decoder of plain layers."""

    def __init__(
        self,
        norm=functional_norm,
        gate=chunk_gate,
        add=SUMS[0],
        *,
        has_head_norms=False,
        bias=False,
        dtype=torch.float32,
    ):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList(
                PlainLayer(index, norm, gate, add, has_head_norms, bias)
                for index in range(NUM_LAYERS)
            )
            self.norm_weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.norm = norm
        frequencies = 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("frequencies", frequencies)
        self.requires_grad_(False).to(dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        angles = positions.unsqueeze(1).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x, self.norm_weight)

    @property
    def dtype(self):
        return self.lm_head.weight.dtype

    def cache_specs(self):
        spec = KVCacheSpec(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
        return [spec] * NUM_LAYERS

    def local_logits(self, hidden):
        return self.lm_head(hidden)

    def compute_logits(self, hidden):
        return self.local_logits(hidden)
