"""docs/operations.md names everything that an operator can meet."""

import re
from pathlib import Path

import pytest

from protos.engine.v1 import batch_pb2, engine_pb2
from services.engine import errors as engine_errors
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.node.config import NodeConfig
from services.engine.rpc.metrics import EngineFamilies
from services.frontend import errors as frontend_errors
from services.frontend.config import FrontendConfig
from services.frontend.engine_client.addresses import AddressBook
from services.frontend.engine_client.pool import EnginePool, PoolLimits
from services.frontend.engine_client.tokenizer_files import TokenizerStore
from services.frontend.pipeline.metrics import FrontendFamilies
from services.frontend.pipeline.request_counts import RequestCounts
from services.processes.heartbeats import Heartbeats
from services.telemetry.loop_lag import LoopLag
from services.transport.counts import LocalCounts
from services.transport.refused_calls import RefusedCalls
from tests.support.engine_harness import engine_config, step_limits

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def _table_rows() -> dict[str, str]:
    """First cells of every table, without the quotes, with their whole line."""
    rows = re.findall(r"^\| `([^`]+)` (\|.*)$", OPERATIONS, flags=re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize(
    "section",
    [*EngineConfig.sections().values(), FrontendConfig, NodeConfig],
    ids=lambda each: each.__name__,
)
def test_every_flag_is_documented_in_the_words_of_help(section):
    rows = _table_rows()
    for name, field in section.model_fields.items():
        flag = "--" + name.replace("_", "-")
        assert flag in rows, f"{flag} of {section.__name__} is not in docs/operations.md"
        description = " ".join((field.description or "").split())
        assert description in OPERATIONS, f"docs/operations.md says something else of {flag}"


def test_every_figure_of_the_stats_is_documented():
    rows = _table_rows()
    names = engine_pb2.GetStatsResponse.DESCRIPTOR.fields_by_name
    assert [name for name in names if name not in rows] == []


def test_every_error_is_documented():
    rows = _table_rows()
    classes = [
        name
        for module in (engine_errors, frontend_errors)
        for name, value in vars(module).items()
        if isinstance(value, type) and name not in ("EngineError", "FrontendError")
    ]
    assert [name for name in classes if name not in rows] == []


def test_every_fallback_reason_is_documented():
    rows = _table_rows()
    reasons = [
        value.name.removeprefix("FALLBACK_REASON_").lower()
        for value in batch_pb2.FallbackReason.DESCRIPTOR.values
        if value.number
    ]
    assert [reason for reason in reasons if reason not in rows] == []


def test_links_between_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/**/*.md")]:
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        missing = [t for t in targets if not (document.parent / t).exists()]
        assert missing == [], f"{document.name} links to {missing}"


def test_every_metric_is_documented():
    text = (ROOT / "docs" / "observability.md").read_text()
    config = engine_config(max_loras=2)
    core = EngineCore(
        config,
        limits=step_limits(config),
        make_executor=None,
        on_readiness=lambda ready: None,
    )
    pool = EnginePool(AddressBook(["host:1"]), TokenizerStore(None), PoolLimits())
    refused = RefusedCalls(LocalCounts())
    families = [
        *EngineFamilies(core, model="m", num_sessions=lambda: 0, lag=LoopLag(), refused=refused)(),
        *FrontendFamilies(RequestCounts(), pool, LoopLag(), refused, Heartbeats(2))(),
    ]
    names = [f.name + ("_total" if f.type == "counter" else "") for f in families]
    assert len(names) > 40
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_reading_path_is_short():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Reading path")[2].partition("\n## ")[0]
    files = [ROOT / name for name in re.findall(r"^\| \[`([^`]+)`\]", section, flags=re.MULTILINE)]
    assert 20 <= len(files) <= 25
    assert sum(len(file.read_text().splitlines()) for file in files) <= 6000
