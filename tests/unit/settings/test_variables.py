"""Variables that look like settings and are none are logged when a service starts."""

from structlog.testing import capture_logs

from services.engine.config.engine_config import EngineConfig
from services.settings.variables import warn_of_unknown_variables


def warnings(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with capture_logs() as lines:
        warn_of_unknown_variables("OCTAVO_ENGINE_", EngineConfig().flags())
    return lines


def test_a_misspelt_variable_is_named(monkeypatch):
    (line,) = warnings(
        monkeypatch,
        OCTAVO_ENGINE_MAX_NUM_SEQS="4",
        OCTAVO_ENGINE_MAX_SEQS="4",
        octavo_engine_devise="cpu",
        OCTAVO_FRONTEND_PORT="1",
    )
    assert line["event"] == "unknown_environment_variables"
    assert line["names"] == ["OCTAVO_ENGINE_MAX_SEQS", "octavo_engine_devise"]
    assert line["log_level"] == "warning"


def test_settings_in_any_case_of_letters_are_known(monkeypatch):
    assert warnings(monkeypatch, octavo_engine_port="1", OCTAVO_ENGINE_Device="cpu") == []
