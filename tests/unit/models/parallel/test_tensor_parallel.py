import pytest
import torch

from models.loading.loader import load_model
from models.ops.ranks.all_gather import all_gather
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.collectives import num_issued, without_other_ranks
from models.parallel.group import ParallelGroup
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.gloo_ranks import run_commands
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import transformers_logits, write_checkpoint
from tests.support.tensor_parallel_rank import TOKEN_IDS

MORE_STATES = (
    *("bailing_hybrid", "falcon_h1", "granite_hybrid", "lfm2", "lfm2_moe", "mamba2", "minimax"),
    *("nemotron_h_moe", "olmo_hybrid", "qwen3_5_moe"),
)
RECENT = (
    *("glm4", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "minimax_m2", "ministral3", "mistral4"),
    *("solar_open", "gemma4", "gemma4_moe", "gemma4_shared", "apertus", "cohere2"),
    *("deepseek_v4", "hy_v4", "llama4", "mimo_v2", "minimax_m3"),
)


def run_two_ranks(folder, tmp_path, *options):
    """Returns each rank's logits of TOKEN_IDS."""
    outputs = [tmp_path / f"logits_{rank}.pt" for rank in range(2)]
    run_commands(
        ["tests.support.tensor_parallel_rank", str(rank), "2", str(folder),
         str(tmp_path / "rendezvous"), str(output), *options]
        for rank, output in enumerate(outputs)
    )  # fmt: skip
    return [torch.load(output) for output in outputs]


@pytest.mark.parametrize(
    "variant",
    [
        *("llama_one_kv_head", "gpt_oss", "deepseek_v3", "gemma2", "olmo2_odd", "phi3"),
        *("qwen3_next", "qwen3_5", "granite_hybrid_odd", "kimi_linear"),
        *(pytest.param(name, marks=pytest.mark.families) for name in (*MORE_STATES, *RECENT)),
    ],
)
def test_two_ranks_give_the_logits_of_transformers(checkpoint, tmp_path, variant):
    folder, reference = checkpoint(variant)
    expected = transformers_logits(reference, TOKEN_IDS)
    for logits in run_two_ranks(folder, tmp_path):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "gpt_oss"])
def test_two_ranks_compute_the_same_bits_in_every_batch(checkpoint, tmp_path, variant):
    folder, _ = checkpoint(variant)
    for logits in run_two_ranks(folder, tmp_path, "invariant"):
        assert all(torch.equal(each, logits[0]) for each in logits)


@pytest.mark.parametrize("options", [(), ("compiled",)])
def test_two_ranks_with_fp8_blocks_give_the_logits_of_one(tmp_path, options):
    plain, folder = tmp_path / "plain", tmp_path / "fp8"
    folder.mkdir()
    # Half of every projection is whole blocks, so that both ranks keep what one rank keeps.
    shape = WIDE | {"intermediate_size": 512, "num_key_value_heads": 4}
    write_checkpoint(plain, "llama", **shape)
    quantize_checkpoint(plain, folder, "deepseek")
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, keep_quantized=True)
    runner = PagedRunner(model)
    expected = runner.run(runner.add(TOKEN_IDS), chunk_size=4)
    for logits in run_two_ranks(folder, tmp_path, "keep_quantized", *options):
        # Sums in another order may round an activation to its neighbour in FP8.
        assert (logits - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("form", ["awq", "compressed-int4-channel"])
def test_two_ranks_with_4_bits_give_the_logits_of_one(tmp_path, form):
    plain, folder = tmp_path / "plain", tmp_path / "packed"
    write_checkpoint(plain, "llama", **WIDE)
    write_quantized(plain, folder, FORMATS[form])
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, keep_quantized=True)
    assert model.model.layers[0].mlp.down_proj.method.packing is not None
    runner = PagedRunner(model)
    expected = runner.run(runner.add(TOKEN_IDS), chunk_size=4)
    for logits in run_two_ranks(folder, tmp_path, "keep_quantized"):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_a_model_of_one_rank_calls_no_collective(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v3")
    runner = PagedRunner(load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32))
    before = num_issued()
    runner.run(runner.add(TOKEN_IDS), chunk_size=4)
    assert num_issued() == before


def test_collectives_without_other_ranks_keep_their_shapes():
    x = torch.arange(6.0).view(2, 3)
    with without_other_ranks():
        assert torch.equal(all_reduce(x, "nobody"), x)
        assert torch.equal(all_gather(x, "nobody", 2), torch.cat((x, x), dim=-1))


def test_collectives_are_operators_with_fakes():
    x = torch.ones(2, 3)
    with without_other_ranks():
        torch.library.opcheck(torch.ops.octavo.all_reduce.default, (x, "nobody"))
        torch.library.opcheck(torch.ops.octavo.all_gather.default, (x, "nobody", 2))


def test_unequal_shares_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="9 attention heads cannot be shared equally by 2 ranks"):
        ParallelGroup(rank=0, size=2).split(9, "attention heads")


def test_replicas_hold_the_same_share():
    group = ParallelGroup(rank=3, size=4)
    assert group.split(2, "kv heads", replicas=2) == 1
    with pytest.raises(ValueError, match="3 kv heads"):
        group.split(3, "kv heads", replicas=2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank is {rank}"):
        ParallelGroup(rank=rank, size=2)
