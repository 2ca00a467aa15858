"""Weights that change under the real scheduler and workers."""

import asyncio
import copy
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.core.sleep import SleepMode
from services.engine.core.weights import Running, Update
from services.engine.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    NotPermittedError,
    SleepError,
)
from services.engine.scheduler.waiting_queue import WaitingQueue
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuation, greedy_continuations
from tests.support.step_driver import sampling as greedy_with
from tests.support.waiting import until

PROMPTS = [
    [5, 17, 3],
    [40, 41, 42, 43, 44, 45, 46, 47, 48],
    [5, 17, 3, 8, 2, 7, 1],
    [5, 17, 3, 8, 2, 9],
]
NUM_TOKENS = 24
GREEDY = greedy_with(max_tokens=NUM_TOKENS)
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "capture_while_serving": False,
}
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Case:
    """A checkpoint and others of its form, with the tokens of each."""

    def __init__(self, folder, family="qwen3", **sizes):
        self.folder = folder
        self.base = folder / "base"
        self.models = {"": write_checkpoint(self.base, family, **sizes)}
        for version in ("1", "2"):
            self.models[version] = self._write(version)

    def _write(self, version):
        """Writes a checkpoint whose matrices are the base's, and some more."""
        model = copy.deepcopy(self.models[""])
        torch.manual_seed(int(version))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.3 * param.std().nan_to_num() * torch.randn_like(param))
        target = self.folder / "weights" / version
        model.save_pretrained(target)
        return model

    def config(self, **options):
        return ranks_config(
            self.base,
            weights_folder=self.folder / "weights",
            language_model_only=True,
            **options,
        )

    def expected(self, version, prompts=PROMPTS):
        model = copy.deepcopy(self.models[version])
        return greedy_continuations(model, prompts, NUM_TOKENS)

    def spoiled(self, name, spoil):
        """Writes a copy of version 1 with other tensors; returns its name."""
        target = self.folder / "weights" / name
        shutil.copytree(self.folder / "weights" / "1", target)
        tensors = load_file(target / FILE)
        spoil(tensors)
        save_file(tensors, target / FILE)
        return name


def updated(ranks, path, version=None, running=Running.FINISH, *, is_part=False):
    """Returns an update from a folder."""
    weights = ranks.core.weights

    async def obtain():
        return weights.folder.find(path)

    wanted = Update(version=version or path, running=running, is_part=is_part)
    return weights.update(wanted, obtain)


async def begun(ranks, sampling=GREEDY):
    """Submits all prompts and waits until each has a token."""
    sinks = [ranks.submit(prompt, sampling) for prompt in PROMPTS]
    await until(lambda: all(sink.token_ids for sink in sinks))
    return sinks


async def ended(sinks):
    for sink in sinks:
        last = await sink.wait_for_end()
        assert last.error is None, last.error
    return [sink.token_ids for sink in sinks]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("llama_tied", GRAPHS),
        ("qwen3_moe", {"tensor_parallel_size": 2, **GRAPHS}),
        ("deepseek_v3", {}),
        ("qwen3_5", {}),
        ("qwen3", {**GRAPHS, "compilation_level": 3}),
        ("llama_bias", {"num_speculative_tokens": 2, "speculative_method": "ngram"}),
    ],
)
async def test_tokens_after_an_update_are_those_of_the_new_checkpoint(tmp_path, family, options):
    case = Case(tmp_path, family)
    first, second = case.expected(""), case.expected("1")
    assert first != second
    async with ranks_core(case.config(**options)) as ranks:
        assert await ranks.generate(PROMPTS, GREEDY) == first
        await updated(ranks, "1")
        for _ in range(2):  # the second time from the prefix cache
            assert await ranks.generate(PROMPTS, GREEDY) == second
        await updated(ranks, "2")
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("2")
        assert (ranks.core.weights.version, ranks.core.weights.num_updates) == ("2", 2)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "TP 2"])
async def test_no_graph_is_lost_to_an_update_during_its_capture(tmp_path, options):
    case = Case(tmp_path)
    sizes = list(range(1, 9))
    flags = GRAPHS | {"cudagraph_capture_sizes": sizes, "capture_while_serving": True}
    async with ranks_core(case.config(**flags, **options)) as ranks:
        for path in ("1", "2") * 4:
            await updated(ranks, path)
        graphs = ranks.core.stats().graphs
        await until(lambda: len(graphs.figures) == graphs.num_planned, timeout_s=120)
        assert not [each.fault for each in graphs.figures if each.fault]
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("2")


@pytest.fixture
def are_held(monkeypatch):
    """An event: an update keeps new requests from being next."""
    held, hold_new = asyncio.Event(), WaitingQueue.hold_new

    def hold(self):
        hold_new(self)
        held.set()

    monkeypatch.setattr(WaitingQueue, "hold_new", hold)
    return held


