"""Bodies like those of Codex CLI 0.171, in other words."""

SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin" LF line+ "*** End"\nline: /[+-].*/ LF\n%import common.LF',
    },
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Work of others.",
    "tools": [
        {**SHELL, "name": "spawn_agent", "description": "Starts one."},
        {**SHELL, "name": "close_agent", "description": "Ends one."},
    ],
}
SEARCH = {"type": "web_search", "external_web_access": False}
IMAGE = {"type": "image_generation", "output_format": "png"}


def said(role: str, text: str) -> dict:
    """A message, as Codex sends it."""
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return {"type": "message", "id": "msg_1", "role": role, "content": content}


FIRST_TURN = [
    said("developer", "You write code."),
    said("developer", "Skills: none."),
    said("user", "<cwd>/tmp</cwd>"),
    said("user", "Say hello."),
]
SECOND_TURN = [
    *FIRST_TURN,
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Greet."}],
        "encrypted_content": "gAAAA",
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "status": "completed",
        "name": "spawn_agent",
        "namespace": "multi_agent_v1",
        "arguments": '{"cmd": "echo hello"}',
        "call_id": "call_1",
    },
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "hello"},
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "status": "completed",
        "name": "apply_patch",
        "input": "*** Begin\n+a\n*** End",
        "call_id": "call_2",
    },
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done."},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAB"},
    said("assistant", "I said hello."),
    said("user", "Again."),
]


def body(items: list[dict] = FIRST_TURN, **changes: object) -> dict:
    """A request of its default settings, not streamed."""
    return {
        "model": "fake",
        "input": items,
        "tools": [SHELL, PATCH, AGENTS, SEARCH, IMAGE],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a22098",
        "client_metadata": {"session_id": "01a22098", "x-codex-turn-metadata": "{}"},
        "text": {"verbosity": "low"},
        "service_tier": "priority",
        **changes,
    }
