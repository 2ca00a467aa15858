"""The checkpoint that these tests run."""

import pytest
import torch

from tests.support.random_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3")
    return folder
