from importlib import metadata

from services.version import own_version


def test_an_installed_version_is_that_of_the_distribution():
    assert own_version() == metadata.version("octavo")


def test_a_checkout_that_is_not_installed_has_no_number(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("services.version.version", absent)
    assert own_version() == "source"
