"""Models that see images compile like others; loaded for text alone, they have the same graph."""

import pytest
import torch

from models.loading.loader import load_model
from services.engine.compilation.trace.backend import trace_model
from services.engine.compilation.trace.tracing import trace_programs
from tests.support.compilation import compilation_config
from tests.support.compiled_models import compile_at
from tests.support.image_prompts import ImageRunner, Prompt, random_picture
from tests.support.paged_runner import PagedRunner
from tests.support.vision_variants import VARIANTS, write_vision_checkpoint

NUM_LAYERS = 9
TEXT = [5, 17, 3, 44, 2, 9, 9, 31, 60]
EXAMPLES = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)]
OPERATORS = ("image_rows", "rotation_rows")


OTHERS = ("qwen3_vl_moe", "qwen3_5_moe_odd", "qwen2_5_vl", "ministral3", "gemma3_odd", "gemma4_odd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_vision_checkpoint(folder, "qwen3_vl", num_hidden_layers=NUM_LAYERS)
    return folder


def load(folder, *, sees_images):
    device = torch.device("cpu")
    return load_model(folder, device=device, dtype=torch.float32, sees_images=sees_images)


def logits(folder, prepare=lambda model: None, variant="qwen3_vl"):
    model = load(folder, sees_images=True)
    pictures = [random_picture(model, grid) for grid in VARIANTS[variant].grids]
    prompts = [Prompt.of(model, pictures), Prompt.of(model, pictures[1:], seed=1)]
    prepare(model)
    runner = ImageRunner(model, prompts)
    first, second = runner.sequences
    seen = [runner.step([(first, 9), (second, 3)]), runner.step([(first, 1), (second, 11)])]
    text = runner.add(TEXT)
    return [each for step in seen for each in step] + [runner.run(text, 4)]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_level_gives_the_bits_of_eager(folder, level):
    compiled, eager = logits(folder, compile_at(level)), logits(folder)
    assert all(map(torch.equal, compiled, eager))


@pytest.mark.families
@pytest.mark.parametrize("variant", OTHERS)
def test_pieces_of_every_family_give_the_bits_of_eager(tmp_path, variant):
    write_vision_checkpoint(tmp_path, variant)
    compiled, eager = (logits(tmp_path, *each, variant=variant) for each in ((compile_at(3),), ()))
    assert all(map(torch.equal, compiled, eager))


def test_a_few_layers_are_traced_for_all(folder):
    traced = trace_programs(
        load(folder, sees_images=True),
        compilation_config(level=3, use_inductor=False),
        example_inputs=EXAMPLES,
        max_num_tokens=64,
    )
    assert len(traced.layers) == NUM_LAYERS
    names = [str(node.target) for node in traced.trace.graph.graph.nodes]
    assert sum("unified_attention" in name for name in names) < NUM_LAYERS
    levels = len(VARIANTS["qwen3_vl"].vision["deepstack_visual_indexes"])
    assert sum("add_image_rows" in name for name in names) == levels


def test_a_model_loaded_for_text_has_no_operator_for_images(folder):
    model = load(folder, sees_images=False)
    assert model.visual is None
    graph = trace_model(model, EXAMPLES).graph.graph
    assert not any(name in str(node.target) for node in graph.nodes for name in OPERATORS)


def test_text_has_the_bits_of_a_model_loaded_for_text(folder):
    runner = PagedRunner(load(folder, sees_images=False))
    assert torch.equal(runner.run(runner.add(TEXT), 4), logits(folder)[-1])
