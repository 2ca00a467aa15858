"""Images in bodies of chat completions, Responses and Messages, and what each refuses."""

import base64

import pytest

from tests.support import codex
from tests.support.vision import (
    IMAGE_ID,
    TEMPLATE,
    png,
    prompt,
    said,
    seen,
    shown,
    vision_engine,
    vision_http,
)

CAT, DOG = png(48, 32), png(32, 64, colour=9)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
CALL = {"name": "look", "arguments": "{}"}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def parts(path: str, values: tuple[str | bytes, ...]) -> list[dict]:
    """Texts and images as an API has them."""
    if path == CHAT:
        return [
            {"type": "text", "text": each}
            if isinstance(each, str)
            else {"type": "image_url", "image_url": {"url": url_of(each)}}
            for each in values
        ]
    if path == RESPONSES:
        return [
            {"type": "input_text", "text": each}
            if isinstance(each, str)
            else {"type": "input_image", "image_url": url_of(each)}
            for each in values
        ]
    return [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded(each)},
        }
        for each in values
    ]


def body(path: str, turns: list[dict], **more: object) -> dict:
    field = "input" if path == RESPONSES else "messages"
    limit = {"max_tokens": 20} if path == MESSAGES else {}
    return {"model": "fake", field: turns, **limit, **more}


def asking(path: str, *values: str | bytes) -> dict:
    return body(path, [{"role": "user", "content": parts(path, values)}])


def looking(path: str, *values: str | bytes) -> dict:
    """A conversation with a tool's result."""
    result, user = parts(path, values), {"role": "user", "content": "Look!"}
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c1", **CALL}
        output = {"type": "function_call_output", "call_id": "c1", "output": result}
        return body(path, [user, call, output])
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        output = {"type": "tool_result", "tool_use_id": "c1", "content": result}
        return body(
            path,
            [user, {"role": "assistant", "content": [call]}, {"role": "user", "content": [output]}],
        )
    call = {"id": "c1", "type": "function", "function": CALL}
    output = {"role": "tool", "tool_call_id": "c1", "content": result}
    return body(path, [user, {"role": "assistant", "tool_calls": [call]}, output])


async def refused(client, path: str, wanted: dict) -> str:
    response = await client.post(path, json=wanted)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_images_and_texts_keep_their_order(path):
    async with vision_http() as (engine, _, client):
        response = await client.post(path, json=asking(path, "Is ", CAT, " like ", DOG, "?"))
        assert response.status_code == 200, response.text
    assert shown(engine) == prompt(("user", "Is (<2x3>) like (<4x2>)?"))
    digests = [image.digest for image in engine.submits[0].images]
    assert digests == [seen(CAT).digest, seen(DOG).digest]


@pytest.mark.parametrize("path", PATHS)
async def test_a_large_body_is_read_in_its_process(path):
    noise = png(32, 32) + bytes(2**20)
    async with vision_http() as (engine, _, client):
        response = await client.post(path, json=asking(path, noise))
        assert response.status_code == 200, response.text
    assert engine.submits[0].images[0].digest == seen(noise).digest


@pytest.mark.parametrize("path", PATHS)
async def test_a_tools_result_has_images(path):
    async with vision_http() as (engine, _, client):
        response = await client.post(path, json=looking(path, "Here: ", CAT))
        assert response.status_code == 200, response.text
    assert said("tool", "Here: (<2x3>)") in shown(engine)


@pytest.mark.parametrize("path", PATHS)
async def test_users_show_the_images_of_tools_where_the_template_takes_those_alone(path):
    template = TEMPLATE.replace(
        '{%- if part.type == "image" %}',
        '{%- if part.type == "image" and message.role == "tool" %}'
        '{{- raise_exception("no image") }}{%- elif part.type == "image" %}',
    )
    async with vision_http(vision_engine(template=template)) as (engine, _, client):
        response = await client.post(path, json=looking(path, "Here: ", CAT))
        assert response.status_code == 200, response.text
    assert said("tool", "Here: ") + said("user", "(<2x3>)") in shown(engine)


