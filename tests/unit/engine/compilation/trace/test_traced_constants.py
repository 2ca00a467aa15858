"""Constants of a model stay constants, whatever Dynamo saw before in the same process."""

import torch

from tests.support.compiled_models import compile_at
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver


def outputs(folder, **options):
    driver = StepDriver(folder, **options)
    state = driver.add([5, 17, 3])
    driver.step([(state, 3)])
    driver.decode([state], 6)
    return state.output


def test_models_that_differ_in_a_number_are_traced_one_after_the_other(tmp_path):
    torch.set_num_threads(1)
    for eps in (1e-5, 1e-6):
        write_checkpoint(tmp_path / str(eps), "gpt_oss", rms_norm_eps=eps)
    # Level 1 leaves Dynamo's records of the code, with the number of its model.
    outputs(tmp_path / "1e-05", prepare=compile_at(1))
    folder = tmp_path / "1e-06"
    assert outputs(folder, prepare=compile_at(3)) == outputs(folder)
