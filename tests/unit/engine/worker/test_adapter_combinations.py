"""Adapters with all that may be on at the same time: the tokens of merged weights."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.core.sleep import SleepMode
from services.engine.core.weights import Running, Update
from services.engine.errors import InvalidRequestError
from services.engine.kv_cache.recompute_rule import RecomputeRule
from tests.support.adapter_engine import GRAPHS, NUM_TOKENS, PROMPTS, SCARCE, AdapterCase
from tests.support.adapters import (
    linear_modules,
    random_factors,
    write_adapter,
    write_merged_files,
)
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

NAMES = ["a0", "", "a1", "a0"]
GREEDY = greedy_with(max_tokens=NUM_TOKENS)
THREE = {"num_speculative_tokens": 3, "min_speculative_tokens": 3}
LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(200)]
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def expected_of(case, num_tokens=NUM_TOKENS):
    return [case.expected(p, n, num_tokens) for p, n in zip(PROMPTS, NAMES, strict=True)]


@pytest.mark.parametrize(
    ("source", "family", "options"),
    [
        ("ngram", "qwen3", {"tensor_parallel_size": 2}),
        ("small", "qwen3", {**SCARCE, **GRAPHS}),
        ("small", "qwen3_next", {"num_kv_blocks": 200}),
        ("eagle3", "qwen3", GRAPHS),
        ("eagle3", "qwen3_moe", {"data_parallel_size": 2}),
    ],
)
async def test_drafts_of_other_models_change_no_token(tmp_path, source, family, options):
    case, small = AdapterCase(tmp_path, family), tmp_path / "small"
    drafts = {"draft_model": small}
    if source == "ngram":
        drafts = {"speculative_method": "ngram"}
    elif source == "eagle3":
        write_eagle3_head(small, case.base)
    else:
        write_checkpoint(small, "llama", num_hidden_layers=1)
    flags = {**case.flags(), **THREE, **drafts, **options}
    expected = expected_of(case)
    async with ranks_core(ranks_config(case.base, **flags)) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, GREEDY, adapters=NAMES) == expected
        assert ranks.core.stats().counters.drafts.num_verified


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
@pytest.mark.parametrize("options", [{}, {**SCARCE, **GRAPHS}], ids=["eager", "graphs"])
async def test_draft_layers_of_the_model_change_no_token(tmp_path, family, options):
    base = tmp_path / "base"
    if family == "qwen3_5":
        whole, _ = write_mtp_checkpoint(base, family, agreement=0.9)
        options = {**options, "num_kv_blocks": 200}
    else:
        base.mkdir()
        whole, _ = write_draft_checkpoint(base, agreement=0.9)
    num_layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    assert num_layers == len(whole.model.layers) - 1
    modules = {
        name: shape
        for name, shape in linear_modules(
            whole, without=("o_proj", "shared_experts.down_proj")
        ).items()
        if name.endswith(
            ("o_proj", "q_b_proj", "in_proj_qkv", "out_proj", "shared_experts.up_proj")
        )
        and f"layers.{num_layers}." not in name
    }
    assert modules
    factors = random_factors(modules, size=0.1)
    write_adapter(tmp_path / "adapter", factors)
    write_merged_files(tmp_path / "merged", base, factors)
    outputs = []
    for folder in (base, tmp_path / "merged"):
        async with ranks_core(ranks_config(folder, **options)) as ranks:
            outputs.append(await ranks.generate(PROMPTS, GREEDY))
    plain, merged = outputs
    assert plain != merged
    expected = [merged[0], plain[1], merged[2], plain[3]]
    flags = {"lora": [f"a={tmp_path / 'adapter'}"], "num_speculative_tokens": 2, **options}
    async with ranks_core(ranks_config(base, **flags)) as ranks:
        for _ in range(2):
            tokens = await ranks.generate(PROMPTS, GREEDY, adapters=["a", "", "a", ""])
            assert tokens == expected
        drafts = ranks.core.stats().counters.drafts
    assert 0 < drafts.num_accepted < drafts.num_verified


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"data_parallel_size": 2, **GRAPHS}),
        ("qwen3_moe", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama_bias", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **SCARCE}),
        ("qwen3_next", {"pipeline_parallel_size": 2, "num_kv_blocks": 200}),
    ],
)
async def test_ranks_of_all_kinds_give_the_tokens_of_merged_weights(tmp_path, family, options):
    case = AdapterCase(tmp_path, family, num_adapters=3)
    names = ["a0", "a2", "a1", ""]
    expected = [case.expected(p, n) for p, n in zip(PROMPTS, names, strict=True)]
    flags = {**case.flags(), "max_loras": 1, **options}
    async with ranks_core(ranks_config(case.base, **flags)) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, GREEDY, adapters=names) == expected


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True, **GRAPHS}),
        ("qwen3_moe", {"data_parallel_size": 2, "num_redundant_experts": 2, **GRAPHS}),
        ("deepseek_v3", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
        ("nemotron_h_moe", {"data_parallel_size": 2, "num_kv_blocks": 200}),
    ],
)
async def test_ranks_with_whole_experts_apply_the_adapters_of_all_ranks_tokens(
    tmp_path, family, options
):
    case = AdapterCase(tmp_path, family, num_adapters=3, with_experts=True)
    names = ["a0", "a2", "a1", ""]
    expected = [case.expected(p, n) for p, n in zip(PROMPTS, names, strict=True)]
    flags = {**case.flags(), "max_loras": 2, **options}
    async with ranks_core(ranks_config(case.base, **flags)) as ranks:
        for _ in range(2):
            assert await ranks.generate(PROMPTS, GREEDY, adapters=names) == expected


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True, **GRAPHS}),
        ("qwen3_moe", {"data_parallel_size": 2, "num_redundant_experts": 2, **GRAPHS}),
        ("gpt_oss", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek_v3", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
)
async def test_adapters_of_experts_follow_them_to_other_ranks(tmp_path, family, options):
    case = AdapterCase(tmp_path, family, num_adapters=3, with_experts=True)
    names = ["a0", "a2", "a1", ""]
    expected = [case.expected(p, n) for p, n in zip(PROMPTS, names, strict=True)]
    flags = {**case.flags(), "max_loras": 2, "eplb_interval": 3, **options}
    async with ranks_core(ranks_config(case.base, **flags)) as ranks:
        before = await ranks.core.expert_figures()
        for _ in range(2):
            assert await ranks.generate(PROMPTS, GREEDY, adapters=names) == expected
        after = await ranks.core.expert_figures()
        assert ranks.core.counters.num_expert_moves > 0
        assert ranks.core.counters.num_worker_restarts == 0
    assert any(new.placement != old.placement for new, old in zip(after, before, strict=True))


async def test_adapters_come_and_go_while_experts_move(tmp_path):
    case = AdapterCase(tmp_path, "qwen3_moe", num_adapters=3, with_experts=True)
    num_tokens = 8
    expected = {name: case.expected(PROMPTS[0], name, num_tokens) for name in case.merged}
    sampling = greedy_with(max_tokens=num_tokens)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 1}
    flags = {"lora_folder": tmp_path / "adapters", "lora_experts": True, "max_loras": 2}
    async with ranks_core(ranks_config(case.base, **flags, **options)) as ranks:
        adapters, counters = ranks.core.adapters, ranks.core.counters
        # An adapter that is read again may be in its slot from before, where experts have moved.
        for turn, name in enumerate(["a0", "a1", "a0", "a2", "a0", "a1"]):
            sinks = [ranks.submit(PROMPTS[0], sampling)]
            num_moves = counters.num_expert_moves
            await adapters.load(name, name)
            sinks.append(ranks.submit(PROMPTS[0], sampling, (), name))
            for sink, own in zip(sinks, ("", name), strict=True):
                assert (await sink.wait_for_end()).error is None
                assert sink.token_ids == expected[own]
            adapters.remove(name)
            await until(lambda: not adapters._forgetting)
            assert turn or counters.num_expert_moves > num_moves


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
async def test_snapshots_of_states_belong_to_an_adapter(tmp_path, family):
    case = AdapterCase(tmp_path, family, max_position_embeddings=256)
    sizes = {"max_model_len": 256, "block_size": 16, "num_kv_blocks": 600}
    sizes["max_num_batched_tokens"] = 64
    prompt = LONG[:150]
    expected = {name: case.expected(prompt, name) for name in ("", "a0", "a1")}
    async with ranks_core(ranks_config(case.base, **case.flags(), **sizes)) as ranks:
        counts = ranks.core.counters.scheduler
        for name in ("a0", "", "a1"):
            assert await ranks.generate([prompt], GREEDY, adapters=[name]) == [expected[name]]
            assert counts.num_snapshots_used == 0
        for name in ("a0", "", "a1"):
            assert await ranks.generate([prompt], GREEDY, adapters=[name]) == [expected[name]]
        assert counts.num_snapshots_used == 3


@pytest.mark.parametrize("has_disk", [False, True])
async def test_tiers_keep_blocks_by_adapter(tmp_path, monkeypatch, has_disk):
    # No time of computing is known, so everything is loaded, however slow the machine.
    monkeypatch.setattr(RecomputeRule, "observe_prompts", lambda *_: None)
    case = AdapterCase(tmp_path, "qwen3")
    prompts = [LONG[start : start + 40] for start in range(0, 100, 20)]
    expected = {
        name: [case.expected(prompt, name, 3) for prompt in prompts] for name in case.merged
    }
    flags = {**case.flags(), "num_kv_blocks": 24, "host_kv_gb": 2**-10}
    if has_disk:
        flags |= {"host_kv_gb": 2**-14, "disk_kv_dir": tmp_path / "disk", "disk_kv_gb": 0.01}
    async with ranks_core(ranks_config(case.base, **flags)) as ranks:
        for _ in range(2):
            for name, outputs in expected.items():
                for prompt, tokens in zip(prompts, outputs, strict=True):
                    sampling = greedy_with(max_tokens=3)
                    [found] = await ranks.generate([prompt], sampling, adapters=[name])
                    assert found == tokens
        assert ranks.core.counters.scheduler.tiers.hit_tokens > 0


@pytest.mark.parametrize("level", [1, 2])
async def test_running_requests_keep_their_adapters_through_sleep(tmp_path, level):
    case = AdapterCase(tmp_path, "qwen3_moe", with_experts=True)
    num_tokens = 16
    expected = expected_of(case, num_tokens)
    options = {"enable_sleep": True, "tensor_parallel_size": 2, "max_loras": 1}
    async with ranks_core(ranks_config(case.base, **case.flags(), **options)) as ranks:
        sampling = greedy_with(max_tokens=num_tokens)
        sinks = [ranks.submit(p, sampling, (), n) for p, n in zip(PROMPTS, NAMES, strict=True)]
        await sinks[0].wait_for(lambda each: len(each.token_ids) > 2)
        await ranks.core.sleep.fall_asleep(level, SleepMode.RECOMPUTE, TIMEOUT_S)
        await ranks.core.sleep.wake()
        for sink in sinks:
            assert (await sink.wait_for_end()).error is None
        assert [sink.token_ids for sink in sinks] == expected
        assert await ranks.generate(PROMPTS[:1], sampling, adapters=NAMES[:1]) == expected[:1]
    assert len(ranks.executors) == 1


def random_update(case: AdapterCase, folder: Path, name="mlp.up_proj.weight") -> None:
    """Writes weights of the base with other projections of a name; merged models get them, too."""
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(case.base / "model.safetensors")
    folder.mkdir(parents=True)
    changes = {}
    for each, tensor in tensors.items():
        if each.endswith(name):
            changes[each] = 0.2 * torch.randn(tensor.shape, generator=generator)
            tensors[each] = tensor + changes[each]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for model in case.merged.values():
        with torch.no_grad():
            for each, change in changes.items():
                model.get_parameter(each).add_(change)


@pytest.mark.parametrize("running", [Running.FINISH, Running.RECOMPUTE])
async def test_adapters_stay_when_the_weights_change(tmp_path, running):
    case = AdapterCase(tmp_path, "qwen3")
    before = expected_of(case)
    random_update(case, tmp_path / "weights" / "new")
    after = expected_of(case)
    assert before != after
    options = {"weights_folder": tmp_path / "weights", "tensor_parallel_size": 2}
    async with ranks_core(ranks_config(case.base, **case.flags(), **options)) as ranks:
        assert await ranks.generate(PROMPTS, GREEDY, adapters=NAMES) == before
        weights = ranks.core.weights

        async def obtain():
            return weights.folder.find("new")

        await weights.update(Update(version="new", running=running, is_part=False), obtain)
        assert await ranks.generate(PROMPTS, GREEDY, adapters=NAMES) == after


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", GRAPHS), ("qwen3_moe", {"data_parallel_size": 2})]
)
async def test_log_probabilities_with_adapters_are_those_of_scoring_bit_for_bit(
    tmp_path, family, options
):
    """In batch-invariant mode, under each version of the weights."""
    has_experts = family == "qwen3_moe"
    case = AdapterCase(tmp_path, family, with_experts=has_experts)
    random_update(case, tmp_path / "weights" / "new", name="k_proj.weight")
    flags = {**case.flags(), "weights_folder": tmp_path / "weights", "batch_invariant": True}
    scoring = greedy_with(max_tokens=1, prompt_logprobs=0)
    sampled = greedy_with(max_tokens=NUM_TOKENS, logprobs=0, temperature=1.0)
    config = ranks_config(case.base, **flags, **options)
    async with ranks_core(config) as ranks:
        weights, versions = ranks.core.weights, []

        async def obtain():
            return weights.folder.find("new")

        async def ended(sinks):
            for sink in sinks:
                assert (await sink.wait_for_end()).error is None

        for version in ("", "new"):
            if version:
                update = Update(version=version, running=Running.FINISH, is_part=False)
                await weights.update(update, obtain)
            made = [ranks.submit(p, sampled, (), n) for p, n in zip(PROMPTS, NAMES, strict=True)]
            await ended(made)
            scored = []
            for prompt, sink, name in zip(PROMPTS, made, NAMES, strict=True):
                scored.append(ranks.submit([*prompt, *sink.token_ids], scoring, (), name))
                # Others change no bit.
                scored.append(ranks.submit([*prompt, *sink.token_ids], scoring, (), "a1"))
            await ended(scored)
            for prompt, own, score in zip(PROMPTS, made, scored[::2], strict=True):
                of_tokens = [e.logprob for each in own.outputs for e in each.logprobs]
                of_prompt = [e.logprob for each in score.outputs for e in each.prompt_logprobs]
                assert len(of_tokens) == NUM_TOKENS
                assert of_prompt[len(prompt) - 1 :] == of_tokens
            versions.append(of_tokens)
        assert versions[0] != versions[1]


async def test_adapters_join_and_leave_under_load(tmp_path):
    case = AdapterCase(tmp_path, "qwen3", num_adapters=4)
    expected = {
        (name, number): case.expected(prompt, name)
        for name in case.merged
        for number, prompt in enumerate(PROMPTS)
    }
    options = {"lora_folder": tmp_path / "adapters", "max_loras": 2, "max_cpu_loras": 3}
    config = ranks_config(case.base, **options)
    order = random.Random(3)
    async with ranks_core(config) as ranks:
        adapters = ranks.core.adapters
        for name in ("a0", "a1", "a2"):
            await adapters.load(name, name)
        with pytest.raises(InvalidRequestError, match="--max-cpu-loras"):
            await adapters.load("a3", "a3")
        pending = []
        for turn in range(24):
            known = [each.name for each in adapters.all]
            name, number = order.choice(["", *known]), order.randrange(len(PROMPTS))
            pending.append((name, number, ranks.submit(PROMPTS[number], GREEDY, (), name)))
            if turn % 4 == 3:
                adapters.remove(order.choice(known))
                missing = next(each for each in case.names if adapters.find(each) is None)
                await adapters.load(missing, missing)
        for name, number, sink in pending:
            assert (await sink.wait_for_end()).error is None
            assert sink.token_ids == expected[name, number]
        await until(lambda: not adapters._forgetting)