async def test_a_file_that_claude_code_reads_is_seen():
    """Its tool Read answers with an image block; requests have caching, reminders and streams."""
    cached = {"cache_control": {"type": "ephemeral"}}
    image = {"type": "base64", "media_type": "image/png", "data": encoded(CAT)}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/w/a.png"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "image", "source": image}],
        **cached,
    }
    reminder = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"}
    wanted = {
        "model": "fake",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": "You are Claude Code.", **cached}],
        "metadata": {"user_id": "user_1"},
        "tools": [
            {
                "name": "Read",
                "description": "Reads a file.",
                "input_schema": {
                    "type": "object",
                    "properties": {"file_path": {"type": "string"}},
                    "required": ["file_path"],
                },
            }
        ],
        "messages": [
            {"role": "user", "content": [reminder, {"type": "text", "text": "Read a.png."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, call]},
            {"role": "user", "content": [result, reminder]},
        ],
    }
    async with vision_http(vision_engine(max_model_len=65536)) as (engine, _, client):
        response = await client.post(f"{MESSAGES}?beta=true", json=wanted)
        assert response.status_code == 200, response.text
        assert "event: message_stop" in response.text
    assert said("tool", "(<2x3>)") in shown(engine)
    assert engine.submits[0].images[0].digest == seen(CAT).digest


async def test_pictures_that_codex_attaches_and_views_are_seen():
    """It attaches files to a message, between tags, and its tool view_image answers with one."""
    view = {"name": "view_image", "arguments": '{"path": "/w/b.png"}', "call_id": "call_1"}
    shows = [{"type": "input_image", "image_url": url_of(DOG), "detail": "high"}]
    wanted = {
        "model": "fake",
        "instructions": "You are Codex.",
        "input": [
            codex.said("developer", "You write code."),
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "<image name=[Image #1]>"},
                    {"type": "input_image", "image_url": url_of(CAT), "detail": "high"},
                    {"type": "input_text", "text": "</image>"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            },
            {"type": "function_call", "id": "fc_1", "status": "completed", **view},
            {"type": "function_call_output", "call_id": "call_1", "output": shows},
        ],
        "tools": [codex.SHELL, {**codex.SHELL, "name": "view_image"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "conversation",
    }
    async with vision_http() as (engine, _, client):
        response = await client.post(RESPONSES, json=wanted)
        assert response.status_code == 200, response.text
        assert "event: response.completed" in response.text
    prompt_text = shown(engine)
    assert said("user", "<image name=[Image #1]>(<2x3>)</image>What is it?") in prompt_text
    assert said("tool", "(<4x2>)") in prompt_text
    digests = [image.digest for image in engine.submits[0].images]
    assert digests == [seen(CAT).digest, seen(DOG).digest]


async def test_a_failed_tools_result_begins_with_its_error():
    wanted = looking(MESSAGES, CAT)
    wanted["messages"][-1]["content"][0]["is_error"] = True
    async with vision_http() as (engine, _, client):
        await client.post(MESSAGES, json=wanted)
    assert said("tool", "Error: (<2x3>)") in shown(engine)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_low_detail_has_few_patches(path):
    wanted = asking(path, CAT)
    turns = wanted.get("messages") or wanted["input"]
    [picture] = turns[0]["content"]
    async with vision_http() as (_, reader, client):
        for detail in ("low", "high", "auto"):
            holder = picture["image_url"] if path == CHAT else picture
            holder["detail"] = detail
            assert (await client.post(path, json=wanted)).status_code == 200
        limits = [asked["max_patches"] for asked in reader.asked]
        assert limits == [1024, None]  # the third was read lately


@pytest.mark.parametrize("path", PATHS)
async def test_other_urls_are_refused_without_a_fetcher(path):
    wanted = asking(path, CAT)
    [picture] = (wanted.get("messages") or wanted["input"])[0]["content"]
    url = "https://pictures.test/cat.png"
    if path == MESSAGES:
        picture["source"] = {"type": "url", "url": url}
    else:
        picture["image_url"] = {"url": url} if path == CHAT else url
    async with vision_http() as (engine, _, client):
        assert "not fetched from URLs here" in await refused(client, path, wanted)
    assert not engine.heard


CONTENTS = {
    CHAT: [
        ({"type": "video_url", "video_url": {"url": "x"}}, "'video_url' is not supported here"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' is not supported here"),
        ({"type": "file", "file": {"file_id": "f"}}, "'file' is not supported here"),
        ({"type": "image_url", "image_url": {"url": "data:x"}}, "the image's data URL is not"),
        ({"type": "image_url", "image_url": {"url": ""}}, "the image's data URL is not"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
            "an image has 0 bytes",
        ),
        (
            {"type": "image_url", "image_url": {"url": url_of(CAT), "detail": "most"}},
            "messages.0.content.0.image_url.detail: 'most' is not supported here",
        ),
    ],
    RESPONSES: [
        ({"type": "input_file", "file_id": "f"}, "'input_file' is not supported here"),
        ({"type": "input_audio"}, "'input_audio' is not supported here"),
        ({"type": "input_video"}, "'input_video' is not supported here"),
        (
            {"type": "input_image", "image_url": url_of(CAT), "file_id": "f"},
            "input.0.content.0.file_id is not supported",
        ),
        ({"type": "input_image", "file_id": "f"}, "input.0.content.0.image_url: Field required"),
    ],
    MESSAGES: [
        ({"type": "document", "source": {}}, "'document' is not supported here"),
        ({"type": "audio", "source": {}}, "'audio' is not supported here"),
        ({"type": "video", "source": {}}, "'video' is not supported here"),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "messages.0.content.0.source.type: 'file' is not supported here",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png"}},
            "data must be given with the type base64",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": ""}},
            "messages.0.content.0.source.media_type: 'image/bmp' is not supported here",
        ),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "a!b"},
            },
            "the image's data is no valid base64",
        ),
    ],
}


