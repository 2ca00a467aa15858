"""LlamaIndex's class for servers with OpenAI's API."""

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.trial import Report, check, served


def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


def main() -> None:
    report = Report("llama-index-llms-openai-like")
    url, model = served()
    to = {"model": model, "api_base": url, "api_key": "none", "max_retries": 0, "max_tokens": 128}
    chat = OpenAILike(**to, is_chat_model=True, is_function_calling_model=True)
    messages = [ChatMessage(role="user", content="What is 3 + 4?")]
    with report.trial("chat, whole and streamed"):
        check(chat.chat(messages).message.content, "no content")
        check([part.delta for part in chat.stream_chat(messages)], "nothing")
    with report.trial("completions, whole and streamed"):
        text = OpenAILike(**to, is_chat_model=False)
        check(text.complete("1 + 2 =").text is not None, "no text")
        check(list(text.stream_complete("1 + 2 =")), "nothing")
    with report.trial("a required tool"):
        answer = chat.chat_with_tools(
            [FunctionTool.from_defaults(add)], user_msg="What is 3 + 4?", tool_required=True
        )
        calls = chat.get_tool_calls_from_response(answer)
        check(calls[0].tool_name == "add", answer)
    report.print()


if __name__ == "__main__":
    main()
