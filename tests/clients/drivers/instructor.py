"""instructor, which gets objects of pydantic from models."""

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.trial import Report, check, served

MESSAGES = [{"role": "user", "content": "Ada is 36."}]


class Person(BaseModel):
    """A person, and nothing else: a small model would not end by itself."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def main() -> None:
    report = Report("instructor")
    url, model = served()
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    settings = {"model": model, "messages": MESSAGES, "max_retries": 0, "max_tokens": 200}
    with report.trial("default mode: an object"):
        person = instructor.from_openai(client).chat.completions.create(
            **settings, response_model=Person
        )
        check(isinstance(person, Person), person)
    for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        with report.trial(f"mode {mode.name}: an object"):
            person = instructor.from_openai(client, mode=mode).chat.completions.create(
                **settings, response_model=Person
            )
            check(isinstance(person, Person), person)
    with report.trial("mode RESPONSES_TOOLS: an object"):
        over_responses = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
        most = {"max_output_tokens": settings["max_tokens"]}
        own = {name: value for name, value in settings.items() if name != "max_tokens"}
        person = over_responses.chat.completions.create(**own, **most, response_model=Person)
        check(isinstance(person, Person), person)
    with report.trial("default mode: an object in parts"):
        parts = list(
            instructor.from_openai(client).chat.completions.create_partial(
                **settings, response_model=Person
            )
        )
        check(parts[-1].name is not None, parts[-1])
    report.print()


if __name__ == "__main__":
    main()
