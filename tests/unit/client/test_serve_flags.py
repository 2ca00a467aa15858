"""Which service gets which argument of `octavo serve`, and what vLLM's flags become."""

import re
from typing import get_args

import pytest

from services.client.serve_flags import ServeFlagError, divide_arguments
from services.client.service_flags import ServiceFlags
from services.client.vllm_flags import ANSWERED, OWN_FORMATS, RENAMED, VALUES, WITHOUT_EFFECT
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import read_flags
from services.frontend.config import FrontendConfig
from tests.support.processes import ROOT

FLAGS = ServiceFlags.read()


def divide(line: str, **others):
    return divide_arguments(line.split(), FLAGS, **others)


@pytest.mark.parametrize("line", ["DIR", "DIR --max-num-seqs 4", "--max-num-seqs=4 DIR"])
def test_a_word_that_belongs_to_no_flag_is_the_model(line):
    assert divide(line).models == ["DIR"]


def test_without_a_model_it_is_the_embedded_one():
    assert divide("--max-model-len 64").models == []


def test_each_flag_goes_to_the_service_that_has_it():
    division = divide("--max-model-len 64 --no-use-inductor --reply-format=plain --enforce-eager")
    assert division.engine == ["--max-model-len=64", "--no-use-inductor", "--enforce-eager"]
    assert division.frontend == ["--reply-format=plain"]
    assert division.remarks == []


def test_a_value_may_look_like_a_flag_and_hold_anything():
    division = divide('--inductor-compile-config {"a":-1} --histogram-dir= --devices -1')
    assert division.engine == [
        '--inductor-compile-config={"a":-1}', "--histogram-dir=", "--devices=-1",
    ]  # fmt: skip


def test_underscores_are_dashes():
    assert divide("--max_num_seqs 4").engine == ["--max-num-seqs=4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--log-level debug", "--engine-arg=--log-level=debug, --frontend-arg="),
        ("--log-level=debug", "--engine-arg=--log-level=debug, --frontend-arg=--log-level=debug"),
        ("--engine-address host:1", "`octavo serve` chooses it"),
        ("--max-num-seq 4", "no flag --max-num-seq; do you mean --max-num-seqs"),
        ("--frobnicate", "there is no flag --frobnicate$"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("one two", "one and two are 2 models"),
        ("--served-model-name a b DIR", "b and DIR are 2 models"),
        ("--revision main", "OWNER/NAME@REVISION"),
        ("--speculative-config {", "JSON object"),
        ('--speculative-config {"method":"medusa"}', "method medusa"),
        ('--speculative-config {"frob":1}', "frob: there is no such setting"),
        ("--tool-call-parser granite", "granite: there is no such format"),
        ("--api-key secret", "--api-keys-file"),
        ("--chat-template x.jinja", "chat_template.jinja"),
        ("-O3", "--compilation-level"),
        ("-O.level=3", "--compilation-level"),
        ("--compilation-config.level 3", "--compilation-level"),
        ("--no-enable-chunked-prefill", "--max-num-batched-tokens"),
    ],
)
def test_what_cannot_be_passed_on_is_answered_in_one_line(line, message):
    with pytest.raises(ServeFlagError, match=message) as caught:
        divide(line)
    assert "\n" not in str(caught.value)


def test_one_model_named_twice_is_one():
    assert divide("DIR", models=["DIR"]).models == ["DIR"]
    assert divide("", models=["DIR", "DIR"]).models == ["DIR", "DIR"], "two names, see check_names"


def test_further_models_come_with_their_flag():
    assert divide("DIR", models=["OTHER", "DIR"]).models == ["DIR", "OTHER"]
    with pytest.raises(ServeFlagError, match="--revision needs one model"):
        divide("DIR --revision main", models=["OTHER"])
    speculation = """--speculative-config {"method":"ngram"}"""
    assert divide(speculation, models=["A", "B"]).engine == ["--speculative-method=ngram"]
    with pytest.raises(ServeFlagError, match=r"--draft-model and .* once for each"):
        divide(f"{speculation} {speculation}", models=["A", "B"])


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("-tp 2 -pp=2 -dp 2 -ep", "--tensor-parallel-size=2 --pipeline-parallel-size=2 "
         "--data-parallel-size=2 --enable-expert-parallel"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size=2"),
        ("--dtype half", "--dtype=float16"),
        ("--dtype auto", "--dtype=auto"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype=fp8_e4m3"),
        ("--max-model-len 32k", "--max-model-len=32000"),
        ("--max-model-len 32K", "--max-model-len=32768"),
        ("--max-model-len 1.5K", "--max-model-len=1536"),
        ("--max-model-len auto", ""),
        ("--quantization awq", ""),
        ("-q fp8", "--quantization=fp8"),
        ("--load-format auto", ""),
        ("--num-gpu-blocks-override 64", "--num-kv-blocks=64"),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3}',
         "--speculative-method=ngram --num-speculative-tokens=4 --prompt-lookup-max=3"),
        ("--speculative-config.method mtp --speculative-config.num_speculative_tokens 2",
         "--speculative-method=mtp --num-speculative-tokens=2"),
        ('--speculative-config {"model":"draft","num_speculative_tokens":4}',
         "--draft-model=draft --num-speculative-tokens=4"),
    ],
)  # fmt: skip
def test_flags_of_vllm_become_the_engines(line, engine):
    assert divide(line).engine == engine.split()


