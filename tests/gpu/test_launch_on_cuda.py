"""Launches that skip Triton's own lookup run the build that Triton would have run."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernel():
    @triton.jit(do_not_specialize=["num_elements"])
    def scale_kernel(x_ptr, y_ptr, factor, stride, num_elements, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        x = tl.load(x_ptr + at * stride, mask=at < num_elements, other=0.0)
        tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < num_elements)

    return scale_kernel


@pytest.fixture
def launch(kernel):
    from models.kernels.launching.launch import Launch

    return Launch(kernel, block=128, num_warps=1)


def run(launch, x, *, offset=0, stride=1, factor=2.0, dtype=torch.float32):
    """Returns every stride-th number of x from offset on, times factor."""
    x = x.to(dtype)[offset:]
    y = torch.zeros(-(-len(x) // stride), dtype=dtype, device=x.device)
    launch((-(-len(y) // 128), 1, 1), x, y, factor, stride, len(y))
    return y


def test_any_alignment_stride_length_and_dtype_comes_out_right_twice(launch):
    x = torch.arange(1000, device="cuda").float() % 97
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16):
            for offset in (0, 1, 4, 8, 3):
                for stride in (1, 2, 16, 7, 1):
                    y = run(launch, x, offset=offset, stride=stride, dtype=dtype)
                    expected = x[offset::stride] * 2
                    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=0)


def test_a_build_that_is_known_asks_triton_no_more(launch, monkeypatch):
    x = torch.arange(256, device="cuda").float()
    first = run(launch, x)
    monkeypatch.setattr(launch, "_kernel", None)
    assert run(launch, x).equal(first)
    with pytest.raises(TypeError):
        run(launch, x, offset=1)


def test_launches_follow_the_current_stream_and_can_be_captured(launch):
    x = torch.arange(256, device="cuda").float()
    y = torch.zeros_like(x)
    launch((2, 1, 1), x, y, 2.0, 1, 256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((2, 1, 1), x, y, 2.0, 1, 256)
    x.fill_(5.0)
    y.zero_()
    graph.replay()
    assert y.tolist() == [10.0] * 256


def test_other_threads_share_what_is_known(launch):
    from concurrent.futures import ThreadPoolExecutor

    x = torch.arange(256, device="cuda").float()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda offset: run(launch, x, offset=offset), range(8)))
    for offset, result in enumerate(results):
        assert result.equal(x[offset:] * 2)
