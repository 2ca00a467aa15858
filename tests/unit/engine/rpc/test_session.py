"""Session over a real socket, around a fake worker."""

import asyncio

import grpc
import numpy as np
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import (
    Abort,
    Credit,
    FrontendHello,
    FrontendMessage,
    GetStatsRequest,
    Submit,
)
from services.engine.kv_cache.prefix_index import PREFIX_KEY_VERSION, chain_keys, root_key
from services.engine.request import SamplingParams
from services.engine.rpc import outbox, session
from tests.support.engine_harness import SEED, engine_config, running_service
from tests.support.fake_worker import expected_output
from tests.support.passing_time import pass_time
from tests.support.waiting import until

LONG = 200
UNKNOWN_FIELD = b"\xf8\x06\x01"


class Frontend:
    """The other end of a session: sorts what comes by handle."""

    def __init__(self, stub, *, gives_credit=True):
        self.call = stub.Session()
        self.hello = None
        self.admitted, self.rejected, self.finished = set(), {}, {}
        self.tokens, self.logprobs = {}, {}
        self.heartbeats, self.steps = [], []
        self.is_draining = False
        self.gives_credit = gives_credit

    async def open(self):
        await self.send(hello=FrontendHello(frontend_id="test"))
        self.hello = (await self.call.read()).hello
        return self

    async def send(self, **message):
        await self.call.write(FrontendMessage(**message))

    async def submit(self, handle, *, prompt=(1, 2, 3), max_tokens=8, **fields):
        fields = {"request_id": f"r{handle}", **fields}
        sampling = fields.pop("sampling", {})
        await self.send(
            submit=Submit(
                handle=handle,
                prompt_token_ids=np.array(prompt, "<u4").tobytes(),
                sampling=sampling_pb2.SamplingParams(seed=SEED, max_tokens=max_tokens, **sampling),
                **fields,
            )
        )

    async def read_until(self, condition):
        """Reads until the condition holds; raises grpc's error when the stream ends with one."""
        async with asyncio.timeout(60):
            while not condition(self):
                message = await self.call.read()
                if message is grpc.aio.EOF:
                    raise EOFError
                await self._take(message)

    async def _take(self, message):
        match message.WhichOneof("message"):
            case "admitted":
                self.admitted.add(message.admitted.handle)
            case "rejected":
                self.rejected[message.rejected.handle] = message.rejected.failure
            case "heartbeat":
                self.heartbeats.append(message.heartbeat)
            case "draining":
                self.is_draining = True
            case "step":
                await self._take_step(message.step)

    async def _take_step(self, step):
        self.steps.append(step)
        handles = np.frombuffer(step.handles, "<u4").tolist()
        counts = np.frombuffer(step.num_tokens, "<u4").tolist() or [1] * len(handles)
        token_ids = np.frombuffer(step.token_ids, "<u4").tolist()
        for handle, count in zip(handles, counts, strict=True):
            self.tokens.setdefault(handle, []).extend(token_ids[:count])
            token_ids = token_ids[count:]
        for entry in step.logprobs:
            self.logprobs.setdefault(entry.handle, []).extend(entry.positions)
        for finished in step.finished:
            assert finished.handle not in self.finished
            self.finished[finished.handle] = finished
        if self.gives_credit:
            await self.send(credit=Credit(steps_read=len(self.steps)))


def expected(prompt=(1, 2, 3), max_tokens=8):
    return expected_output(prompt, SamplingParams(seed=SEED, max_tokens=max_tokens))


