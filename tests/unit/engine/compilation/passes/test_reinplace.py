"""Inductor calls our operators that write in place without copies of what they write to."""

import re

from services.engine.compilation.pieces import compiler_manager
from tests.support.compiled_models import compile_at
from tests.support.plain_model import PlainModel


def test_generated_code_copies_neither_the_residual_nor_the_output_of_attention(
    tmp_path, monkeypatch
):
    # Such pieces need no compiler; here Inductor gets them all the same.
    monkeypatch.setattr(compiler_manager, "only_calls_own_kernels", lambda graph: False)
    compile_at(3, use_inductor=True, debug_dump_path=tmp_path)(PlainModel())
    codes = [path.read_text() for path in (tmp_path / "rank_0").glob("*_generated_*.py")]
    code = "\n".join(codes)
    assert len(re.findall(r"octavo\.linear_residual_norm_linear\.default\(", code)) >= 2
    assert "auto_functionalized" not in code
    assert not re.search(r"clone|(?<!_to_)copy_", code)  # kernels are named by what they compute
