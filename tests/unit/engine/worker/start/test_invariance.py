"""--batch-invariant at the start of a worker."""

import pytest
import torch

from models.batch_invariance import is_batch_invariant, use_batch_invariance
from models.config import ModelConfig
from models.layers.experts import Experts
from models.loading.model_config import read_model_config
from services.engine.config.engine_config import EngineConfig
from services.engine.model_fit import check_batch_invariance
from services.engine.worker.start.invariance import check_invariant_weights
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.gpu_facts import use_gpu
from tests.support.random_checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def _off_again():
    yield
    use_batch_invariance(is_on=False)


def loaded(folder, **flags):
    return LoadedModel.load(EngineConfig.from_flags(model=folder, device="cpu", **flags))


def test_the_flag_turns_the_mode_on_without_inductor(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    flags = {"compilation_level": 3, "compile_cache_dir": tmp_path / "compiled"}
    model = loaded(tmp_path, batch_invariant=True, **flags)
    assert is_batch_invariant()
    assert not model.config.compilation.use_inductor
    assert loaded(tmp_path).config.compilation.use_inductor
    assert not is_batch_invariant()


def test_settings_of_inductor_are_refused(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    flags = {"compilation_level": 3, "inductor_compile_config": {"max_autotune": True}}
    with pytest.raises(ValueError, match=r"inductor.compile.config.*with Inductor"):
        loaded(tmp_path, batch_invariant=True, **flags)


@pytest.mark.parametrize(
    ("variant", "num_ranks", "reason"),
    [
        ("deepseek_v4", 1, "which DeepseekV4ForCausalLM has"),
        ("olmo2", 2, "Olmo2ForCausalLM with --tensor-parallel-size 2"),
    ],
)
def test_families_that_depend_on_the_batch_are_refused(tmp_path, variant, num_ranks, reason):
    write_checkpoint(tmp_path, variant)
    with pytest.raises(ValueError, match=reason):
        check_batch_invariance(
            ModelConfig.from_folder(tmp_path), num_ranks=num_ranks, moves_experts=False
        )


def test_modules_of_transformers_are_refused(tmp_path):
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="transformers' modules, which run LlamaForCausalLM"):
        check_batch_invariance(
            read_model_config(tmp_path, "transformers"), num_ranks=1, moves_experts=False
        )


@pytest.mark.parametrize(
    ("keep", "capability", "dtype", "is_refused"),
    [
        ("keep_fp8", (8, 0), torch.float32, False),
        ("keep_mxfp4", (9, 0), torch.bfloat16, False),
        ("keep_mxfp4", (9, 0), torch.float16, True),
        ("keep_mxfp4", (10, 0), torch.bfloat16, True),
    ],
)
def test_experts_of_4_bits_need_a_kernel_for_the_mode(
    tmp_path, monkeypatch, keep, capability, dtype, is_refused
):
    write_checkpoint(tmp_path, "qwen3_moe")
    model = loaded(tmp_path).model
    experts = next(each for each in model.modules() if isinstance(each, Experts))
    experts.keep_fp8(None) if keep == "keep_fp8" else experts.keep_mxfp4()
    check_invariant_weights(model, dtype)
    experts.to("meta")  # in place of a GPU
    use_gpu(monkeypatch, capability, anywhere=True)
    if is_refused:
        with pytest.raises(ValueError, match="packed in 4 bits on a Hopper GPU in bfloat16, not"):
            check_invariant_weights(model, dtype)
    else:
        check_invariant_weights(model, dtype)