class TestHappyPath:
    async def test_hello_has_names_and_limits(self):
        async with running_service(engine_config(credit_window=5)) as service:
            hello = (await Frontend(service.stub).open()).hello
            assert (hello.model, hello.engine_id) == ("fake", service.core.engine_id)
            assert (hello.credit_window, hello.heartbeat_interval_ms) == (5, 50)

    async def test_requests_share_a_stream_and_get_their_own_tokens(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            prompts = {handle: range(handle, handle + 20) for handle in range(6)}
            for handle, prompt in prompts.items():
                await frontend.submit(handle, prompt=prompt)
            await frontend.read_until(lambda f: len(f.finished) == 6)
            assert frontend.admitted == set(prompts)
            for handle, prompt in prompts.items():
                assert frontend.tokens[handle] == expected(prompt)
                assert frontend.finished[handle].finish_reason == (
                    sampling_pb2.FINISH_REASON_LENGTH
                )
                usage = frontend.finished[handle].usage
                assert (usage.prompt_tokens, usage.output_tokens) == (20, 8)

    async def test_log_probabilities_come_with_the_tokens_that_asked_for_them(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, sampling={"logprobs": 2})
            await frontend.submit(2)
            await frontend.read_until(lambda f: len(f.finished) == 2)
            assert set(frontend.logprobs) == {1}
            chosen = [position.chosen.token_id for position in frontend.logprobs[1]]
            assert chosen == frontend.tokens[1]
            assert {len(position.top) for position in frontend.logprobs[1]} == {2}

    async def test_a_handle_can_be_used_again_after_its_request_ended(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            for _ in range(2):
                await frontend.submit(1)
                await frontend.read_until(lambda f: 1 in f.finished)
                frontend.finished.clear()
            assert frontend.tokens[1] == expected() * 2

    async def test_heartbeats_come_while_nothing_else_does(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            await frontend.read_until(lambda f: len(f.heartbeats) >= 3)
            last = frontend.heartbeats[-1]
            assert (last.step_age_ms, last.num_running, last.ready) == (0, 0, True)
            assert last.num_free_blocks == service.core.load().num_free_blocks

    async def test_heartbeats_have_the_tokens_computed_lately(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1)
            await frontend.read_until(lambda f: 1 in f.finished)
            await frontend.read_until(lambda f: f.heartbeats and f.heartbeats[-1].num_recent_tokens)

    async def test_heartbeats_have_the_age_of_the_last_step_of_a_hung_worker(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            service.executors.last.hang()
            await frontend.submit(1)
            await frontend.read_until(lambda f: f.heartbeats and f.heartbeats[-1].step_age_ms > 100)
            assert frontend.heartbeats[-1].num_running == 1


class TestRejections:
    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"prompt": ()}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"prompt": range(300)}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"sampling": {"top_p": 2}}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"request_id": "r1"}, grpc.StatusCode.ALREADY_EXISTS),
            ({"handle": 1, "request_id": "other"}, grpc.StatusCode.ALREADY_EXISTS),
            ({"timeout_ms": 0}, grpc.StatusCode.DEADLINE_EXCEEDED),
        ],
    )
    async def test_a_bad_submission_is_rejected_and_its_neighbour_goes_on(self, fields, code):
        async with running_service(num_steps=0) as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, max_tokens=40)
            await frontend.submit(**{"handle": 2, **fields})
            await frontend.read_until(lambda f: f.rejected)
            service.executors.last.resume()
            await frontend.read_until(lambda f: f.finished)
            (failure,) = frontend.rejected.values()
            assert failure.code == code.value[0]
            assert frontend.tokens[1] == expected(max_tokens=40)
            stats = await service.stub.GetStats(GetStatsRequest())
            assert dict(stats.rejected) == {code.name: 1}

    async def test_an_unknown_field_is_rejected_and_not_ignored(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            submit = Submit(handle=3, request_id="x", prompt_token_ids=b"\1\0\0\0")
            await frontend.send(
                submit=Submit.FromString(submit.SerializeToString() + UNKNOWN_FIELD)
            )
            await frontend.read_until(lambda f: f.rejected)
            assert "field 111" in frontend.rejected[3].message

    async def test_a_full_queue_says_when_to_try_again(self):
        async with running_service(engine_config(max_num_waiting=1)) as service:
            service.executors.last.hang()
            frontend = await Frontend(service.stub).open()
            await frontend.submit(0)
            # The first one leaves the queue as soon as the step loop runs; two more overfill it.
            for handle in range(1, 12):
                await frontend.submit(handle)
            await frontend.read_until(lambda f: len(f.admitted) + len(f.rejected) == 12)
            failure = next(iter(frontend.rejected.values()))
            assert failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert failure.retry_after_ms > 0

    async def test_an_engine_whose_worker_is_gone_for_good_says_unavailable(self):
        async with running_service(engine_config(worker_patience_s=0), num_steps=1) as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, max_tokens=LONG)
            await frontend.read_until(lambda f: f.tokens)
            service.executors.last.die()
            await frontend.read_until(lambda f: f.finished)
            failure = frontend.finished[1].failure
            assert failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
            await until(lambda: service.core.is_ready)
            service.executors.last.resume()
            await frontend.submit(2)
            await frontend.read_until(lambda f: 2 in f.finished)
            assert frontend.tokens[2] == expected()


