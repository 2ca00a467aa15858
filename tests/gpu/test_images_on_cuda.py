"""Prompts with images on a GPU: encoder, graphs and compiled pieces give the tokens of a CPU."""

import pytest
import torch
import transformers

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import ForwardContext, ImageMetadata, forward_context
from models.loading.loader import load_model
from models.ops.elementwise.image_rows import add_image_rows, write_image_rows
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.image_prompts import NUM_TEXT_TOKENS, Prompt, prompt_images, random_picture
from tests.support.vision_variants import VARIANTS, write_vision_checkpoint

pytestmark = pytest.mark.gpu

NUM_OUTPUT = 24
SIZES = {
    "max_model_len": 256, "block_size": 16, "num_blocks": 400, "num_encoder_pages": 16,
}  # fmt: skip
EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
SIZES_OF_GRAPHS = {"cudagraph_capture_sizes": (2, 4, 8, 64)}
CONFIGS = {
    "eager": EAGER,
    "graphs": compilation_config(cudagraph_mode=CUDAGraphMode.FULL, **SIZES_OF_GRAPHS),
    "pieces": compilation_config(
        level=CompilationLevel.PIECEWISE,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        **SIZES_OF_GRAPHS,
    ),
    "compiled": compilation_config(
        level=CompilationLevel.PIECEWISE,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        **SIZES_OF_GRAPHS,
    ),
}


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def seeing(request, tmp_path_factory):
    """A variant's folder, prompts, and their tokens by an engine on a CPU."""
    row = VARIANTS[request.param]
    if not hasattr(transformers, f"{row.name}ForConditionalGeneration"):
        pytest.skip(f"transformers {transformers.__version__} cannot write {row.name}")
    folder = tmp_path_factory.mktemp(request.param)
    write_vision_checkpoint(folder, request.param)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, sees_images=True)
    pictures = [random_picture(model, grid, seed) for seed, grid in enumerate(row.grids)]
    first = Prompt.of(model, pictures[:1], seed=1)
    other = random_picture(model, row.grids[0], seed=77)
    prompts = [
        first,
        Prompt.of(model, pictures, seed=2),
        Prompt(first.token_ids, [other], first.offsets),
        Prompt([5, 6, 7, 8, 9] * 9, [], []),
    ]
    asked = [(prompt.token_ids, prompt_images(model, prompt)) for prompt in prompts]
    engine = GraphEngine(folder, EAGER, max_num_batched_tokens=64, **SIZES)
    return folder, asked, run(engine, asked), row.least_step


def run(engine, asked):
    prompts, images = zip(*asked, strict=True)
    vocab_size = engine.limits.vocab_size
    banned = frozenset(range(NUM_TEXT_TOKENS, vocab_size))
    return engine.run(prompts, NUM_OUTPUT, images=images, banned_token_ids=banned)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 7])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_float32_tokens_are_those_of_the_cpu(seeing, config, max_num_batched_tokens, tmp_path):
    folder, asked, expected, least_step = seeing
    max_num_batched_tokens = max(max_num_batched_tokens, least_step)
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    sizes = SIZES | {"max_num_batched_tokens": max_num_batched_tokens, "device": "cuda"}
    engine = GraphEngine(folder, config, **sizes)
    engine.capture()
    assert not engine.faults
    assert run(engine, asked) == expected
    assert run(engine, asked[::-1]) == expected[::-1]


def test_bfloat16_runs_graphs_that_pass_their_tests(seeing, tmp_path):
    folder, asked, expected, _ = seeing
    config = CONFIGS["compiled"].model_copy(update={"compile_cache_dir": tmp_path})
    sizes = SIZES | {"max_num_batched_tokens": 64, "device": "cuda", "dtype": torch.bfloat16}
    engine = GraphEngine(folder, config, **sizes)
    engine.capture()
    assert not engine.faults
    outputs = run(engine, asked)
    assert [len(each) for each in outputs] == [len(each) for each in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 33, 2048])
def test_rows_replace_and_add_inside_a_graph(dtype, num_tokens):
    size, levels = 96, 3
    rows = torch.randn(50, levels * size, device="cuda").to(dtype)
    index = torch.full((num_tokens + 5,), -1, dtype=torch.int32, device="cuda")
    hidden = torch.randn(num_tokens, size, device="cuda").to(dtype)
    metadata = ImageMetadata(rows=rows, index=index, rope_positions=None)
    context = ForwardContext(
        context=None, attn_metadata=None, kv_cache_data=[], image_metadata=metadata
    )
    result = hidden.clone()

    def program():
        result.copy_(hidden)
        with forward_context(context):
            write_image_rows(result)
            add_image_rows(result, 2)

    program()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        program()
    for seed in range(3):
        torch.manual_seed(seed)
        index[:num_tokens] = torch.randint(-1, 50, (num_tokens,), device="cuda")
        graph.replay()
        chosen = index[:num_tokens].long()
        is_image = (chosen >= 0).unsqueeze(1)
        own = rows[chosen.clamp(min=0)]
        expected = torch.where(is_image, own[:, :size] + own[:, 2 * size :], hidden)
        assert torch.equal(result, expected)