@pytest.mark.parametrize(
    ("line", "frontend"),
    [
        ("--tool-call-parser hermes", "--reply-format=hermes"),
        ("--tool-call-parser glm45", "--reply-format=glm4"),
        ("--uvicorn-log-level critical", "--log-level=error"),
        ("--allowed-origins *", "--cors-origins=*"),
        ('--allowed-origins ["https://a","https://b"]', "--cors-origins=https://a,https://b"),
        ("--api-server-count 4", "--processes=4"),
        ("--ssl-certfile c.pem --ssl-keyfile k.pem", "--tls-cert=c.pem --tls-key=k.pem"),
    ],
)
def test_flags_of_vllm_become_the_frontends(line, frontend):
    division = divide(line)
    assert division.frontend == frontend.split()
    assert division.engine == []


def test_traces_of_both_services_go_to_one_collector():
    division = divide("--otlp-traces-endpoint http://host:4317")
    assert division.engine == division.frontend == ["--otlp-endpoint=http://host:4317"]


def test_flags_without_effect_are_taken_and_said():
    line = "--trust-remote-code --swap-space 4 --enable-auto-tool-choice --no-enable-log-requests M"
    division = divide(line)
    assert (division.models, division.engine, division.frontend) == (["M"], [], [])
    assert [remark.partition(" has no effect: ")[0] for remark in division.remarks] == [
        "--trust-remote-code", "--swap-space", "--enable-auto-tool-choice",
        "--no-enable-log-requests",
    ]  # fmt: skip


def test_a_revision_is_part_of_the_name():
    assert divide("OWNER/NAME --revision v1").models == ["OWNER/NAME@v1"]


def test_a_switch_of_the_services_takes_no_value_from_the_next_word():
    switches = [name for name, is_switch in FLAGS.engine.items() if is_switch]
    division = divide_arguments([f"--{name}" for name in switches] + ["DIR"], FLAGS)
    assert division.models == ["DIR"]
    read = read_flags(EngineConfig, [word for word in division.engine if "vllm" not in word])
    assert read.cache.enable_prefix_caching


def test_the_table_of_vllms_flags_has_none_of_ours():
    foreign = {*RENAMED, *WITHOUT_EFFECT, *ANSWERED}
    assert foreign & {*FLAGS.engine, *FLAGS.frontend} == set()
    assert len(foreign) == len(RENAMED) + len(WITHOUT_EFFECT) + len(ANSWERED)


def test_the_table_of_vllms_flags_leads_to_flags_and_values_that_exist():
    for targets in RENAMED.values():
        for service, name in targets:
            assert name in getattr(FLAGS, service)
    assert get_args(FrontendConfig.model_fields["reply_format"].annotation) == OWN_FORMATS
    assert {*VALUES["reply-format"].values()} == {*OWN_FORMATS}
    for reason in [*ANSWERED.values(), *(reason for _, reason in WITHOUT_EFFECT.values())]:
        named = {name.removeprefix("--") for name in re.findall(r"--[a-z][a-z-]+", reason)}
        assert named <= {*FLAGS.engine, *FLAGS.frontend}, reason
        assert all((ROOT / page).exists() for page in re.findall(r"docs/[\w.-]+", reason)), reason


def test_the_page_about_vllm_has_every_flag_of_the_table():
    page = (ROOT / "docs" / "from-vllm.md").read_text()
    missing = [
        name
        for name in [*RENAMED, *WITHOUT_EFFECT, *ANSWERED]
        if not re.search(rf"`--?{re.escape(name)}[` ]", page)
    ]
    assert missing == []
