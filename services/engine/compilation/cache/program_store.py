"""Traced programs on disk, so that a later start neither traces nor imports the compiler.

A program is kept as the Python code of its parts and the names of the values that they take.
Loading runs that code, as loading a compiled piece does; see `artifact_cache`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog
import torch
from torch import nn

import services.engine.compilation.program.inserted_operators  # noqa: F401  # registers them
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.program.compile_range import CompileRange
from services.engine.compilation.program.piece_code import PieceCode, UnwritableCodeError
from services.engine.compilation.program.program import (
    Input,
    InputSize,
    LayerWeight,
    Output,
    Part,
    Program,
    Value,
    Weight,
    tensors_of,
)
from services.engine.compilation.program.split_graph import SplitItem
from services.engine.compilation.program.traced_model import TracedModel

log = structlog.get_logger()

_KINDS: dict[str, type] = {
    "layer": LayerWeight,
    "input": Input,
    "size": InputSize,
    "output": Output,
}


def store_program(cache: ArtifactCache, name: str, traced: TracedModel, model: nn.Module) -> None:
    """Keeps a traced model; logs why if it cannot be kept.

    Args:
        cache: of the environment.
        name: of the model among those of this environment.
        traced: the model as the passes left it.
        model: owns the weights.
    """
    names = {id(tensor): name for name, tensor in tensors_of(model).items()}
    try:
        written, written_free = (
            [[asdict(each), _written(program, names)] for each, program in programs]
            for programs in (traced.programs, traced.adapter_free)
        )
    except UnwritableCodeError as error:
        log.info("program_not_kept", name=name, reason=str(error))
        return
    content = {
        "matches": dict(traced.pass_matches),
        "programs": written,
        "adapter_free": written_free,
    }
    cache.store_program(name, json.dumps(content).encode())


def load_program(
    cache: ArtifactCache,
    name: str,
    *,
    model: nn.Module,
    layers: Sequence[nn.Module],
    ranges: Sequence[CompileRange],
) -> TracedModel | None:
    """Returns a model that an earlier start has traced; None if there is none for these ranges.

    Args:
        cache: of the environment.
        name: of the model among those of this environment.
        model: owns the weights.
        layers: the model's.
        ranges: of numbers of tokens.
    """
    content = _content(cache, name, ranges)
    if content is None:
        return None
    tensors = tensors_of(model)
    programs, adapter_free = (
        tuple((CompileRange(**each), _read(written, tensors)) for each, written in content[name])
        for name in ("programs", "adapter_free")
    )
    return TracedModel(
        trace=None,
        programs=programs,
        layers=layers,
        pass_matches=content["matches"],
        adapter_free=adapter_free,
    )


def holds_program(cache: ArtifactCache, name: str, ranges: Sequence[CompileRange]) -> bool:
    """Returns whether `load_program` would find a traced model."""
    return _content(cache, name, ranges) is not None


def _content(cache: ArtifactCache, name: str, ranges: Sequence[CompileRange]) -> Any:
    """Returns a stored program as JSON; None if there is none for these ranges."""
    payload = cache.load_program(name)
    content = None if payload is None else json.loads(payload)
    if content and [each for each, _ in content["programs"]] == [asdict(each) for each in ranges]:
        return content
    return None


def matches_of_programs(cache: ArtifactCache) -> Mapping[str, int]:
    """Returns the matches of each compiler pass in all traced programs, by name."""
    matches: Counter[str] = Counter()
    for name in cache.program_names:
        payload = cache.load_program(name)
        if payload is not None:
            # `update` also keeps passes that match nothing.
            matches.update(json.loads(payload)["matches"])
    return matches


def _written(program: Program, names: Mapping[int, str]) -> dict[str, Any]:
    codes: dict[tuple[str, str | None, bool], int] = {}
    parts = []
    for part in program.parts:
        item = part.item
        code = PieceCode.of(item.graph, is_compiled=not item.is_splitting_graph)
        key = (code.source, code.signature, code.has_one_output)
        number = codes.setdefault(key, len(codes))
        values = [_written_value(value, names) for value in part.values]
        parts.append([item.submod_name, item.is_splitting_graph, number, values])
    return {"codes": list(codes), "parts": parts, "result": _written_value(program.result, names)}


def _written_value(value: Value, names: Mapping[int, str]) -> list[Any]:
    match value:
        case Weight(tensor):
            if id(tensor) not in names:
                raise UnwritableCodeError("it uses a tensor that is no weight of the model")
            return ["weight", names[id(tensor)]]
        case LayerWeight(layer, name):
            return ["layer", layer, name]
        case Input(number):
            return ["input", number]
        case InputSize(number, dim):
            return ["size", number, dim]
        case Output(part, index):
            return ["output", part, index]


def _read(written: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Program:
    codes = [PieceCode(*each) for each in written["codes"]]
    weights: dict[str, Weight] = {}

    def value(kind: str, *fields: Any) -> Value:
        if kind == "weight":
            return weights.setdefault(fields[0], Weight(tensors[fields[0]]))
        made: Value = _KINDS[kind](*fields)
        return made

    parts = tuple(
        Part(
            item=SplitItem(
                submod_name=name,
                graph_id=number,
                is_splitting_graph=is_splitting,
                graph=codes[code],
            ),
            values=tuple(value(*each) for each in values),
        )
        for number, (name, is_splitting, code, values) in enumerate(written["parts"])
    )
    return Program(parts=parts, result=value(*written["result"]))
