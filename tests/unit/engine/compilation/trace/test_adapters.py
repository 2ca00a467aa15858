"""Programs of steps without adapters are those of models without room for any."""

import pytest
import torch

from models.layers.adapter_room import make_room
from models.loading.loader import load_model
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.program_store import load_program, store_program
from services.engine.compilation.program.compile_range import compile_ranges
from services.engine.compilation.program.piece_code import PieceCode
from services.engine.compilation.trace.tracing import trace_programs
from tests.support.compilation import compilation_config
from tests.support.random_checkpoints import write_checkpoint

EXAMPLES = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)]
CPU = torch.device("cpu")


def operators(programs):
    """Returns the operators that each part of each program calls, in order."""
    return [
        [
            [str(n.target) for n in part.item.graph.graph.nodes if n.op == "call_function"]
            for part in program.parts
        ]
        for _, program in programs
    ]


@pytest.mark.parametrize("variant", ["qwen3", "gemma2"])
@pytest.mark.parametrize("with_embeddings", [False, True])
def test_they_call_what_a_model_without_room_calls(tmp_path, variant, with_embeddings):
    write_checkpoint(tmp_path / "model", variant, num_hidden_layers=5)
    config = compilation_config(level=3, use_inductor=False)

    def traced(model):
        return trace_programs(model, config, example_inputs=EXAMPLES, max_num_tokens=64)

    model = load_model(tmp_path / "model", device=CPU, dtype=torch.float32)
    plain = traced(model)
    assert plain.adapter_free == ()
    make_room(model, num_slots=2, max_rank=4, with_embeddings=with_embeddings)
    adapted = traced(model)
    assert operators(adapted.adapter_free) == operators(plain.programs)
    assert "adapted_linear" in str(operators(adapted.programs))
    assert all(adapted.pass_matches[name] >= count for name, count in plain.pass_matches.items())

    cache = ArtifactCache.open(tmp_path / "cache", Factors({"torch.version": "1"}))
    store_program(cache, "model", adapted, model)
    kept = load_program(
        cache,
        "model",
        model=model,
        layers=model.decoder_layers,
        ranges=compile_ranges((), 64),
    )
    for stored, made in (
        (kept.programs, adapted.programs),
        (kept.adapter_free, adapted.adapter_free),
    ):
        for (_, program), (_, other) in zip(stored, made, strict=True):
            assert [part.item.graph.source for part in program.parts] == [
                PieceCode.of(part.item.graph, is_compiled=not part.item.is_splitting_graph).source
                for part in other.parts
            ]
