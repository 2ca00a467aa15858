"""One rank of a tensor-parallel forward pass on the CPU.

python -m tests.support.tensor_parallel_rank RANK SIZE CHECKPOINT RENDEZVOUS_FILE OUTPUT_FILE
    [keep_quantized] [invariant] [compiled] [shares_rows] [images]

With `images` it writes the logits of a prompt with images; with `invariant` those of several chunk
sizes and of a batch, stacked.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from models.batch_invariance import use_batch_invariance
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup
from tests.support.image_prompts import ImageRunner, Picture, Prompt, random_picture
from tests.support.paged_runner import PagedRunner

TOKEN_IDS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]


def _in_chunks(model, size: int) -> torch.Tensor:
    runner = PagedRunner(model)
    return runner.run(runner.add(TOKEN_IDS), chunk_size=size)


def _beside_others(model) -> torch.Tensor:
    runner = PagedRunner(model)
    sequences = [runner.add(ids) for ids in (TOKEN_IDS[3:], TOKEN_IDS, TOKEN_IDS[:2])]
    return runner.step([(each, len(each.token_ids)) for each in sequences])[1]


def pictures_of(model) -> list[Picture]:
    """Returns two images of a model's prompt."""
    return [random_picture(model, grid, seed=grid[1]) for grid in ((4, 6), (2, 10))]


def _with_images(model) -> torch.Tensor:
    runner = ImageRunner(model, [Prompt.of(model, pictures_of(model))])
    return runner.run(runner.sequences[0], chunk_size=7)


def main() -> None:
    rank, size, checkpoint, rendezvous, output, *options = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size)
    )
    group = ParallelGroup(rank=int(rank), size=int(size))
    model = load_model(
        Path(checkpoint),
        device=torch.device("cpu"),
        dtype=torch.float32,
        group=group,
        keep_quantized="keep_quantized" in options,
        sees_images="images" in options,
    )
    if "compiled" in options:
        # Only here: it imports torch's compiler, which takes as long as torch.
        from tests.support.compiled_models import compile_at

        compile_at(3)(model)
    if "images" in options:
        torch.save(_with_images(model), output)
    elif "invariant" in options:
        use_batch_invariance(is_on=True)
        torch.save(
            torch.stack([_in_chunks(model, size) for size in (10, 4, 1)] + [_beside_others(model)]),
            output,
        )
    else:
        torch.save(_in_chunks(model, 4), output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # as in gloo_ranks.LEAVE