@pytest.mark.parametrize(
    ("path", "content", "told"),
    [(path, *each) for path, contents in CONTENTS.items() for each in contents],
)
async def test_wrong_contents_are_refused_by_name(path, content, told):
    wanted = body(path, [{"role": "user", "content": [content]}])
    async with vision_http() as (engine, _, client):
        assert told in await refused(client, path, wanted)
    assert not engine.heard


@pytest.mark.parametrize(
    ("path", "role"), [(CHAT, "system"), (CHAT, "assistant"), (RESPONSES, "assistant")]
)
async def test_images_of_other_roles_are_refused(path, role):
    wanted = asking(path, CAT)
    (wanted.get("messages") or wanted["input"])[0]["role"] = role
    async with vision_http() as (_, _, client):
        assert f"a message of '{role}' has an image" in await refused(client, path, wanted)


async def test_every_count_of_tokens_has_those_of_images():
    async with vision_http() as (engine, _, client):
        for path, counting, field in (
            (CHAT, "/tokenize", "count"),
            (RESPONSES, f"{RESPONSES}/input_tokens", "input_tokens"),
            (MESSAGES, f"{MESSAGES}/count_tokens", "input_tokens"),
        ):
            wanted = asking(path, "What is ", CAT, "?")
            assert (await client.post(path, json=wanted)).status_code == 200
            wanted.pop("max_tokens", None)
            told = (await client.post(counting, json=wanted)).json()
            assert told[field] == len(engine.submits[-1].prompt_token_ids) // 4
            if path == CHAT:
                assert told["tokens"].count(IMAGE_ID) == 6


async def test_a_stored_response_keeps_its_images():
    async with vision_http() as (engine, _, client):
        first = (await client.post(RESPONSES, json=asking(RESPONSES, "What is ", CAT))).json()
        listed = (await client.get(f"{RESPONSES}/{first['id']}/input_items")).json()
        assert listed["data"][0]["content"][1] == {
            "type": "input_image", "image_url": url_of(CAT), "detail": "auto"
        }  # fmt: skip
        again = body(RESPONSES, listed["data"])
        assert (await client.post(RESPONSES, json=again)).status_code == 200
        assert shown(engine) == prompt(("user", "What is (<2x3>)"))
        more = body(RESPONSES, "And now?", previous_response_id=first["id"])
        assert (await client.post(RESPONSES, json=more)).status_code == 200
    assert shown(engine) == prompt(
        ("user", "What is (<2x3>)"), ("assistant", "a cat"), ("user", "And now?")
    )


async def test_stored_images_count_against_the_store():
    async with vision_http(max_stored_response_bytes=10_000) as (_, _, client):
        small = (await client.post(RESPONSES, json=asking(RESPONSES, CAT))).json()
        large = png(32, 32) + bytes(20_000)
        lost = (await client.post(RESPONSES, json=asking(RESPONSES, large))).json()
        assert (await client.get(f"{RESPONSES}/{small['id']}")).status_code == 200
        assert (await client.get(f"{RESPONSES}/{lost['id']}")).status_code == 404


async def test_dropped_turns_take_their_images_along():
    turns = [
        {"role": "user", "content": parts(RESPONSES, (png(320, 320),))},
        {"role": "assistant", "content": "A square."},
        {"role": "user", "content": parts(RESPONSES, ("And ", CAT))},
    ]
    engine = vision_engine(max_model_len=300)
    async with vision_http(engine) as (_, _, client):
        wanted = body(RESPONSES, turns, truncation="auto", max_output_tokens=20)
        assert (await client.post(RESPONSES, json=wanted)).status_code == 200
    assert shown(engine) == prompt(("user", "And (<2x3>)"))


async def test_cleared_results_take_their_images_along():
    wanted = looking(MESSAGES, CAT)
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 0},
    }
    wanted["context_management"] = {"edits": [edit]}
    async with vision_http() as (engine, _, client):
        response = await client.post(MESSAGES, json=wanted)
        assert response.status_code == 200, response.text
        [applied] = response.json()["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 1
    assert not engine.submits[-1].images
