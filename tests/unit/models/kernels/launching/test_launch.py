"""Builds by Triton that a launch remembers; a kernel that only pretends to be one."""

import pytest
import torch

from models.kernels.launching import launch as launching
from models.kernels.launching.launch import Launch, forget_all_builds


def kernel_function(x_ptr, y_ptr, size, scale, dependent):
    """The parameters of the kernel below."""


class Kernel:
    """Takes launches like triton.jit's kernels, and makes a build of each."""

    fn = staticmethod(kernel_function)

    def __init__(self):
        self.made = []
        self.launched = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.made.append((grid, args, constants))
            return self.make()

        return launch

    def make(self):
        return Build(self, len(self.made))


class Build:
    def __init__(self, kernel, number):
        self._kernel = kernel
        self._number = number

    def __getitem__(self, grid):
        return lambda *args: self._kernel.launched.append((self._number, grid, args))


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def launch(kernel):
    return Launch(kernel, scale=3, dependent=False, num_warps=4)


X = torch.zeros(64)
GRID = (2, 1, 1)


def test_first_launch_is_tritons_and_later_ones_give_its_build_all_parameters(kernel, launch):
    launch(GRID, X, X, 16)
    launch((5, 1, 1), X, X, 16)
    assert kernel.made == [(GRID, (X, X, 16), {"scale": 3, "dependent": False, "num_warps": 4})]
    assert kernel.launched == [(1, (5, 1, 1), (X, X, 16, 3, False))]


@pytest.mark.parametrize(
    "other",
    [(X[1:], X, 16), (X, X[2:], 16), (X.half(), X, 16), (X, X.long(), 16), (X, X, 17), (X, X, 1)],
)
def test_what_triton_may_build_again_for_goes_to_triton(kernel, launch, other):
    launch(GRID, X, X, 16)
    launch(GRID, *other)
    assert [made[1] for made in kernel.made] == [(X, X, 16), other]
    launch(GRID, *other)
    assert [number for number, _, _ in kernel.launched] == [2]


def test_memory_that_is_aligned_alike_needs_no_new_build(kernel, launch):
    launch(GRID, X, X, 16)
    launch(GRID, torch.zeros(8), X[4:], 16)
    assert len(kernel.made) == 1


def test_what_is_remembered_stays_small(kernel, launch, monkeypatch):
    monkeypatch.setattr(launching, "MAX_BUILDS", 3)
    for size in (*range(10), 9):
        launch(GRID, X, X, size)
    assert len(kernel.made) == 10
    assert len(kernel.launched) == 1


def test_builds_that_are_forgotten_are_looked_up_again(kernel, launch):
    launch(GRID, X, X, 16)
    forget_all_builds()
    launch(GRID, X, X, 16)
    assert len(kernel.made) == 2


def test_a_launch_that_triton_skips_is_not_remembered(kernel, launch, monkeypatch):
    monkeypatch.setattr(Kernel, "make", lambda self: None)
    launch(GRID, X, X, 16)
    monkeypatch.undo()
    launch(GRID, X, X, 16)
    assert len(kernel.made) == 2
    assert not kernel.launched


def test_constants_before_other_parameters_are_refused(kernel):
    with pytest.raises(AssertionError, match="come last"):
        Launch(kernel, x_ptr=3, dependent=False)
