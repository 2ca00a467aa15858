import pytest

from scripts import check_subjects


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("scheduler: preempt the youngest request first", None),
        ("http, text: take system messages anywhere", None),
        ("tests: a compressed body of 16 MiB is as good", "goes on with 'a'"),
        ("take system messages", "does not begin with an area"),
        ("http: " + "x" * 67, "has 73 characters; the limit is 72"),
    ],
)
def test_subjects_are_an_area_and_an_imperative(subject, problem):
    found = list(check_subjects.problems(subject))
    assert found == [] if problem is None else found[0].startswith(problem)


def test_a_message_is_checked_by_its_first_line(tmp_path):
    message = tmp_path / "message"
    message.write_text("http: refuse two hosts\n\nA proxy may read another one than we do.\n")
    assert check_subjects.subjects([str(message)]) == ["http: refuse two hosts"]


def test_a_shallow_clone_has_no_subjects_to_check(monkeypatch):
    monkeypatch.setattr(check_subjects, "FIRST", "0" * 12)
    assert check_subjects.subjects([]) == []