class TestProtocol:
    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (FrontendMessage(credit=Credit()), "must be hello"),
            (FrontendMessage(hello=FrontendHello(frontend_id="x" * 129)), "frontend_id has 129"),
            (FrontendMessage(hello=FrontendHello.FromString(UNKNOWN_FIELD)), "field 111"),
        ],
    )
    async def test_a_bad_first_message_ends_the_stream(self, message, text):
        async with running_service() as service:
            call = service.stub.Session()
            await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError, match=text) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_session_that_never_says_hello_is_ended(self, monkeypatch):
        monkeypatch.setattr(session, "HELLO_TIMEOUT_S", 0.01)
        async with running_service() as service:
            call = service.stub.Session()
            with pytest.raises(grpc.aio.AioRpcError, match=r"hello within 0\.01 s") as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (FrontendMessage(), "is empty"),
            (FrontendMessage.FromString(UNKNOWN_FIELD), "field 111"),
            (FrontendMessage(hello=FrontendHello()), "one hello"),
        ],
    )
    async def test_a_broken_rule_ends_the_stream_and_frees_its_requests(self, message, text):
        async with running_service(num_steps=1) as service:
            before = service.core.load().num_free_blocks
            # grpc.aio hides how a stream ended from a client that writes to it afterwards.
            frontend = await Frontend(service.stub, gives_credit=False).open()
            await frontend.submit(1, max_tokens=LONG)
            await frontend.call.write(message)
            with pytest.raises(grpc.aio.AioRpcError, match=text):
                await frontend.read_until(lambda _: False)
            assert await frontend.call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: service.core.load().num_free_blocks == before)

    async def test_an_aborted_request_is_answered_with_a_finish_record(self):
        async with running_service(num_steps=1) as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, max_tokens=LONG)
            await frontend.read_until(lambda f: f.tokens)
            await frontend.send(abort=Abort(handles=[1, 99]))
            await frontend.read_until(lambda f: f.finished)
            assert frontend.finished[1].finish_reason == sampling_pb2.FINISH_REASON_ABORTED
            assert service.core.load().num_running == 0

    async def test_a_half_close_ends_the_requests_and_then_the_stream(self):
        async with running_service(num_steps=1) as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, max_tokens=LONG)
            await frontend.read_until(lambda f: f.tokens)
            frontend.gives_credit = False
            await frontend.call.done_writing()
            with pytest.raises(EOFError):
                await frontend.read_until(lambda _: False)
            assert frontend.finished[1].finish_reason == sampling_pb2.FINISH_REASON_ABORTED
            assert await frontend.call.code() is grpc.StatusCode.OK

    async def test_a_stream_that_dies_frees_its_blocks(self):
        async with running_service(num_steps=1) as service:
            before = service.core.load().num_free_blocks
            frontend = await Frontend(service.stub).open()
            for handle in range(12):
                await frontend.submit(handle, max_tokens=LONG)
            await frontend.read_until(lambda f: f.tokens)
            frontend.call.cancel()
            await until(lambda: service.core.load().num_free_blocks == before)
            stats = await service.stub.GetStats(GetStatsRequest())
            assert (stats.num_sessions, stats.num_waiting) == (0, 0)

    async def test_a_time_limit_ends_a_request_with_its_code(self, monkeypatch):
        async with running_service(num_steps=1) as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, max_tokens=LONG, timeout_ms=30_000)
            await frontend.read_until(lambda f: f.tokens)
            pass_time(monkeypatch, 30)
            await frontend.read_until(lambda f: f.finished)
            failure = frontend.finished[1].failure
            assert failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