async def test_requests_finish_on_the_old_weights_and_new_ones_wait(tmp_path, are_held):
    case = Case(tmp_path)
    async with ranks_core(case.config()) as ranks:
        running = await begun(ranks)
        updating = asyncio.create_task(updated(ranks, "1"))
        await until(are_held.is_set)
        waiting = [ranks.submit(prompt, GREEDY) for prompt in PROMPTS]
        assert await ended(running) == case.expected("")
        await updating
        assert await ended(waiting) == case.expected("1")
        requests = [sink.outputs[-1].request for sink in (*running, *waiting)]
        assert [each.weights_version for each in requests] == [""] * 4 + ["1"] * 4
        assert {each.first_weights_version for each in requests} == {None}


@pytest.mark.parametrize("running", [Running.RECOMPUTE, Running.KEEP])
async def test_running_requests_go_on_under_the_new_weights(tmp_path, running):
    case = Case(tmp_path)
    async with ranks_core(case.config(host_kv_gb=0.001)) as ranks:
        sinks = await begun(ranks)
        await updated(ranks, "1", running=running)
        numbers = [len(sink.token_ids) for sink in sinks]
        assert ranks.core.weights.num_moved == 4
        tokens = await ended(sinks)
        for own, number, prompt, old in zip(
            tokens, numbers, PROMPTS, case.expected(""), strict=True
        ):
            assert own[:number] == old[:number]
            rest = greedy_continuation(case.models["1"], [*prompt, *own[:number]], 24 - number)
            assert running is Running.KEEP or own[number:] == rest
        request = sinks[0].outputs[-1].request
        assert (request.first_weights_version, request.weights_version) == ("", "1")
        # Other requests do not find the blocks that were kept.
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("1")


BAD = {
    "missing": (lambda t: t.pop("model.norm.weight"), "1 tensors are missing"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(7)}),
        r"model\.norm\.weight: its shape is \(7,\)",
    ),
    "nan": (lambda t: t["model.norm.weight"].fill_(torch.nan), "holds NaN"),
    "unknown": (lambda t: t.update(other=torch.ones(2)), "no tensor other"),
}


async def test_bad_weights_change_nothing(tmp_path):
    case = Case(tmp_path)
    async with ranks_core(case.config(tensor_parallel_size=2)) as ranks:
        sinks = await begun(ranks)
        for name, (spoil, message) in BAD.items():
            with pytest.raises(InvalidRequestError, match=message):
                await updated(ranks, case.spoiled(name, spoil))
        assert await ended(sinks) == case.expected("")
        assert ranks.core.weights.version == ""
        await updated(ranks, "1")
        for path in ("..", "/", "1/../..", str(case.base)):
            with pytest.raises(NotPermittedError):
                await updated(ranks, path, "3")
        with pytest.raises(DuplicateRequestError):
            await updated(ranks, "2", "1")
        with pytest.raises(InvalidRequestError, match="a version has"):
            await updated(ranks, "2", "a b")
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("1")


async def test_a_restarted_worker_has_the_newest_weights(tmp_path):
    case = Case(tmp_path)
    part = case.spoiled("part", lambda t: [t.pop(n) for n in list(t) if "layers.0" not in n])
    async with ranks_core(case.config(worker_patience_s=120)) as ranks:
        await updated(ranks, "1")
        await updated(ranks, "2")
        await updated(ranks, part, is_part=True)
        assert [each.name for each in ranks.core.weights.folders] == ["2", "part"]
        tokens = await ranks.generate(PROMPTS, GREEDY)
        assert tokens not in (case.expected("1"), case.expected("2"))
        sinks = await begun(ranks)
        os.kill(ranks.executors[-1].pid, signal.SIGKILL)
        assert await ended(sinks) == tokens
        assert sinks[0].outputs[-1].request.weights_version == "part"


async def test_a_restarted_worker_does_not_serve_other_weights_than_before(tmp_path):
    case = Case(tmp_path)
    async with ranks_core(case.config()) as ranks:
        await updated(ranks, "1")
        file = tmp_path / "weights" / "1" / "config.json"
        before, content = file.stat(), file.read_bytes()
        file.write_bytes(content + b" ")
        os.kill(ranks.executors[-1].pid, signal.SIGKILL)
        await until(lambda: "have changed" in ranks.core.stats().worker_progress, timeout_s=120)
        assert not ranks.core.is_ready
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        await ranks.wait_until_ready()
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("1")


async def test_an_update_that_is_given_up_changes_nothing(tmp_path, are_held):
    case = Case(tmp_path)
    async with ranks_core(case.config()) as ranks:
        sinks = await begun(ranks, greedy_with(max_tokens=50))
        updating = asyncio.create_task(updated(ranks, "1"))
        await until(lambda: ranks.core.weights.is_updating)
        with pytest.raises(EngineUnavailableError, match="another update"):
            await updated(ranks, "2")
        await until(are_held.is_set)
        updating.cancel()
        await asyncio.wait({updating})
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("")
        await ended(sinks)
        assert not ranks.core.weights.is_updating


