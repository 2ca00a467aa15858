import pytest

from services.hub.names import HubError, HubName, hub_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@main", HubName("Qwen/Qwen3-0.6B", "main")),
        ("o/n@refs/pr/1", HubName("o/n", "refs/pr/1")),
    ],
)
def test_a_name_has_an_owner_and_may_have_a_revision(text, expected):
    assert HubName.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text", ["", "gpt2", "a/b/c", "/a/b", "./a/b", "~/b", "a/b@", "a/b@../c", "a/b@c@d", "a/b c"]
)
def test_another_form_is_no_name(text):
    assert hub_name(text) is None
    with pytest.raises(HubError, match="OWNER/NAME"):
        HubName.parse(text)


def test_a_local_folder_of_the_same_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("owner/model") is not None
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert hub_name("owner/model") is None
