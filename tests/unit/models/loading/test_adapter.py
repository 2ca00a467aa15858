"""Adapters equal merged weights, in every family, and bad ones are refused with the reason."""

import json
import os
import struct
import time

import pytest
import torch

from models.layers.adapter_room import make_room
from models.loading.adapter import AdapterError, AdapterReader
from models.loading.loader import load_model
from protos.engine.v1.batch_pb2 import AdapterLoad
from protos.engine.v1.worker_pb2 import ReadAdapter
from scripts.quantize_tiny import FORMATS, write_plain, write_quantized
from services.engine.worker.runner.adapter_store import AdapterStore
from tests.support.adapters import (
    FLOAT32,
    linear_modules,
    load_with_adapters,
    random_factors,
    vocabulary_factors,
    write_adapter,
    write_merged,
)
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import EVERY_VARIANT, write_checkpoint

UNSUPPORTED = (
    "kv_b_proj",
    "o_a_proj",
    "lm_head",
    ".gate",
    ".router",
    "router.proj",
    "shared_expert_gate",
)
PROMPTS = ([5, 9, 33, 7, 81, 2, 14], [5, 9, 33, 7, 60], [5, 9, 33, 7, 81, 2])


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_adapters_equal_merged_weights(tmp_path, variant):
    theirs = write_checkpoint(tmp_path / "base", variant)
    modules = {
        name: shape
        for name, shape in linear_modules(theirs, without=UNSUPPORTED).items()
        if ".experts." not in name
    }
    first = random_factors(modules, seed=1)
    second = random_factors(dict(list(modules.items())[::2]), seed=2)
    folders = [write_adapter(tmp_path / "first", first), write_adapter(tmp_path / "second", second)]
    runner = PagedRunner(load_with_adapters(tmp_path / "base", *folders))
    sequences = [runner.add(prompt, slot) for prompt, slot in zip(PROMPTS, (1, 0, 2), strict=True)]
    mixed = [
        torch.cat(each)
        for each in zip(
            runner.step([(s, 3) for s in sequences]),
            runner.step([(s, len(s.token_ids) - 3) for s in sequences]),
            strict=True,
        )
    ]
    for prompt, logits, factors in zip(PROMPTS, mixed, (first, {}, second), strict=True):
        name = f"merged{prompt[-1]}"
        merged = load_model(write_merged(tmp_path / name, theirs, factors), **FLOAT32)
        alone = PagedRunner(merged)
        expected = alone.run(alone.add(prompt), 3)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    theirs = write_checkpoint(folder, "qwen3")
    model = load_model(folder, **FLOAT32)
    make_room(model, num_slots=1, max_rank=8)
    return model, linear_modules(theirs, without=("lm_head",))


Q_PROJ = "model.layers.0.self_attn.q_proj"


def refusal(base, folder, change=lambda factors: None, **config):
    """Returns why an adapter is refused after a change of its factors."""
    model, modules = base
    factors = random_factors(modules)
    change(factors)
    write_adapter(folder, factors, **config)
    with pytest.raises(AdapterError) as caught:
        AdapterReader(model).read(folder)
    return str(caught.value)


def changed(module, factor, value):
    def change(factors):
        a, b = factors[module]
        factors[module] = (value(a), b) if factor == "A" else (a, value(b))

    return change


