"""Fields that nothing here can follow, and tools that nothing here can run."""

import json
from typing import Annotated

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.body import TAKEN, Body
from services.frontend.http.fields.hosted_tools import check_hosted, hosted_kind
from services.frontend.http.fields.parse import parse_body
from services.frontend.pipeline.request_log import RequestLog


class _Part(Body):
    hint: Annotated[int | None, TAKEN] = None


class _Whole(Body):
    part: _Part
    text: str | None = None


def _read(body, **options):
    return parse_body(_Whole, json.dumps(body).encode(), **options)


def test_a_taken_field_is_read_like_any_other():
    assert _read({"part": {"hint": 3}, "text": "a"}, is_strict=False).part.hint == 3


def test_a_taken_field_has_its_type():
    with pytest.raises(InvalidRequestError, match=r"part\.hint"):
        _read({"part": {"hint": "much"}}, is_strict=False)


def test_strict_fields_refuse_a_taken_field_as_an_unknown_one():
    for field in ("hint", "other"):
        with pytest.raises(InvalidRequestError, match=rf"^part\.{field} is not supported$"):
            _read({"part": {field: 3}}, is_strict=True)


def test_strict_fields_take_a_null_in_a_taken_field():
    assert _read({"part": {"hint": None}}, is_strict=True).part.hint is None


def test_a_mark_of_the_client_is_taken_without_effect():
    body = {"part": {"__copilotMessageSource": "user", "_mark": {"deep": [1]}}}
    assert _read(body, is_strict=False).part.hint is None


def test_strict_fields_refuse_a_mark_of_the_client():
    with pytest.raises(InvalidRequestError, match=r"^part\._mark is not supported$"):
        _read({"part": {"_mark": 1}}, is_strict=True)


def test_an_api_has_its_own_words_for_an_unknown_field():
    with pytest.raises(InvalidRequestError, match=r"^part\.other: Extra inputs"):
        _read({"part": {"other": 3}}, is_strict=False, unknown=": Extra inputs are not permitted")


def test_hosted_tools_beside_others_are_left_out():
    assert check_hosted(["web_search"], has_others=True) == ["web_search"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"has_others": False}, "tools"),
        ({"has_others": True, "is_strict": True}, "tools"),
        ({"has_others": True, "demanded": "web_search"}, "tool_choice"),
    ],
)
def test_a_hosted_tool_that_is_all_there_is_or_demanded_is_refused_by_name(options, field):
    with pytest.raises(InvalidRequestError, match="'web_search'") as refused:
        check_hosted(["web_search"], **options)
    assert refused.value.field == field


def test_left_out_tools_are_counted_by_kind():
    requests = RequestLog()
    requests.note_left_out(["web_search", "web_search", "image_generation"])
    assert requests.counts.left_out == {"web_search": 2, "image_generation": 1}


@pytest.mark.parametrize(
    ("tool_type", "kind"),
    [
        ("web_search_20250305", "web_search"),
        ("web_search_preview", "web_search"),
        ("tool_search_tool_bm25_20251119", "tool_search"),
        ("mcp_toolset", "mcp"),
        ("image_generation", "image_generation"),
        ("bash_20250124", None),
        ("custom", None),
    ],
)
def test_a_hosted_tool_is_known_by_its_kind_whatever_its_version(tool_type, kind):
    assert hosted_kind(tool_type) == kind
