"""One GGUF model is found among files, or the choice is left to the operator."""

import pytest

from services.hub.gguf_files import choose_files, model_name, shard_names
from services.hub.names import HubError

SHARDS = tuple(f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3))


def test_the_only_model_is_found_beside_other_files():
    names = ["README.md", "mmproj-f16.gguf", "model-q8_0.gguf"]
    assert choose_files("here", names) == ("model-q8_0.gguf",)


def test_all_shards_are_found_in_order():
    assert choose_files("here", SHARDS[::-1]) == SHARDS
    in_folder = [f"q8/{name}" for name in SHARDS]
    assert choose_files("here", in_folder, "q8/" + SHARDS[0]) == tuple(in_folder)
    assert model_name(SHARDS[1]) == "big"


def test_several_models_need_a_choice():
    names = ["a.gguf", "b.gguf", *SHARDS]
    with pytest.raises(HubError, match=r"choose by --gguf-file: a.gguf, b.gguf, big-00001"):
        choose_files("here", names)
    assert choose_files("here", names, "b.gguf") == ("b.gguf",)


@pytest.mark.parametrize(
    ("names", "wanted", "reason"),
    [
        ((), "", "has no GGUF model"),
        (("a.gguf",), "b.gguf", "has no b.gguf; its GGUF files are a.gguf"),
        (("a.gguf", "config.json"), "config.json", "has no config.json"),
        (SHARDS[:2], "", "lacks 1 of 3 shards: big-00003-of-00003.gguf"),
    ],
)
def test_what_is_missing_is_named(names, wanted, reason):
    with pytest.raises(HubError, match=reason):
        choose_files("here", names, wanted)


def test_the_number_of_shards_has_a_limit():
    with pytest.raises(HubError, match="99999 shards"):
        shard_names("a-00001-of-99999.gguf")
