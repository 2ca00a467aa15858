import torch

from models.loading.loader import load_model
from services.engine.worker.kv_memory import probe_runner
from services.engine.worker.rehearsal import OTHER_STEPS, build_kernels
from services.engine.worker.step_arrays import StepLimits
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")


def test_steps_of_all_kinds_run_at_the_same_time_on_runners_of_their_own(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    for max_num_seqs, max_num_batched_tokens, num_runners in [
        (256, 2048, 6),
        (1, 4, 0),
        (40, 40, 4),
    ]:
        limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=128,
            block_size=16,
            vocab_size=97,
        )
        made = []

        def make_runner(limits=limits, made=made):
            made.append(probe_runner(model, limits=limits, dtype=torch.float32, device=CPU))
            return made[-1]

        build_kernels(make_runner, limits, OTHER_STEPS)
        assert len(made) == num_runners
