"""Models by their names on a hub, which is one of our own on loopback."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from models.loading.checkpoint import INDEX_FILE, SINGLE_FILE
from services.engine.checkpoint.tokenizer_files import TOKENIZER_FILE_BYTES
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.hub.fetch import OTHER_TOKENIZER_FILES, SMALL_FILES
from tests.support.adapters import write_adapter
from tests.support.damaged_checkpoints import SHARDS, copy_checkpoint, split_in_two
from tests.support.forked_program import ForkedProgram, run_octavo, start_octavo
from tests.support.hub import COMMIT, Hub, Repository
from tests.support.processes import ROOT

OCTAVO = [sys.executable, "-m", "services.client.cli"]
NAME = "octavo/tiny"
UNWANTED = ("pytorch_model.bin", "consolidated.safetensors", "modeling.py", "original/config.json")


@pytest.fixture
def hub():
    with Hub() as hub:
        hub.add(NAME, TINY_CHECKPOINT)
        yield hub


@pytest.fixture
def environment(hub, tmp_path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return variables | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def octavo(environment):
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_octavo(*arguments, environment=environment | variables)

    return run


@contextlib.contextmanager
def started(log: Path, environment: dict[str, str], *command: str):
    """Runs a command that goes on until the block ends; yields it and what it writes."""
    with log.open("wb") as output:
        program = start_octavo(*command, environment=environment, output=output.fileno())
    try:
        yield program, log
    finally:
        program.terminate()
        program.wait(60)


def pulled(finished: subprocess.CompletedProcess[str]) -> Path:
    assert finished.returncode == 0, finished.stderr
    return Path(finished.stdout.strip())


def refusal(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 1
    [line] = finished.stderr.splitlines()
    return line.removeprefix("octavo: ")


def test_every_file_of_a_tokenizer_is_fetched():
    assert set(TOKENIZER_FILE_BYTES) <= set(SMALL_FILES)


def test_pull_brings_only_what_an_engine_reads(hub, octavo):
    hub.repositories[NAME].files |= dict.fromkeys(UNWANTED, b"x")
    folder = pulled(octavo("pull", NAME))
    assert folder.name == COMMIT
    assert not set(hub.downloads) & set(UNWANTED)
    assert (folder / SINGLE_FILE).read_bytes() == (TINY_CHECKPOINT / SINGLE_FILE).read_bytes()
    hub.downloads.clear()
    assert pulled(octavo("pull", f"{NAME}@main")) == folder
    assert not hub.downloads


def test_pull_brings_other_tokenizers_only_where_there_is_no_tokenizer_json(hub, octavo, tmp_path):
    hub.repositories[NAME].files |= dict.fromkeys(OTHER_TOKENIZER_FILES, b"x")
    pulled(octavo("pull", NAME))
    assert not set(hub.downloads) & set(OTHER_TOKENIZER_FILES)
    source = copy_checkpoint(TINY_CHECKPOINT, _folder(tmp_path / "source"))
    (source / "tokenizer.json").unlink()
    (source / "tiktoken.model").write_bytes(b"YQ== 0")
    hub.add("octavo/ranks", source)
    folder = pulled(octavo("pull", "octavo/ranks"))
    assert (folder / "tiktoken.model").read_bytes() == b"YQ== 0"


class MovingBranch(dict[str, str]):
    """Revisions whose main branch moves once it was looked up."""

    def get(self, name, default=None):
        found = super().get(name, default)
        if name == "main":
            self["main"] = COMMIT[::-1]
        return found


def test_another_tokenizer_is_of_the_commit_of_the_other_files(hub, octavo, tmp_path):
    source = copy_checkpoint(TINY_CHECKPOINT, _folder(tmp_path / "source"))
    (source / "tokenizer.json").unlink()
    (source / "tiktoken.model").write_bytes(b"YQ== 0")
    revisions = MovingBranch(main=COMMIT, before=COMMIT)
    hub.add("octavo/moving", source, revisions=revisions)
    folder = pulled(octavo("pull", "octavo/moving"))
    assert revisions["main"] != COMMIT
    assert {"config.json", "tiktoken.model"} <= {each.name for each in folder.iterdir()}
    assert folder.name == COMMIT


def test_pull_brings_the_files_that_the_index_names(hub, octavo, tmp_path):
    source = copy_checkpoint(TINY_CHECKPOINT, _folder(tmp_path / "source"))
    split_in_two(source)
    (source / "consolidated.safetensors").write_bytes(b"x")
    hub.add("octavo/parts", source)
    folder = pulled(octavo("pull", "octavo/parts"))
    assert {path.name for path in folder.glob("*.safetensors")} == set(SHARDS)


@pytest.fixture
def large(hub):
    """A repository with weights of several of the library's pieces, of which some are sent."""
    repository = hub.repositories[NAME]
    repository.files[SINGLE_FILE] = os.urandom(24 * 2**20)
    repository.cut_after = 16 * 2**20
    return repository