def moved(old, new):
    return lambda factors: factors.update({new: factors.pop(old)})


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        (changed(Q_PROJ, "A", lambda a: a[:, :-1]), {}, "its shape is"),
        (changed(Q_PROJ, "B", lambda b: torch.cat((b, b))), {}, "those of all projections"),
        (changed(Q_PROJ, "A", lambda a: a[:-1]), {}, "and the rank is 4"),
        (changed(Q_PROJ, "A", lambda a: a * torch.nan), {}, "holds NaN"),
        (changed(Q_PROJ, "B", lambda b: b / 0.0), {}, "holds NaN or infinity"),
        (changed(Q_PROJ, "A", lambda a: a.int()), {}, "adapters are of floats"),
        (changed(Q_PROJ, "A", lambda a: a[None]), {}, "has shape"),
        (changed(Q_PROJ, "A", lambda a: a[:, :0]), {}, "its shape is"),
        (changed(Q_PROJ, "A", lambda a: a[:0]), {}, "and the rank is 4"),
        (changed(Q_PROJ, "B", lambda b: b[:0]), {}, "its shape is"),
        (changed(Q_PROJ, "B", lambda b: b[0, 0]), {}, "has shape"),
        (moved(Q_PROJ, "model.layers.9.self_attn.q_proj"), {}, "the model has 2 layers"),
        (moved(Q_PROJ, "model.layers.0.attn.query"), {}, "which the model does not have"),
        (moved(Q_PROJ, "lm_head"), {}, "needs --lora-embeddings"),
        (lambda factors: factors.clear(), {}, "holds no tensors"),
        (lambda factors: None, {"use_dora": True}, "DoRA"),
        (lambda factors: None, {"bias": "all"}, "bias is 'all'"),
        (lambda factors: None, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (lambda factors: None, {"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        (lambda factors: None, {"init_lora_weights": "pissa_niter_4"}, "changed base model"),
        (lambda factors: None, {"rank_pattern": {"(a+)+$": 8}}, "not expressions"),
        (lambda factors: None, {"rank": 9}, "--max-lora-rank is 8"),
        (lambda factors: None, {"rank": 0}, "it must be a positive integer"),
        (lambda factors: None, {"alpha": float("inf")}, "lora_alpha"),
        (lambda factors: None, {"alpha": [8]}, "lora_alpha is [8]"),
        (lambda factors: None, {"rank": "4"}, "r is '4'"),
        (lambda factors: None, {"rank": True}, "r is True"),
        (lambda factors: None, {"rank": 10**9}, "it must be at most"),
        (lambda factors: None, {"use_rslora": "yes"}, "use_rslora is 'yes'"),
        (lambda factors: None, {"peft_type": ["LORA"]}, "peft_type is ['LORA']"),
        (lambda factors: None, {"rank_pattern": [4]}, "rank_pattern is [4]"),
        (lambda factors: None, {"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern.q_proj is '8'"),
        (lambda factors: None, {"target_parameters": [5]}, "target_parameters is [5]"),
    ],
)
def test_a_bad_adapter_is_refused_with_what_is_wrong(base, tmp_path, change, config, reason):
    assert reason in refusal(base, tmp_path, change, **config)


def file_of(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_damaged_and_foreign_files_are_refused(base, tmp_path):
    model, modules = base
    file = write_adapter(tmp_path, random_factors(modules)) / "adapter_model.safetensors"
    content, reader = file.read_bytes(), AdapterReader(model)
    for damaged in (
        b"",
        content[:-4],
        content[:100],
        b"\xff" * 8 + content,
        file_of({"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}),
        file_of({"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}, b"00"),
        file_of({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, b"0000"),
        file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"0000"),
        struct.pack("<Q", 2 * 10**5) + b"[" * 10**5 + b"]" * 10**5,
        content + b"0" * 2**25,
    ):
        file.write_bytes(damaged)
        with pytest.raises(AdapterError, match=r"is damaged|has at most"):
            reader.read(tmp_path)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="is a pickle"):
        reader.read(tmp_path)
    os.mkfifo(file)
    with pytest.raises(AdapterError, match="not a regular file"):
        reader.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="is not JSON"):
        reader.read(tmp_path)


def test_adapters_of_embedding_and_head_equal_merged_weights(tmp_path):
    theirs = write_checkpoint(tmp_path / "base", "llama_bias")
    factors = vocabulary_factors(theirs) | random_factors(
        linear_modules(theirs, without=UNSUPPORTED)
    )
    folder = write_adapter(tmp_path / "adapter", factors)
    merged = load_model(write_merged(tmp_path / "merged", theirs, factors), **FLOAT32)
    model = load_with_adapters(tmp_path / "base", folder, folder, with_embeddings=True)
    runner, alone = PagedRunner(model), PagedRunner(merged)
    for slot in (1, 2):
        logits = runner.run(runner.add(PROMPTS[0], slot), 4)
        expected = alone.run(alone.add(PROMPTS[0]), 4)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    base = load_model(tmp_path / "base", **FLOAT32)
    plain = PagedRunner(base)
    logits = runner.run(runner.add(PROMPTS[0], 0), 4)
    torch.testing.assert_close(logits, plain.run(plain.add(PROMPTS[0]), 4), rtol=1e-4, atol=1e-4)
    with pytest.raises(AdapterError, match="needs --lora-embeddings"):
        load_with_adapters(tmp_path / "base", folder)


@pytest.mark.parametrize("kind", ["deepseek", "awq", "compressed-int4-channel"])
def test_adapters_of_quantised_weights_equal_those_of_dequantised_ones(tmp_path, kind):
    base, stored, plain = (tmp_path / name for name in ("base", "stored", "plain"))
    theirs = write_checkpoint(base, "qwen3", **WIDE)
    factors = random_factors(linear_modules(theirs, without=("lm_head",)), size=0.1)
    folder = write_adapter(tmp_path / "adapter", factors)
    stored.mkdir()
    if kind in FORMATS:
        values = write_quantized(base, stored, FORMATS[kind])
    else:
        values = quantize_checkpoint(base, stored, kind)
    write_plain(base, plain, values)
    logits = []
    for source, keeps in ((stored, True), (plain, None)):
        model = load_with_adapters(source, folder, keep_quantized=keeps)
        runner = PagedRunner(model)
        logits.append(runner.run(runner.add(PROMPTS[0], 1), 4))
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < (0.1 if kind == "deepseek" else 0.01)  # FP8 products round activations


def test_ranks_and_scales_of_single_modules_and_rslora(tmp_path):
    theirs = write_checkpoint(tmp_path / "base", "llama_bias")
    modules = linear_modules(theirs, without=("lm_head",))
    wide = {name: shape for name, shape in modules.items() if name.endswith("q_proj")}
    factors = random_factors(modules, size=0.1) | random_factors(wide, rank=8, size=0.1)
    config = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 3}, "use_rslora": True}
    write_adapter(tmp_path / "adapter", factors, **config)
    scaled = {
        name: (a, b * (3 / 8**0.5 if name in wide else 8 / 4**0.5))
        for name, (a, b) in factors.items()
    }
    merged = load_model(write_merged(tmp_path / "merged", theirs, scaled, scale=1.0), **FLOAT32)
    runner = PagedRunner(load_with_adapters(tmp_path / "base", tmp_path / "adapter"))
    alone = PagedRunner(merged)
    logits = runner.run(runner.add(PROMPTS[0], 1), 4)
    torch.testing.assert_close(logits, alone.run(alone.add(PROMPTS[0]), 4), rtol=1e-3, atol=1e-3)


def test_factors_that_exceed_the_dtype_of_the_model_are_refused(tmp_path):
    theirs = write_checkpoint(tmp_path / "base", "qwen3")
    modules = dict(list(linear_modules(theirs, without=("lm_head",)).items())[:1])
    [(name, (a, b))] = random_factors(modules).items()
    for number, large in enumerate(((a * 1e6, b), (a, b * 1e6))):
        folder = write_adapter(tmp_path / str(number), {name: large})
        with pytest.raises(AdapterError, match=r"exceed torch\.float16"):
            load_with_adapters(tmp_path / "base", folder, dtype=torch.float16)


def test_a_slot_that_is_filled_again_keeps_nothing_of_the_adapter_before(tmp_path):
    theirs = write_checkpoint(tmp_path / "base", "qwen3")
    modules = linear_modules(theirs, without=("lm_head",))
    few = dict(list(modules.items())[:3])
    model = load_model(tmp_path / "base", **FLOAT32)
    make_room(model, num_slots=1, max_rank=8)
    store = AdapterStore(model, torch.device("cpu"))
    answers = []
    for number, own in enumerate((modules, few)):
        factors = random_factors(own, rank=8 - 4 * number, seed=number)
        folder = write_adapter(tmp_path / f"a{number}", factors, rank=8 - 4 * number)
        store.begin_read(ReadAdapter(order_id=number + 1, path=str(folder)))
        while not (answer := list(store.finished())):
            time.sleep(0.01)
        answers += answer
        store.load([AdapterLoad(slot=0, digest=answer[0].digest)])
    assert [each.error for each in answers] == ["", ""]
    runner = PagedRunner(model)
    merged = load_model(write_merged(tmp_path / "m", theirs, factors, scale=2.0), **FLOAT32)
    alone = PagedRunner(merged)
    logits = runner.run(runner.add(PROMPTS[0], 1), 4)
    torch.testing.assert_close(logits, alone.run(alone.add(PROMPTS[0]), 4), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="is not here"):
        store.load([AdapterLoad(slot=0, digest=b"0" * 32)])
