import pytest
import torch

from models.parallel.collectives import without_other_ranks
from models.parallel.group import PipelineStage
from models.parallel.intermediate_tensors import IntermediateTensors

SIZES = {"max_num_tokens": 8, "hidden_size": 3}
KIND = {"dtype": torch.float32, "device": torch.device("cpu")}


def stages(total, size, num_layers=()):
    """Returns the layers of each stage."""
    each = (PipelineStage(rank=rank, size=size, num_layers=num_layers) for rank in range(size))
    return [list(stage.layers_of(total)) for stage in each]


def test_stages_have_equal_layers_or_the_given_ones():
    assert stages(5, 1) == [[0, 1, 2, 3, 4]]
    assert stages(5, 2) == [[0, 1, 2], [3, 4]]
    assert stages(8, 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert stages(5, 3, (1, 3, 1)) == [[0], [1, 2, 3], [4]]


def test_stages_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ValueError, match="2 layers are too few for 3 pipeline stages"):
        stages(2, 3)
    with pytest.raises(ValueError, match=r"stages of 1, 3 layers do not hold the model's 5 layers"):
        stages(5, 2, (1, 3))


def test_padding_of_what_was_received_is_zero():
    handed = IntermediateTensors(PipelineStage(rank=1, size=2), **SIZES, **KIND)
    handed.received.fill_(torch.nan)
    with without_other_ranks():
        handed.receive(2, num_padded=4)
    assert handed.received[:2].isnan().all()  # no rank has sent anything
    assert not handed.received[2:4].any()


def test_the_first_stage_receives_nothing():
    handed = IntermediateTensors(PipelineStage(rank=0, size=2), **SIZES, **KIND)
    assert handed.received is None
    with without_other_ranks():
        handed.receive(2, num_padded=0)
        handed.send(torch.ones(2, 3))
