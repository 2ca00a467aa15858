"""Adapters under the real scheduler and workers: the tokens of merged weights."""

import os
import signal

import pytest
import torch

from services.engine.batch import GraphKind
from services.engine.core.adapters import StartRefusedError
from services.engine.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    NotPermittedError,
    UnknownModelError,
)
from services.engine.rpc.stats import stats_to_proto
from tests.support.adapter_engine import GRAPHS, NUM_TOKENS, PROMPTS, SCARCE, AdapterCase
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"tensor_parallel_size": 2, **SCARCE}),
        ("llama_bias", {**SCARCE, **GRAPHS}),
        ("qwen3_moe", {"tensor_parallel_size": 2, **GRAPHS}),
        ("deepseek_v3", {"max_num_batched_tokens": 8}),
        ("qwen3_5", {"max_num_batched_tokens": 8}),
        ("qwen3", {**GRAPHS, "compilation_level": 3}),
        ("gemma3", {"num_speculative_tokens": 2, "speculative_method": "ngram"}),
        ("qwen3", {**GRAPHS, "compilation_level": 3, "compile_sizes": [2]}),
    ],
)
async def test_requests_of_several_adapters_get_the_tokens_of_merged_weights(
    tmp_path, family, options
):
    case = AdapterCase(tmp_path, family, **({"num_hidden_layers": 5} if family == "qwen3" else {}))
    names = ["a0", "", "a1", "a0"]
    expected = [case.expected(prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    async with ranks_core(ranks_config(case.base, **case.flags(), **options)) as ranks:
        for _ in range(2):  # the second time from the prefix cache
            tokens = await ranks.generate(
                PROMPTS, greedy_with(max_tokens=NUM_TOKENS), adapters=names
            )
            assert tokens == expected
        same = [PROMPTS[2]] * 3
        tokens = await ranks.generate(
            same, greedy_with(max_tokens=NUM_TOKENS), adapters=["a1", "a0", ""]
        )
    assert tokens == [case.expected(PROMPTS[2], name) for name in ("a1", "a0", "")]


@pytest.mark.parametrize("options", [{}, {"compilation_level": 3}, {"tensor_parallel_size": 2}])
async def test_steps_without_adapters_run_graphs_that_add_none(tmp_path, options):
    case = AdapterCase(tmp_path, "qwen3", num_hidden_layers=5)
    config = ranks_config(case.base, **case.flags(), **GRAPHS, **options)
    async with ranks_core(config) as ranks:

        def replays():
            """Returns the replays of decode graphs with adapters, and of those without."""
            graphs = stats_to_proto(ranks.core.stats(), num_sessions=0).graphs
            decodes = [each for each in graphs if each.kind == GraphKind.GRAPH_KIND_DECODE]
            return [
                sum(each.num_replays for each in decodes if each.skips_adapters == skips)
                for skips in (False, True)
            ]

        for names in (["", "", "", ""], ["a0", "", "a1", "a0"]):
            before = replays()
            tokens = await ranks.generate(
                PROMPTS, greedy_with(max_tokens=NUM_TOKENS), adapters=names
            )
            with_names = zip(PROMPTS, names, strict=True)
            assert tokens == [case.expected(prompt, name) for prompt, name in with_names]
            adding, skipping = (now - old for now, old in zip(replays(), before, strict=True))
            if any(names):
                assert adding > 5
            else:
                assert (adding, skipping > 5) == (0, True)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"tensor_parallel_size": 2, **SCARCE, **GRAPHS}),
        ("gpt_oss", {"tensor_parallel_size": 2}),
        ("deepseek_v3", {"pipeline_parallel_size": 3, **SCARCE}),
        ("mixtral", {**GRAPHS, "compilation_level": 3}),
    ],
)
async def test_adapters_of_routed_experts_get_the_tokens_of_merged_weights(
    tmp_path, family, options
):
    case = AdapterCase(tmp_path, family, with_experts=True)
    names = ["a0", "", "a1", "a0"]
    expected = [case.expected(prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    async with ranks_core(ranks_config(case.base, **case.flags(), **options)) as ranks:
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS), adapters=names)
    assert tokens == expected