def test_a_broken_connection_is_taken_up_where_it_broke(hub, octavo, large):
    large.num_cuts = 1
    folder = pulled(octavo("pull", NAME))
    assert (folder / SINGLE_FILE).read_bytes() == large.files[SINGLE_FILE]
    assert len(hub.ranges) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_was_ended_goes_on_where_it_stopped(
    hub, octavo, environment, tmp_path, large, number
):
    large.is_held = True
    first = subprocess.Popen(
        [*OCTAVO, "pull", NAME], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert large.is_waiting.wait(60)
    while not any(part.stat().st_size for part in (tmp_path / "hf").rglob("*.octavo-part")):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(number)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == -number
    assert "Traceback" not in errors
    large.is_held = False
    folder = pulled(octavo("pull", NAME))
    assert (folder / SINGLE_FILE).read_bytes() == large.files[SINGLE_FILE]
    assert [int(re.findall(r"\d+", each)[0]) > 0 for each in hub.ranges] == [True]


def test_a_private_model_needs_its_token(hub, octavo):
    hub.repositories[NAME].token = "hf_secret"
    assert "HF_TOKEN" in refusal(octavo("pull", NAME, HF_TOKEN="hf_other"))
    pulled(octavo("pull", NAME, HF_TOKEN="hf_secret"))


def test_a_gated_model_says_where_to_accept_its_terms(hub, octavo):
    hub.repositories[NAME].is_gated = True
    assert f"is gated: accept its terms at {hub.address}/{NAME}" in refusal(octavo("pull", NAME))


def test_a_model_that_cannot_be_loaded_is_one_line(hub, environment):
    expected = {
        "octavo/absent": "octavo/absent is neither a folder here nor a model on the hub",
        f"{NAME}@nope": f"{NAME} has no revision nope on the hub",
        "octavo/a--b": "octavo/a--b is no name on the hub",
        "tiny": "tiny is no name on the hub; one looks like OWNER/NAME[@REVISION]",
    }
    for number, (changes, message) in enumerate(
        [
            ({SINGLE_FILE: None, "pytorch_model.bin": b"x"}, "of other formats, GGUF is"),
            ({"config.json": None}, "has no config.json and no GGUF model"),
            ({INDEX_FILE: b'{"weight_map": {"a": "../a.safetensors"}}'}, "is no safetensors file"),
            ({INDEX_FILE: b'{"weight_map": {"a": "modeling.py"}}'}, "is no safetensors file"),
            (
                {INDEX_FILE: b'{"weight_map": {"a": "b.safetensors"}}'},
                "names a file that the hub does not",
            ),
            ({INDEX_FILE: b"[]"}, "has no readable weight_map"),
        ]
    ):
        files = hub.add(f"octavo/{number}", TINY_CHECKPOINT).files | changes
        files = {name: content for name, content in files.items() if content is not None}
        hub.repositories[f"octavo/{number}"].files = files
        expected[f"octavo/{number}"] = message
    finished = subprocess.run(
        [sys.executable, "-c", _FETCH_ALL, *expected],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    for line, message in zip(finished.stdout.splitlines(), expected.values(), strict=True):
        assert message in line


def test_a_gguf_model_is_fetched_with_all_its_shards(hub, octavo):
    shards = [f"q8/model-0000{number}-of-00002.gguf" for number in (1, 2)]
    files = {name: name.encode() for name in (*shards, "other.gguf", "README.md")}
    hub.repositories["octavo/gguf"] = Repository(files)
    assert "choose by --gguf-file: other.gguf, q8/model-00001" in refusal(
        octavo("pull", "octavo/gguf")
    )
    file = pulled(octavo("pull", "octavo/gguf", "--gguf-file", shards[0]))
    assert file.name == "model-00001-of-00002.gguf"
    assert sorted(each.name for each in file.parent.iterdir()) == [
        f"model-0000{number}-of-00002.gguf" for number in (1, 2)
    ]
    assert hub.downloads["other.gguf"] == 0
    offline = octavo("pull", "octavo/gguf", "--gguf-file", shards[0], HF_HUB_OFFLINE="1")
    assert pulled(offline) == file


def test_without_the_hub_a_whole_copy_is_enough_and_none_is_one_line(hub, octavo):
    folder = pulled(octavo("pull", NAME))
    away = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert pulled(octavo("pull", NAME, **away)) == folder
    assert pulled(octavo("pull", NAME, HF_HUB_OFFLINE="1")) == folder
    assert "HF_HUB_OFFLINE is set" in refusal(octavo("pull", "octavo/b", HF_HUB_OFFLINE="1"))
    assert "127.0.0.1:9 does not answer" in refusal(octavo("pull", "octavo/b", **away))
    (folder / SINGLE_FILE).unlink()
    assert "only a part of it" in refusal(octavo("pull", NAME, HF_HUB_OFFLINE="1"))


def test_the_tools_need_no_weights(hub, octavo, tmp_path):
    finished = octavo(
        "cache", "explain", "--model", NAME, "--compile-cache-dir", str(tmp_path / "compiled")
    )
    assert finished.returncode == 0, finished.stderr
    assert "model_fetched" not in finished.stdout
    assert SINGLE_FILE not in hub.downloads


def test_an_engine_starts_from_a_name_and_serves_under_it(hub, environment, tmp_path):
    flags = ["--model", f"{NAME}@main", "--port", "0", "--log-format", "json"]
    with started(tmp_path / "log", environment, "engine", *flags) as (engine, log):
        port = _found(engine, log, r'"port": (\d+).*"engine_listening"')
        _found(engine, log, '("worker_became_ready")')
        assert run_octavo("health", f"127.0.0.1:{port}").returncode == 0


def test_serve_fetches_names_its_addresses_and_goes_on_without_the_hub(hub, environment, tmp_path):
    flags = ["--port", "0", "--http-port", "0", "--engine-port", "0", "--model", NAME]
    with started(tmp_path / "log", environment, "serve", *flags) as (serve, log):
        base_url = _found(serve, log, r"over HTTP: +(\S+/v1)$")
        _found(serve, log, r"watch it: +octavo stats --engine (\S+)$")
        models = httpx.get(f"{base_url}/models", timeout=60)
        assert models.json()["data"][0]["id"] == NAME


def test_a_folder_of_the_same_name_wins(hub, environment, tmp_path):
    _folder(tmp_path / NAME)
    finished = subprocess.run(
        [*OCTAVO, "engine", "--model", NAME, "--port", "0"], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 2
    assert f"{NAME}/config.json" in finished.stderr
    assert not hub.downloads


_FETCH_ALL = """
import sys
from services.hub.fetch import fetch
from services.hub.names import HubError, HubName
for name in sys.argv[1:]:
    try:
        fetch(HubName.parse(name), report=lambda *_: None)
    except HubError as error:
        print(error)
"""


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _found(program: ForkedProgram, log: Path, pattern: str) -> str:
    while not (match := re.search(pattern, log.read_text(), re.MULTILINE)):
        assert program.poll() is None, log.read_text()
        time.sleep(0.05)
    return match[1]


ADAPTER = """
import sys
from pathlib import Path
from services.engine.checkpoint.adapter_folder import folder_under, start_folder
from services.engine.errors import EngineError
try:
    place, name = sys.argv[1:]
    print(start_folder(name) if place == "-" else folder_under(Path(place), name))
except EngineError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def adapter(hub, environment, tmp_path):
    """Runs the reading of an adapter's name under a folder, or of --lora with "-"."""
    source = write_adapter(tmp_path / "source", {"q_proj": (torch.ones(4, 2), torch.ones(2, 4))})
    for name in ("adapter_model.bin", "optimizer.pt", "README.md"):
        (source / name).write_bytes(b"x")
    hub.add("someone/sql", source)

    def run(root: Path | str, name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", ADAPTER, str(root), name], env=environment, cwd=tmp_path,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_adapters_come_from_the_hub_without_other_files(hub, adapter, tmp_path):
    root = _folder(tmp_path / "adapters")
    for place in ("-", root):
        hub.downloads.clear()
        found = adapter(place, "someone/sql@main")
        assert found.returncode == 0, found.stderr
        folder = Path(found.stdout.strip())
        names = {"adapter_config.json", "adapter_model.safetensors"}
        assert {each.name for each in folder.iterdir()} == names
        assert set(hub.downloads) == names
        assert folder.is_relative_to(root) == (place is root)
        hub.downloads.clear()
        assert adapter(place, "someone/sql").stdout == found.stdout
        assert not hub.downloads


def test_a_folder_goes_before_the_hub_and_what_is_not_there_is_refused(hub, adapter, tmp_path):
    own = tmp_path / "adapters" / "someone" / "sql"
    own.mkdir(parents=True)
    assert adapter(tmp_path / "adapters", "someone/sql").stdout.strip() == str(own)
    assert not hub.downloads
    missing = adapter(tmp_path / "adapters", "someone/absent")
    assert missing.stderr.startswith(
        "InvalidRequestError: adapter someone/absent cannot be fetched"
    )