async def test_a_worker_that_dies_in_the_exchange_comes_back_with_the_old_weights(tmp_path):
    case = Case(tmp_path)
    async with ranks_core(case.config(worker_patience_s=120)) as ranks:
        sinks = await begun(ranks)
        weights = ranks.core.weights

        async def obtain():
            return weights.folder.find("1")

        async def die(worker, orders):
            os.kill(worker.pid, signal.SIGKILL)
            await swap(worker, orders)

        swap, weights._swap = weights._swap, die
        with pytest.raises(EngineUnavailableError, match="the weights stay ''"):
            await weights.update(Update(version="1", running=Running.KEEP), obtain)
        assert await ended(sinks) == case.expected("")
        assert weights.version == ""


async def test_an_engine_starts_with_other_weights(tmp_path):
    case = Case(tmp_path)
    options = {"apply_weights": [tmp_path / "weights" / "1"], "weights_version": "one"}
    async with ranks_core(case.config(**options)) as ranks:
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("1")
        assert ranks.core.weights.version == "one"


async def test_log_probabilities_are_those_of_scoring_bit_for_bit(tmp_path):
    """In batch-invariant mode, under each version."""
    case = Case(tmp_path)
    options = {"batch_invariant": True, "tensor_parallel_size": 1, **GRAPHS}
    async with ranks_core(case.config(**options)) as ranks:
        for path in (None, "1"):
            if path is not None:
                await updated(ranks, path)
            made = [
                ranks.submit(p, greedy_with(max_tokens=NUM_TOKENS, logprobs=0)) for p in PROMPTS
            ]
            tokens = await ended(made)
            texts = [[*p, *own] for p, own in zip(PROMPTS, tokens, strict=True)]
            scoring = greedy_with(max_tokens=1, prompt_logprobs=0)
            scored = [ranks.submit(text, scoring) for text in texts]
            await ended(scored)
            for prompt, own, score in zip(PROMPTS, made, scored, strict=True):
                of_tokens = [e.logprob for each in own.outputs for e in each.logprobs]
                of_prompt = [e.logprob for each in score.outputs for e in each.prompt_logprobs]
                assert len(of_tokens) == NUM_TOKENS
                assert of_prompt[len(prompt) - 1 :] == of_tokens


@pytest.mark.parametrize("options", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}])
async def test_experts_that_move_between_ranks_get_the_new_weights(tmp_path, options):
    case = Case(tmp_path, "qwen3_moe")
    flags = {**options, "enable_expert_parallel": True, "eplb_interval": 1}
    async with ranks_core(case.config(**flags)) as ranks:
        sinks = await begun(ranks)
        await updated(ranks, "1", running=Running.RECOMPUTE)
        await ended(sinks)
        for _ in range(2):
            assert await ranks.generate(PROMPTS, GREEDY) == case.expected("1")
        assert ranks.core.counters.num_expert_moves


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "TP 2"])
async def test_an_engine_wakes_with_its_newest_weights(tmp_path, options):
    case = Case(tmp_path)
    part = case.spoiled("part", lambda tensors: [tensors.pop(each) for each in list(tensors)[3:]])
    async with ranks_core(case.config(enable_sleep=True, **options)) as ranks:
        for path, is_part in ((part, True), ("2", False)):
            await updated(ranks, path, is_part=is_part)
            expected = await ranks.generate(PROMPTS, GREEDY)
            for level in (1, 2):
                await ranks.core.sleep.fall_asleep(level, SleepMode.WAIT, 60.0)
                with pytest.raises(EngineUnavailableError, match="asleep"):
                    await updated(ranks, "1")
                await ranks.core.sleep.wake()
                assert await ranks.generate(PROMPTS, GREEDY) == expected
        assert expected == case.expected("2")


async def test_weights_that_newer_ones_cover_are_not_needed_to_wake(tmp_path):
    case = Case(tmp_path)
    parts = [
        case.spoiled(name, lambda tensors: [tensors.pop(each) for each in list(tensors)[3:]])
        for name in ("part", "again")
    ]
    async with ranks_core(case.config(enable_sleep=True)) as ranks:
        for path in parts:
            await updated(ranks, path, is_part=True)
        expected = await ranks.generate(PROMPTS, GREEDY)
        shutil.rmtree(case.folder / "weights" / parts[0])
        await ranks.core.sleep.fall_asleep(2, SleepMode.WAIT, 60.0)
        await ranks.core.sleep.wake()
        assert await ranks.generate(PROMPTS, GREEDY) == expected


async def test_an_engine_falls_asleep_only_between_updates(tmp_path):
    case = Case(tmp_path)
    obtained = asyncio.Event()

    async with ranks_core(case.config(enable_sleep=True)) as ranks:

        async def obtain():
            await obtained.wait()
            return ranks.core.weights.folder.find("1")

        update = asyncio.create_task(ranks.core.weights.update(Update(version="1"), obtain))
        await until(lambda: ranks.core.weights.is_updating)
        with pytest.raises(SleepError, match="being updated"):
            await ranks.core.sleep.fall_asleep(1, SleepMode.WAIT, 60.0)
        obtained.set()
        await update
        assert await ranks.generate(PROMPTS, GREEDY) == case.expected("1")