async def test_more_adapters_than_slots_take_turns(tmp_path):
    case = AdapterCase(tmp_path, "qwen3", num_adapters=4)
    names = ["a0", "a1", "a2", "a3"]
    expected = [case.expected(prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    async with ranks_core(ranks_config(case.base, **case.flags(), max_loras=2)) as ranks:
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS), adapters=names)
        stats = stats_to_proto(ranks.core.stats(), num_sessions=0).adapters
    assert tokens == expected
    assert (stats.num_known, stats.num_slots, stats.num_resident, stats.num_read) == (4, 2, 2, 4)
    assert (stats.num_slot_loads, stats.num_evictions) == (4, 2)
    assert stats.read_s > 0


async def test_adapters_come_and_go_while_serving(tmp_path):
    case = AdapterCase(tmp_path, "qwen3")
    config = ranks_config(case.base, lora_folder=tmp_path / "adapters")
    async with ranks_core(config) as ranks:
        adapters = ranks.core.adapters
        with pytest.raises(UnknownModelError):
            adapters.remove("first")
        await adapters.load("first", "a0")
        with pytest.raises(DuplicateRequestError):
            await adapters.load("first", "a1")
        await adapters.load("second", str(tmp_path / "adapters" / "a1"))
        for outside in ("..", "../base", str(case.base), "/", "a0/../../base"):
            with pytest.raises(NotPermittedError):
                await adapters.load("third", outside)
        with pytest.raises(InvalidRequestError):
            await adapters.load("bad name", "a0")
        names = ["first", "second", "", "first"]
        real = {"first": "a0", "second": "a1", "": ""}
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS), adapters=names)
        adapters.remove("first")
        assert adapters.find("first") is None
        assert [each.name for each in adapters.all] == ["second"]
    assert tokens == [case.expected(p, real[n]) for p, n in zip(PROMPTS, names, strict=True)]


async def test_adapters_outlive_a_worker(tmp_path):
    case = AdapterCase(tmp_path, "qwen3")
    config = ranks_config(case.base, **case.flags(), lora_folder=tmp_path / "adapters")
    async with ranks_core(config) as ranks:
        await ranks.core.adapters.load("later", "a1")
        os.kill(ranks.executors[-1].pid, signal.SIGKILL)
        await until(lambda: not ranks.core.is_ready, timeout_s=60)
        await ranks.wait_until_ready()
        tokens = await ranks.generate(
            PROMPTS[:2], greedy_with(max_tokens=NUM_TOKENS), adapters=["later", "a0"]
        )
    assert tokens == [case.expected(PROMPTS[0], "a1"), case.expected(PROMPTS[1], "a0")]


async def test_requests_go_on_once_the_next_worker_has_read_the_adapters(tmp_path):
    case, num_tokens = AdapterCase(tmp_path, "qwen3"), 24
    names = ["a1", "", "a0"]
    async with ranks_core(ranks_config(case.base, **case.flags())) as ranks:
        greedy = greedy_with(max_tokens=num_tokens)
        sinks = [ranks.submit(p, greedy, (), n) for p, n in zip(PROMPTS, names, strict=False)]
        await sinks[0].wait_for(lambda each: len(each.token_ids) > 2)
        os.kill(ranks.executors[-1].pid, signal.SIGKILL)
        for sink, prompt, name in zip(sinks, PROMPTS, names, strict=False):
            assert (await sink.wait_for_end()).error is None
            assert sink.token_ids == case.expected(prompt, name, num_tokens)


async def test_an_engine_does_not_start_with_a_bad_adapter(tmp_path):
    case = AdapterCase(tmp_path, "qwen3")
    (tmp_path / "adapters" / "a1" / "adapter_model.safetensors").write_bytes(b"\x08" + b"\0" * 20)
    with pytest.raises(StartRefusedError, match=r"--lora a1: .*is damaged"):
        async with ranks_core(ranks_config(case.base, **case.flags())):
            pass
