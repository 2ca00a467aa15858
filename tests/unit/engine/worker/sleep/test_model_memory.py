"""Weights whose memory is given back and taken again: the same bits at the same addresses."""

import pytest
import torch

from models.layers.adapter_room import adapted_layers, make_room
from models.loading.draft_model import load_draft_model
from models.loading.loader import load_model
from models.parallel.group import SINGLE
from scripts.quantize_tiny import FORMATS, write_quantized
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.runner.weight_store import WeightStore
from services.engine.worker.sleep.model_memory import ModelMemory
from services.engine.worker.sleep.releasable_memory import HostPages, zeros_from
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import EVERY_VARIANT, write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tensors_of(model):
    modules = (model, *model.draft_models)
    return [each for module in modules for each in (*module.parameters(), *module.buffers())]


def make_memory(config, model, num_host_bytes=2**40):
    weights = WeightStore(model, SINGLE, device=CPU, dtype=torch.float32)
    return ModelMemory(
        config,
        model,
        weights,
        device=CPU,
        dtype=torch.float32,
        is_shared=False,
        available_host_bytes=lambda: num_host_bytes,
    )


def check_both_levels(folder, model, **flags):
    """Checks that all tensors survive sleeping and waking, of which nothing is left between."""
    config = EngineConfig.from_flags(model=folder, device="cpu", enable_sleep=True, **flags)
    before = [each.clone() for each in tensors_of(model)]
    memory = make_memory(config, model)
    addresses = [each.data_ptr() for each in tensors_of(model)]
    for level in (1, 2):
        memory.sleep(level)
        assert memory.is_asleep
        assert not any(each.view(torch.uint8).any() for each in tensors_of(model) if each.dim())
        memory.wake()
        assert not memory.is_asleep
        for tensor, expected in zip(tensors_of(model), before, strict=True):
            assert tensor.stride() == expected.stride()
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    assert [each.data_ptr() for each in tensors_of(model)] == addresses
    return memory


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_weights_of_every_family_are_the_same_after_waking(tmp_path, variant):
    write_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    make_room(model, num_slots=2, max_rank=4)
    for layer in adapted_layers(model):
        layer.adapter_b.fill_(0.5)
    memory = check_both_levels(tmp_path, model)
    assert memory.num_bytes >= sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("form", FORMATS)
def test_weights_of_every_stored_format_are_the_same_after_waking(tmp_path, form):
    write_checkpoint(tmp_path / "plain", "llama", **WIDE)
    folder = tmp_path / "stored"
    write_quantized(tmp_path / "plain", folder, FORMATS[form])
    model = load_model(folder, device=CPU, dtype=torch.float32, keep_quantized=True)
    assert not check_both_levels(folder, model).is_asleep


def test_weights_that_are_rounded_while_loading_are_the_same_after_waking(tmp_path):
    write_checkpoint(tmp_path, "qwen3", **WIDE)
    model = load_model(
        tmp_path, device=CPU, dtype=torch.float32, rounds_to_fp8=True, keep_quantized=True
    )
    check_both_levels(tmp_path, model)


def test_a_small_models_weights_come_from_its_own_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "large", "llama_tied")
    write_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1)
    model = load_model(tmp_path / "large", device=CPU, dtype=torch.float32)
    small = load_draft_model(
        tmp_path / "small", model, device=CPU, dtype=torch.float32, max_positions=64
    )
    model.draft_models = (small,)
    flags = {"draft_model": tmp_path / "small", "num_speculative_tokens": 2}
    memory = check_both_levels(tmp_path / "large", model, **flags)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    memory.sleep(2)
    assert memory._asleep is not None
    assert memory._asleep.copy.num_bytes < 0.2 * memory.num_bytes


def test_an_engine_that_takes_turns_keeps_the_hosts_memory_for_its_next_sleep(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    flags = {"enable_sleep": True, "start_asleep": True}
    config = EngineConfig.from_flags(model=tmp_path, device="cpu", **flags)
    memory = make_memory(config, model)
    weight = model.model.embed_tokens.weight
    copies = []
    for level, value in ((1, 2.0), (1, 3.0), (2, 4.0), (1, 5.0)):
        with torch.no_grad():
            weight[0, 0] = value
        memory.sleep(level)
        assert memory._asleep is not None
        copies.append(memory._asleep.copy)
        memory.wake()
        assert (weight[0, 0] == value) == (level == 1)
    assert copies[0] is copies[1]
    assert len(set(copies)) == 3


def test_weights_without_a_checkpoint_stay_on_the_host_at_both_levels(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32, load_format="dummy")
    check_both_levels(tmp_path, model, load_format="dummy")


def test_zeros_come_from_releasable_memory_and_are_zeros_again():
    memory = HostPages()
    with zeros_from(memory):
        tensors = [
            torch.zeros(3, 5, dtype=torch.bfloat16, device=CPU),
            torch.zeros((2, 7), dtype=torch.float8_e4m3fn, device=CPU),
            torch.zeros(0, 4, dtype=torch.float32, device=CPU),
        ]
        other = torch.ones(4)
    assert [tuple(each.shape) for each in tensors] == [(3, 5), (2, 7), (0, 4)]
    tensors[0].fill_(2.0)
    addresses = [each.data_ptr() for each in tensors]
    memory.release()
    memory.restore()
    assert not tensors[0].any()
    assert [each.data_ptr() for each in tensors] == addresses
    assert other.sum() == 4
    assert memory.num_bytes >= 30 + 14


def test_a_host_without_memory_for_the_weights_refuses_the_first_level_alone(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    config = EngineConfig.from_flags(model=tmp_path, device="cpu", enable_sleep=True)
    num_bytes = sum(each.nbytes for each in model.parameters())
    memory = make_memory(config, model, num_host_bytes=num_bytes // 2)
    with pytest.raises(MemoryError, match="of the host's memory"):
        memory.sleep(1)
    assert not memory.is_asleep
    memory.sleep(2)
    assert memory.is_asleep
