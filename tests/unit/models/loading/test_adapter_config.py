"""Values of an adapter's modules are found as PEFT finds them, in files of any size."""

from models.loading.adapter_config import MAX_PATTERNS, ModuleValues

MODULE = "model.layers.1.self_attn.q_proj"


class Name(str):
    """A module's name that is compared with no name of a pattern."""

    __slots__ = ()

    def endswith(self, *_):
        raise AssertionError("one name after the other")


def test_whole_parts_at_the_end_count_and_the_first_of_several_names():
    values = ModuleValues({"proj": 1, "1.self_attn.q_proj": 2, "q_proj": 3, MODULE: 4, "other": 5})
    assert values.of(MODULE, 9) == 2
    assert values.of("q_proj", 9) == 3
    assert values.of("model.layers.2.self_attn.q_proj", 9) == 3
    assert values.of("model.layers.2.self_attn.k_proj", 9) == 9
    assert ModuleValues({MODULE: 4}).of(MODULE, 9) == 4
    assert ModuleValues({}).of(MODULE, 9) == 9


def test_names_are_not_tried_one_after_the_other():
    values = ModuleValues({f"layers.{i}.q_proj": i for i in range(MAX_PATTERNS)})
    assert values.of(Name(f"model.layers.{MAX_PATTERNS - 1}.q_proj"), -1) == MAX_PATTERNS - 1
