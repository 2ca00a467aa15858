"""Compiles models the way a worker does, and small models to compile."""

import torch
from torch import nn

from models.compile_support import support_torch_compile
from services.engine.compilation.compile_model import (
    CompiledModel,
    TracedForward,
    compile_traced,
    debug_dump,
)
from services.engine.compilation.pieces.compiler_interface import EagerAdaptor, LoadError
from services.engine.compilation.pieces.linked_program import LinkedProgram
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.compilation.program.program import read_program
from services.engine.compilation.trace.backend import trace_model
from services.engine.compilation.trace.tracing import trace_programs
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config

MAX_TOKENS = 64


def compile_model(model, config, *, example_inputs, max_num_tokens, max_num_seqs, **others):
    """Compiles a model at the configured level, as a worker does; the model is unchanged.

    others: arguments of `compile_traced`.
    """
    if config.level == CompilationLevel.NO_COMPILATION:
        return CompiledModel(forward=model.forward)
    if config.level == CompilationLevel.DYNAMO_AS_IS:
        return CompiledModel(forward=TracedForward(model))
    traced = trace_programs(
        model,
        config,
        example_inputs=example_inputs,
        max_num_tokens=max_num_tokens,
        dump=debug_dump(config, 0),
    )
    return compile_traced(traced, config, max_num_seqs=max_num_seqs, **others)


def compile_at(level, *, device="cpu", factors=None, piece_wrapper=None, **settings):
    """Returns a function that compiles a model at a level, by default with the eager compiler."""
    config = compilation_config(level=level, **{"use_inductor": False, **settings})

    def prepare(model):
        compiled = compile_model(
            model,
            config,
            example_inputs=[
                torch.zeros(8, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)
            ],
            max_num_tokens=MAX_TOKENS,
            max_num_seqs=8,
            factors=factors,
            piece_wrapper=piece_wrapper,
        )
        model.forward = compiled.forward
        return compiled.stats

    return prepare


def compile_toy(model, level, *, width=4, example=None, **settings):
    """Compiles a model of one input, by default floats [T, width], with the eager compiler."""
    compiled = compile_model(
        model,
        compilation_config(level=level, **{"use_inductor": False, **settings}),
        example_inputs=[torch.zeros(8, width) if example is None else example],
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=8,
    )
    model.forward = compiled.forward
    return compiled.stats


@support_torch_compile()
class Toy(nn.Module):
    """Doubles its input; tests give it another body."""

    def __init__(self, body=lambda self, x: x * 2):
        super().__init__()
        self.body = body
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


class CountingCompiler:
    """An eager compiler with artifacts: each is the name of a graph that it remembers."""

    name = "counting"
    graphs: dict[bytes, object] = {}  # noqa: RUF012  # shared, like a disk between processes

    def __init__(self):
        self.num_compiled = 0
        self.num_loaded = 0

    def compute_hash(self):
        return "counting"

    def compile(self, graph, example_inputs, compiler_config, runtime_shape=None):
        self.num_compiled += 1
        run, _ = EagerAdaptor().compile(graph, example_inputs, compiler_config, runtime_shape)
        handle = f"graph {len(self.graphs)}".encode()
        self.graphs[handle] = run
        return run, handle

    def load(self, handle):
        if handle not in self.graphs:
            raise LoadError("unknown graph")
        self.num_loaded += 1
        return self.graphs[handle]


def traced_program(model, *inputs, splitting_ops=()):
    """Traces a model; returns its program."""
    return read_program(trace_model(model, inputs), splitting_ops)


def linked(program, manager):
    """Compiles a program's pieces; returns its forward."""
    return LinkedProgram(program, PieceCompiler(manager).compile(program))
