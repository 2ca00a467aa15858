"""The process that chat templates run in; `template_process` starts it.

The opening message is the template, each question a conversation, both as JSON. The process has no
environment, opens no files, starts no processes, and has only so much memory.
"""

import json
from collections.abc import Callable

from services.frontend.text.chat_template import ChatTemplate, TemplateError
from services.processes.helper_program import Refusal, limit_resources, run_helper

MAX_MEMORY_BYTES = 512 * 2**20


def open_template(opening: bytes) -> Callable[[bytes], bytes]:
    """Compiles a template and returns the function that renders conversations with it.

    Args:
        opening: JSON with `source` and `variables`.

    Raises:
        Refusal: the template is not valid.
    """
    limit_resources(max_memory_bytes=MAX_MEMORY_BYTES)
    wish = json.loads(opening)
    try:
        template = ChatTemplate(wish["source"], wish["variables"])
    except TemplateError as error:
        raise Refusal(str(error)) from None
    except MemoryError:
        raise Refusal("the chat template needs too much memory") from None

    def render(question: bytes) -> bytes:
        try:
            conversation = json.loads(question)
            prompt = template.render(
                conversation["messages"],
                tools=conversation["tools"],
                max_bytes=conversation["max_bytes"],
            )
            return prompt.encode()
        except TemplateError as error:
            raise Refusal(str(error)) from None
        except MemoryError:
            raise Refusal("the chat template needs too much memory") from None

    return render


if __name__ == "__main__":
    run_helper(open_template)
