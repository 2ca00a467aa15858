"""A scheduler in front of a real CPU model that makes vectors, without processes."""

import copy
import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from models.config import ModelConfig
from models.config_sections.pooling import read_pooling
from models.loading.loader import load_model
from services.engine.batch import read_float32
from services.engine.config.engine_config import EngineConfig
from services.engine.limits import StepLimits
from services.engine.scheduler.scheduler import Scheduler
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.kv_memory import allocate_kv_cache, state_pages
from tests.support.requests import make_request

CPU = torch.device("cpu")


def write_pooling(folder: Path, mode: str, *, is_normalized: bool = False, dense=()) -> None:
    """Writes sentence-transformers' files; dense: (weight, bias or None, activation) each."""
    kinds = ["Transformer", "Pooling"] + ["Dense"] * len(dense) + ["Normalize"] * is_normalized
    modules = []
    for index, kind in enumerate(kinds):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        modules.append({"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"})
        if path:
            (folder / path).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    flag = "pooling_mode_lasttoken" if mode == "lasttoken" else f"pooling_mode_{mode}"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({flag: True}))
    for index, (weight, bias, activation) in enumerate(dense, 2):
        place = folder / f"{index}_Dense"
        described = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": bias is not None,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        (place / "config.json").write_text(json.dumps(described))
        stored = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        save_tensors(stored, place / "model.safetensors")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes tensors that share no memory."""
    from safetensors.torch import save_file

    save_file({name: values.clone() for name, values in tensors.items()}, path)


class PooledEngine:
    """Computes the vectors of prompts, with any limits, through scheduler and runner."""

    def __init__(self, folder: Path, task: str = "embed", *, num_blocks=65, **flags) -> None:
        values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, **flags}
        config = EngineConfig.from_flags(task=task, **values)
        pooling = read_pooling(folder, task)
        model = load_model(folder, device=CPU, dtype=torch.float32, pooling=pooling)
        shape = ModelConfig.from_folder(folder)
        limits = StepLimits.of(
            config,
            max_model_len=shape.max_position_embeddings,
            vocab_size=shape.vocab_size,
            cache_windows=shape.cache_windows,
            computes_whole_prompts=shape.sees_later,
            pooling=pooling.method,
        )
        pages = state_pages(model, block_size=limits.block_size, dtype=torch.float32)
        self.limits = replace(limits, state_pages=pages)
        cache = allocate_kv_cache(
            model,
            num_blocks=num_blocks,
            block_size=limits.block_size,
            dtype=torch.float32,
            device=CPU,
            groups=limits.layer_groups,
        )
        self.runner = ModelRunner(model, cache, limits=self.limits, device=CPU)
        self.scheduler = Scheduler(self.limits, num_blocks=num_blocks)
        self.num_steps = 0

    def embed(self, prompts: list[list[int]], *, depth: int = 2, **fields) -> np.ndarray:
        """Returns the vectors of prompts that arrive together, [n, size]."""
        requests = [make_request(prompt, max_tokens=1, **fields) for prompt in prompts]
        for request in requests:
            self.scheduler.add(request)
        in_flight = deque()
        while self.scheduler.has_work or in_flight:
            step = self.scheduler.schedule() if len(in_flight) < depth else None
            if step is not None:
                # Buffers of an executed step may change before its result is read.
                result = copy.deepcopy(self.runner.execute(step.descriptor).message())
                in_flight.append((step, result))
                self.num_steps += 1
                continue
            for output in self.scheduler.update(*in_flight.popleft()):
                output.request.sink.put(output)
        outputs = [request.sink.outputs for request in requests]
        assert all(len(each) == 1 and each[0].error is None for each in outputs)
        return np.stack([read_float32(each[0].vector) for each in outputs])