class StallClock:
    """Fakes how long the output of sessions was unread."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


class TestSlowReader:
    async def test_steps_are_merged_beyond_the_window_and_nothing_is_lost(self):
        async with running_service(engine_config(credit_window=2), num_steps=1) as service:
            frontend = await Frontend(service.stub, gives_credit=False).open()
            await frontend.submit(1, max_tokens=50)
            await frontend.read_until(lambda f: len(f.steps) == 1)
            service.executors.last.resume(1)
            await frontend.read_until(lambda f: len(f.steps) == 2)
            service.executors.last.resume()
            await until(lambda: service.core.counters.finished["length"] == 1)
            await frontend.submit(1, request_id="r2")  # its end was not sent yet
            await frontend.read_until(lambda f: f.rejected)
            assert frontend.rejected[1].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
            await frontend.send(credit=Credit(steps_read=2))
            await frontend.read_until(lambda f: f.finished)
            assert len(frontend.steps) == 3
            assert frontend.tokens[1] == expected(max_tokens=50)

    async def test_one_that_reads_nothing_is_cut_and_another_session_is_not_slowed(
        self, monkeypatch
    ):
        clock = StallClock()
        monkeypatch.setattr(outbox, "time", clock)
        config = engine_config(credit_window=1, slow_reader_timeout_s=60)
        async with running_service(config, num_steps=1) as service:
            slow = await Frontend(service.stub, gives_credit=False).open()
            other = await Frontend(service.stub).open()
            await slow.submit(1, max_tokens=LONG)
            await slow.read_until(lambda f: f.steps)  # the window is full from here on
            await other.submit(2, request_id="other", max_tokens=LONG)
            await other.read_until(lambda f: f.admitted)
            service.executors.last.resume(9)
            await other.read_until(lambda f: len(f.tokens.get(2, ())) == 7)
            cut = asyncio.create_task(slow.read_until(lambda _: False))
            while not cut.done():
                clock.now_s += 10
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError, match="unread"):
                await cut
            assert await slow.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            service.executors.last.resume()
            await other.read_until(lambda f: f.finished)
            assert other.tokens[2] == expected(max_tokens=LONG)

    async def test_one_whose_lag_would_not_fit_a_message_is_cut(self):
        config = engine_config(credit_window=1, max_message_bytes=2**16)
        async with running_service(config, num_steps=0) as service:
            frontend = await Frontend(service.stub, gives_credit=False).open()
            for handle in range(8):
                await frontend.submit(handle, max_tokens=LONG, sampling={"logprobs": 20})
            service.executors.last.resume()
            with pytest.raises(grpc.aio.AioRpcError, match="bytes of output lay unread"):
                await frontend.read_until(lambda _: False)
            assert service.core.load().num_running == 0


class TestDrain:
    async def test_is_announced_and_the_stream_ends_when_its_requests_have(self):
        async with running_service(num_steps=1) as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, max_tokens=40)
            await frontend.read_until(lambda f: f.tokens)
            drain = asyncio.create_task(service.core.drain.run(60))
            await frontend.read_until(lambda f: f.is_draining)
            await frontend.submit(2)
            await frontend.read_until(lambda f: f.rejected)
            # grpc.aio hides how a stream ended from a client that writes to it afterwards.
            frontend.gives_credit = False
            service.executors.last.resume()
            with pytest.raises(EOFError):
                await frontend.read_until(lambda _: False)
            assert frontend.tokens[1] == expected(max_tokens=40)
            assert frontend.rejected[2].code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert await frontend.call.code() is grpc.StatusCode.OK
            assert (await drain).num_finished == 1

    async def test_opens_no_new_session(self):
        async with running_service() as service:
            await service.core.drain.run(1)
            call = service.stub.Session()
            await call.write(FrontendMessage(hello=FrontendHello()))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


class TestRequestsOfAnotherEngine:
    @pytest.mark.parametrize("num_done", [1, 7, 19])
    async def test_a_resumed_request_makes_the_tokens_that_were_to_come(self, num_done):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            whole = expected(max_tokens=20)
            prompt = (1, 2, 3, *whole[:num_done])
            await frontend.submit(1, prompt=prompt, num_resumed_tokens=num_done, max_tokens=20)
            await frontend.read_until(lambda f: f.finished)
            assert frontend.tokens[1] == whole[num_done:]
            usage = frontend.finished[1].usage
            assert (usage.prompt_tokens, usage.output_tokens) == (3, 20)
            assert usage.cached_tokens <= 3

    async def test_one_with_nothing_left_to_do_is_refused(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            await frontend.submit(1, prompt=range(11), num_resumed_tokens=8, max_tokens=8)
            await frontend.read_until(lambda f: f.rejected)
            assert frontend.rejected[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def chunks(heartbeats):
    added = b"".join(beat.prefixes.added for beat in heartbeats)
    return [added[start : start + 8] for start in range(0, len(added), 8)]


def wanting_prefixes(version):
    return FrontendHello(frontend_id="test", wants_prefixes=True, prefix_key_version=version)


class TestPrefixes:
    async def test_heartbeats_have_cached_prefixes_if_hello_asks_for_them(self):
        async with running_service(engine_config(block_size=4)) as service:
            frontend = Frontend(service.stub)
            await frontend.send(hello=wanting_prefixes(PREFIX_KEY_VERSION))
            await frontend.call.read()
            await frontend.submit(1, prompt=range(8), cache_salt="mine", max_tokens=1)
            keys = {key[:8] for key in chain_keys(root_key("mine"), range(8), 4)}
            await frontend.read_until(lambda f: {*chunks(f.heartbeats)} == keys)
            assert [beat.prefixes.reset for beat in frontend.heartbeats][:1] == [True]
            assert not any(beat.prefixes.reset for beat in frontend.heartbeats[1:])

    @pytest.mark.parametrize("version", [0, PREFIX_KEY_VERSION + 1])
    async def test_a_frontend_with_keys_of_another_version_is_served_without_them(self, version):
        async with running_service() as service:
            frontend = Frontend(service.stub)
            await frontend.send(hello=wanting_prefixes(version))
            await frontend.call.read()
            await frontend.read_until(lambda f: f.heartbeats)
            assert not frontend.heartbeats[0].HasField("prefixes")

    async def test_other_frontends_get_none(self):
        async with running_service() as service:
            frontend = await Frontend(service.stub).open()
            await frontend.read_until(lambda f: f.heartbeats)
            assert not frontend.heartbeats[0].HasField("prefixes")


async def test_a_message_that_holds_too_much_ends_the_session():
    async with running_service() as service:
        for message, complaint in (
            (Abort(handles=[1] * 70_000), "abort has 70000 handles; the limit is 65536"),
            (Abort(handles=[1] * 2**21), "bytes of numbers"),
        ):
            frontend = Frontend(service.stub)
            await frontend.send(hello=FrontendHello(frontend_id="test"))
            await frontend.send(abort=message)
            with pytest.raises(grpc.aio.AioRpcError, match=complaint) as error:
                [_ async for _ in frontend.call]
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
