import pytest

from models.cudagraph_mode import CUDAGraphMode

M = CUDAGraphMode


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (M.NONE, M.NONE, M.NONE),
        (M.PIECEWISE, M.PIECEWISE, M.PIECEWISE),
        (M.FULL, M.FULL, M.FULL),
        (M.FULL_DECODE_ONLY, M.FULL, M.NONE),
        (M.FULL_AND_PIECEWISE, M.FULL, M.PIECEWISE),
    ],
)
def test_each_mode_says_how_decodes_and_other_steps_run(mode, decode, mixed):
    assert (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed)
    assert mode.separate_routine() == (decode is not mixed)
    assert mode.requires_piecewise_compilation() == (M.PIECEWISE in (decode, mixed))
    assert mode.has_full_cudagraphs() == (M.FULL in (decode, mixed))
    assert mode.max_cudagraph_mode() is decode
    assert bool(mode) == (mode is not M.NONE)


def test_one_forward_pass_has_a_plain_mode():
    assert M.valid_runtime_modes() == {mode for mode in M if mode.is_valid_runtime_mode()}
    assert M.valid_runtime_modes() == {M.NONE, M.PIECEWISE, M.FULL}
    assert str(M.FULL_DECODE_ONLY) == "FULL_DECODE_ONLY"
