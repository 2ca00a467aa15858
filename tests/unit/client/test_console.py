"""Texts and names that strangers chose, on a terminal that would obey escape sequences."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from services.client.cli import main
from services.client.console import TerminalConsole, echo
from tests.support.fake_frontend import fake_frontend_in_thread

TEXT = "\x1b]52;c;cm0=\x07[/oops] :smile:\u202e"
SHOWN = r"\x1b]52;c;cm0=\x07[/oops] :smile:\u202e"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs a function with both standard streams on one terminal; returns what it shows."""

    def run(function, *arguments, **options):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", "200")
            patch.setattr("sys.stdout", terminal)
            patch.setattr("sys.stderr", terminal)
            function(*arguments, **options)
        return terminal.getvalue()

    return run


@pytest.fixture
def frontend(monkeypatch):
    with fake_frontend_in_thread() as fake:
        monkeypatch.setenv("OCTAVO_FRONTEND", fake.address)
        yield fake


def run(*arguments):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert not exited.value.code


@pytest.mark.parametrize("err", [False, True])
def test_a_terminal_gets_text_with_escapes_in_letters(on_terminal, err):
    assert on_terminal(echo, f"one\n\t{TEXT}", err=err) == f"one\n\t{SHOWN}\n"


def test_a_file_gets_text_as_it_is(capsys):
    echo(TEXT, nl=False)
    assert capsys.readouterr().out == TEXT


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_output_of_a_model_cannot_command_the_terminal(on_terminal, frontend, command):
    shown = on_terminal(run, command, f"begun {TEXT}")
    assert "\x1b]" not in shown
    assert SHOWN in shown


def test_the_name_of_a_model_is_no_markup(on_terminal, frontend):
    frontend.model = TEXT
    shown = on_terminal(run, "models")
    assert "\x1b]" not in shown
    assert "[/oops]" in shown


def test_a_table_has_room_for_the_escapes(on_terminal):
    table = Table("name", title=TEXT)
    table.add_row(TEXT)
    assert on_terminal(lambda: TerminalConsole().print(table)).count(SHOWN) == 2


def test_a_text_cannot_command_the_terminal(on_terminal):
    assert "\x1b]" not in on_terminal(lambda: TerminalConsole().print(Text(TEXT)))
