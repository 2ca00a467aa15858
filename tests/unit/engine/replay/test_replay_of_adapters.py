"""Replays of steps with adapters, from the first step and from the middle on."""

from types import SimpleNamespace

import pytest
import torch

from services.engine.checkpoint.model_folder import config_sha256
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.replay.recording import ReplayError
from services.engine.rpc.recording import engine_settings
from tests.support.adapter_engine import GRAPHS, PROMPTS, AdapterCase
from tests.support.adapters import random_factors, write_adapter
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.recordings import write_recording
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

ROUNDS = (["a0", "a1", "", "a0"], ["a2", "a0", "a2", ""], ["a1", "", "a0", "a2"])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


async def record(case, target, *, first_round):
    """Records rounds of requests that share two slots; rounds before the first are not recorded."""
    config = ranks_config(case.base, **case.flags(), **GRAPHS, max_loras=2, max_lora_rank=4)
    sha256 = config_sha256(case.base)
    model = SimpleNamespace(name="b", architecture="", config_sha256=sha256, max_model_len=64)
    async with ranks_core(config) as ranks:
        watcher = None
        for number, names in enumerate(ROUNDS):
            if number == first_round:
                watcher = ranks.core.watch(include_token_ids=True, include_snapshot=True)
            prompts = [[number, *prompt] for prompt in PROMPTS[::-1]] + PROMPTS
            await ranks.generate(prompts, greedy_with(max_tokens=8), adapters=names * 2)
        await until(lambda: not ranks.core.load().step_age_s)
        opening = await watcher.snapshot()
        opening.engine.CopyFrom(engine_settings(model, config, ranks.core.worker))
        ranks.core.watchers.remove(watcher)
        watcher.close()
        steps = [(each.descriptor, each.result) async for each in watcher]
    return write_recording(target / "trace.binpb", steps, snapshot=opening)


def run(trace, case, against, lora):
    report = []
    config = ReplayConfig.from_flags(
        trace=trace, model=case.base, against=against, device="cpu", use_inductor=False,
        compilation_level=0, compile_cache_dir=trace.parent / "compiled", lora=lora,
    )  # fmt: skip
    return replay(config, report.append), "\n".join(report)


@pytest.mark.parametrize("with_experts", [False, True])
@pytest.mark.parametrize("first_round", [0, 1])
async def test_an_honest_recording_shows_no_difference(tmp_path, with_experts, first_round):
    family = "qwen3_moe" if with_experts else "qwen3"
    case = AdapterCase(tmp_path, family, num_adapters=3, with_experts=with_experts)
    trace = await record(case, tmp_path, first_round=first_round)
    for against in ("eager", "full"):
        totals, report = run(trace, case, against, case.flags()["lora"])
        assert totals.is_clean, report
        assert totals.num_steps > 10


async def test_a_replay_needs_the_recorded_adapters(tmp_path):
    case = AdapterCase(tmp_path, "qwen3", num_adapters=3)
    trace = await record(case, tmp_path, first_round=0)
    lora = case.flags()["lora"]
    with pytest.raises(ReplayError, match="--lora NAME=PATH must name its folder"):
        run(trace, case, "eager", lora[:2])
    factors = random_factors({"model.layers.0.self_attn.o_proj": (32, 48)}, size=0.2)
    write_adapter(tmp_path / "adapters" / "a1", factors)
    with pytest.raises(ReplayError, match="the SHA-256"):
        run(trace, case, "eager", lora)
