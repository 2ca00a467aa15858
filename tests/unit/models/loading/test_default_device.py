"""Stored tensors stay where they are, whatever device new tensors have by default."""

import pytest
import torch

from models.loading import loader
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

STAGES = ("keep_stored_formats", "plan_loads", "check_fit", "load_weights")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write_checkpoint(folder, "llama", **WIDE)
    return folder


@pytest.fixture
def _another_default(monkeypatch):
    """A model on a GPU is loaded with the GPU as the default, and stored tensors are on the CPU."""

    def elsewhere(stage):
        def run(*args, **options):
            with torch.device("meta"):
                return stage(*args, **options)

        return run

    for name in STAGES:
        monkeypatch.setattr(loader, name, elsewhere(getattr(loader, name)))


@pytest.mark.usefixtures("_another_default")
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(form, plain, tmp_path):
    write_quantized(plain, tmp_path, FORMATS[form])
    for is_kept in (True, False):
        model = loader.load_model(
            tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16, keep_quantized=is_kept
        )
        assert not any(param.is_meta for param in model.parameters())
