import pytest
import torch

from models.ops.sampling.top_logprobs import top_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ties_come_in_the_order_of_their_ids(dtype):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]], dtype=dtype)
    chosen, ids, top = top_logprobs(logits, torch.tensor([4]), 4)
    assert ids.tolist() == [[1, 3, 2, 4]]
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(top, expected.gather(1, ids))
    torch.testing.assert_close(chosen, expected[:, 4])
