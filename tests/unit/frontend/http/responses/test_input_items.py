"""The items that led to a response, and the number of their tokens."""

import pytest

from tests.support.codex import AGENTS, SECOND_TURN, body
from tests.support.responses import PATH, TOOLS, running, wish


async def listed(client, response_id, **query):
    answer = await client.get(f"{PATH}/{response_id}/input_items", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_items_of_all_turns_are_listed_in_pages():
    async with running() as (_, _, client):
        first = (await client.post(PATH, json=wish(input="one"))).json()
        more = wish(input="two", previous_response_id=first["id"])
        second = (await client.post(PATH, json=more)).json()
        whole = await listed(client, second["id"], order="asc")
        newest = await listed(client, second["id"], limit=2)
        rest = await listed(client, second["id"], limit=2, after=newest["last_id"])
        own = await listed(client, first["id"])
    texts = [item["content"][0]["text"] for item in whole["data"]]
    assert texts == ["one", "hello world", "two"]
    assert whole["data"][1] == first["output"][0]
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert (whole["object"], whole["has_more"]) == ("list", False)
    assert newest["data"] == whole["data"][:0:-1]
    assert newest["has_more"]
    assert rest["data"] == whole["data"][:1]
    assert not rest["has_more"]
    assert own["data"] == whole["data"][:1]
    assert (own["first_id"], own["last_id"]) == (own["data"][0]["id"],) * 2


async def test_items_keep_their_ids_and_all_have_one():
    async with running() as (_, _, client):
        made = (await client.post(PATH, json=body(SECOND_TURN, store=True))).json()
        items = (await listed(client, made["id"], order="asc"))["data"]
    assert [item["type"] for item in items] == [item["type"] for item in SECOND_TURN]
    assert all(item["id"] for item in items)
    assert items[5]["id"] == "fc_1"
    assert items[6]["output"] == "hello"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
    ],
)
async def test_a_wrong_page_is_refused_by_name(query, param):
    async with running() as (_, _, client):
        made = (await client.post(PATH, json=wish())).json()
        answer = await client.get(f"{PATH}/{made['id']}/input_items", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_items_of_a_response_that_is_not_stored_are_not_there():
    async with running() as (_, _, client):
        made = (await client.post(PATH, json=wish(store=False))).json()
        answer = await client.get(f"{PATH}/{made['id']}/input_items")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


async def test_input_tokens_are_those_of_the_response():
    async with running() as (engine, _, client):
        first = (await client.post(PATH, json=wish())).json()
        for changes in (
            {"tools": TOOLS, "instructions": "Be kind."},
            {"tools": [*TOOLS, AGENTS], "previous_response_id": first["id"]},
        ):
            counted = await client.post(f"{PATH}/input_tokens", json=wish(**changes))
            made = (await client.post(PATH, json=wish(**changes))).json()
            assert counted.json() == {
                "object": "response.input_tokens",
                "input_tokens": made["usage"]["input_tokens"],
            }
        bare = await client.post(f"{PATH}/input_tokens", json={"instructions": "Be kind."})
        assert bare.json()["input_tokens"] > 0
        assert len(engine.submits) == 3
