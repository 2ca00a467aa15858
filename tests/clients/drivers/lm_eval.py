"""lm-eval, with small tasks of its two kinds that scores and generates."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

from tests.clients.trial import Report, check, served

NUM_QUESTIONS = 8
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
metadata:
  version: 1
"""
CHOICE = """\
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
SUM = """\
doc_to_target: "{{sum}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""


def main() -> None:
    report = Report("lm_eval")
    url, model = served()
    tokenizer = os.environ["TOKENIZER"]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "sums.jsonl"
        data.write_text("".join(map(_line, range(NUM_QUESTIONS))))
        for name, kind, rest in (
            ("octavo_choice", "multiple_choice", CHOICE),
            ("octavo_sum", "generate_until", SUM),
        ):
            text = TASK.format(name=name, data=data, kind=kind) + rest
            (Path(folder) / f"{name}.yaml").write_text(text)
        tasks = TaskManager(include_path=folder, include_defaults=False)
        for endpoint, name, batch in (
            ("completions", "octavo_choice", 1),
            ("completions", "octavo_choice", 4),
            ("completions", "octavo_sum", 1),
            ("completions", "octavo_sum", 4),
            ("chat-completions", "octavo_sum", 1),
        ):
            with report.trial(f"local-{endpoint}: {name}, batch size {batch}"):
                path = "chat/completions" if endpoint.startswith("chat") else endpoint
                found = lm_eval.simple_evaluate(
                    model=f"local-{endpoint}",
                    model_args={
                        "model": model,
                        "base_url": f"{url}/{path}",
                        "tokenizer": tokenizer,
                        "max_retries": 1,
                    },
                    tasks=[name],
                    task_manager=tasks,
                    batch_size=batch,
                    apply_chat_template=endpoint.startswith("chat"),
                )
                check(found["results"][name], found)
    report.print()


def _line(number: int) -> str:
    question = f"{number} + 2 ="
    choices = [f" {number + 2}", f" {number + 5}"]
    return json.dumps(
        {"question": question, "choices": choices, "answer": 0, "sum": str(number + 2)}
    ) + "\n"  # fmt: skip


if __name__ == "__main__":
    main()
