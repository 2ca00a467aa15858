"""The process of chat templates, started by `template_process`.

Messages are JSON. The process has no environment, opens no files, starts no processes, and has
limited memory.
"""

import json
from collections.abc import Callable

from services.frontend.text.chat_template import TemplateError
from services.frontend.text.chat_templates import ChatTemplates
from services.processes.helper_program import Refusal, limit_resources, run_helper

MAX_MEMORY_BYTES = 512 * 2**20


def open_templates(opening: bytes) -> Callable[[bytes], bytes]:
    """Compiles a model's templates and returns the function that renders conversations.

    Raises:
        Refusal: the templates are invalid.
    """
    limit_resources(max_memory_bytes=MAX_MEMORY_BYTES)
    try:
        templates = ChatTemplates(json.loads(opening))
    except TemplateError as error:
        raise Refusal(str(error)) from None
    except MemoryError:
        raise Refusal("the chat template needs too much memory") from None

    def render(question: bytes) -> bytes:
        try:
            return templates.render(json.loads(question)).encode()
        except TemplateError as error:
            raise Refusal(str(error)) from None
        except MemoryError:
            raise Refusal("the chat template needs too much memory") from None

    return render


if __name__ == "__main__":
    run_helper(open_templates)
