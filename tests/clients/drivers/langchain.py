"""LangChain's classes for OpenAI's API."""

import tiktoken
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.trial import Report, check, served, serving


class Forecast(BaseModel):
    """The weather of some days."""

    model_config = ConfigDict(extra="forbid")
    days: int = Field(ge=1, le=9)


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny, {city}"


def main() -> None:
    report = Report("langchain-openai")
    url, model = served()
    to = {"base_url": url, "api_key": "none", "model": model, "max_retries": 0}
    chat = ChatOpenAI(**to, max_tokens=200)
    with report.trial("chat: invoke, stream, batch"):
        check(chat.invoke("What is 3 + 4?").content, "no content")
        parts = list(chat.stream("What is 3 + 4?"))
        check("".join(part.content for part in parts), parts)
        check(len(chat.batch(["1 + 1?", "2 + 2?"])) == 2, "another number")
    with report.trial("a conversation with a system message and an answer sent back"):
        first = chat.invoke([("system", "Be short."), ("human", "hello")])
        check(chat.invoke([("human", "hello"), first, ("human", "again")]).content, "no content")
    for method in ("json_schema", "function_calling"):
        with report.trial(f"with_structured_output, {method}"):
            found = chat.with_structured_output(Forecast, method=method, strict=True).invoke(
                "How many days?"
            )
            check(isinstance(found, Forecast), found)
    with report.trial("bind_tools, a tool chosen by name"):
        answer = chat.bind_tools([Forecast], tool_choice="Forecast", strict=True).invoke(
            "The weather?"
        )
        check(answer.tool_calls[0]["name"] == "Forecast", answer)
    try_agents(report, to)
    with report.trial("completions: invoke, stream, 20 prompts at once"):
        text = OpenAI(**to, max_tokens=4)
        check(isinstance(text.invoke("1 + 2 ="), str), "no text")
        check(list(text.stream("1 + 2 =")), "nothing")
        found = text.generate([f"{number} + 2 =" for number in range(20)])
        check(len(found.generations) == 20, found)
    try_embeddings(report, {**to, "base_url": f"{serving('embed')}/v1"})
    report.print()


def try_agents(report: Report, to: dict) -> None:
    """Tries agents, which call tools until the model answers."""
    ask = {"messages": [("user", "What is the weather in Paris?")]}
    for name, is_used in (("chat", False), ("responses", True)):
        agent = create_agent(ChatOpenAI(**to, use_responses_api=is_used), tools=[get_weather])
        with report.trial(f"an agent with a tool, over {name}"):
            *_, result, answer = agent.invoke(ask)["messages"]
            check(result.content == "sunny, Paris", result)
            check("sunny" in answer.text, answer)
        with report.trial(f"an agent with a tool, over {name}, streamed"):
            parts = [part for part, _ in agent.stream(ask, stream_mode="messages")]
            check("sunny" in "".join(part.text for part in parts[-40:]), parts)


def try_embeddings(report: Report, to: dict) -> None:
    """Tries embeddings of texts, and of tokens, which the class makes by default."""
    with report.trial("OpenAIEmbeddings of texts (check_embedding_ctx_length=False)"):
        embeddings = OpenAIEmbeddings(**to, check_embedding_ctx_length=False)
        query = embeddings.embed_query("hello")
        found = embeddings.embed_documents([f"text {number}" for number in range(20)])
        check(len(found) == 20 and len(found[0]) == len(query), found)
    what = "OpenAIEmbeddings of tokens (bytes, not those of OpenAI's models), long texts in parts"
    with report.trial(what):
        # It would download an encoding.
        bytes_alone = {bytes([value]): value for value in range(256)}
        tiktoken.registry.ENCODINGS["cl100k_base"] = tiktoken.Encoding(
            "cl100k_base", pat_str=r"\S+|\s", mergeable_ranks=bytes_alone, special_tokens={}
        )
        embeddings = OpenAIEmbeddings(**to, embedding_ctx_length=64, chunk_size=8)
        found = embeddings.embed_documents(["hello", "word " * 60, "text " * 20])
        check([len(each) for each in found] == [len(query)] * 3, found)


if __name__ == "__main__":
    main()
