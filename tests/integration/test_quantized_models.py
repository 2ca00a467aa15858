"""Quantised checkpoints through the real engine: tokens are those of the dequantised model."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.quantize_tiny import FORMATS, TINY, write_plain, write_quantized
from tests.support.engine_client import engine_stub, generate, get_stats
from tests.support.processes import ServiceFailedError, start_engine

PROMPTS = [[5, 6, 7, 8], list(range(20, 60)), [9] * 3]
NUM_OUTPUT = 24
FLAGS = {"device": "cpu", "num_kv_blocks": 64, "dtype": "float32", "enforce_eager": True}
SERVED = (
    "modelopt-fp8",
    "modelopt-nvfp4",
    "compressed-mixed",
    "quark-mxfp4",
    "awq",
    "gptq-act-order",
    "auto-round",
    "compressed-int8",
)
"""One format of each packing; unit tests load all of them."""


async def serve(**flags):
    async with start_engine(**FLAGS, **flags) as engine, engine_stub(engine.address) as stub:
        calls = (
            generate(stub, prompt, max_tokens=NUM_OUTPUT, ignore_eos=True) for prompt in PROMPTS
        )
        replies = await asyncio.gather(*calls)
        stats = await get_stats(stub)
        return [list(reply.token_ids) for reply in replies], stats, engine.log


def reference(folder):
    """Returns transformers' greedy tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in PROMPTS:
        made = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_OUTPUT,
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("form", SERVED)
async def test_tokens_are_those_of_the_dequantised_model(form, tmp_path):
    plain = write_quantized(TINY, tmp_path / "stored", FORMATS[form])
    write_plain(TINY, tmp_path / "plain", plain)
    outputs, stats, log = await serve(model=tmp_path / "stored")
    assert outputs == reference(tmp_path / "plain")
    kinds = {(each.stored, each.kept) for each in stats.weights}
    assert ("bfloat16", "float32") in kinds
    assert len(kinds) > 1
    # ModelOpt's NVFP4 and Quark's MXFP4 are made for activations of 4 bits, one for integers.
    is_unrounded = "fp4" in form or form == "compressed-int8"
    assert ("activations_not_rounded" in log) == is_unrounded
    assert ("zero_points_assumed" in log) == (form in ("gptq-zeros", "gptq-act-order"))


async def test_a_plain_checkpoint_is_rounded_while_it_loads(tmp_path):
    plain = write_quantized(TINY, tmp_path / "stored", FORMATS["compressed-fp8-channel"])
    write_plain(TINY, tmp_path / "plain", plain)
    outputs, *_ = await serve(model=TINY, quantization="fp8")
    assert outputs == reference(tmp_path / "plain")


def test_a_format_that_is_not_supported_ends_the_start(tmp_path):
    form = FORMATS["awq"]
    write_quantized(TINY, tmp_path, form)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"awq"', '"bitsandbytes"'))
    engine = start_engine(model=tmp_path, device="cpu")
    with pytest.raises(ServiceFailedError, match="quant_method is 'bitsandbytes'"):
        engine.__enter__()
