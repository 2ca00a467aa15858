"""A node and the head over a real socket: who may join, and what ends a stream."""

import asyncio
import contextlib
from importlib.metadata import version

import grpc
import pytest
from structlog.testing import capture_logs

from protos.engine.v1.node_pb2 import Beat, NodeHello, NodeMessage, NodeProof, RankEvent
from protos.engine.v1.node_pb2_grpc import NodeServiceStub
from services.engine.config.parallel import ParallelConfig
from services.engine.edge.node_secret import NodeSecret, make_nonce
from services.engine.node.config import NodeConfig
from services.engine.node.node import LostHeadError, Node, RefusedNodeError
from services.engine.rpc import nodes as nodes_module
from services.engine.worker.rank_process import NodeLostError
from services.engine.worker.remote_ranks import JoinedNodes, RemoteRank
from services.transport.tls import ClientTls, ServerTls
from tests.support.certificates import LOOPBACK, Authority
from tests.support.nodes import head_server
from tests.support.passing_time import pass_time
from tests.support.waiting import until

SILENCE_TIMEOUT_S = 600
SECRET = "a secret of more than sixteen bytes"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(SECRET)
    return path


def head(nodes, tls=None, **flags):
    """Serves nodes; entered, it is the address."""
    config = ParallelConfig(
        tensor_parallel_size=4, num_nodes=2, node_silence_timeout_s=SILENCE_TIMEOUT_S, **flags
    )
    return head_server(nodes, config, tls)


@contextlib.asynccontextmanager
async def raw_node(address):
    """A stream that a test speaks on by itself."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = NodeServiceStub(channel).Join()
        yield call
        call.cancel()


async def join(call, **hello):
    await call.write(NodeMessage(hello=hello_of(**hello)))
    await call.read()
    await call.write(NodeMessage(proof=NodeProof()))
    return (await call.read()).welcome


def hello_of(**fields):
    return NodeHello(**{"version": version("octavo"), "nonce": make_nonce(), **fields})


async def status(call):
    with pytest.raises(grpc.RpcError):
        await call.read()
    return await call.code(), await call.details()


async def refusal(address, secret=b""):
    """Returns why a real node gives up."""
    node = Node(NodeConfig(head=address), NodeSecret(secret), None)
    with pytest.raises(RefusedNodeError) as caught:
        await node.run()
    return str(caught.value)


class TestARealNode:
    async def test_with_another_secret_is_refused_and_refuses(self, secret_file):
        nodes = JoinedNodes(2)
        async with head(nodes, node_secret_file=secret_file) as address:
            reason = await refusal(address, b"this is another secret")
            assert reason == f"the engine at {address} has another secret than this node"
            assert "has no secret, and cannot join the engine" in await refusal(address)
        async with head(nodes) as address:
            assert "has no --node-secret-file" in await refusal(address, SECRET.encode())

    async def test_is_not_taken_by_an_engine_of_one_host(self):
        async with head(None) as address:
            assert "it takes no nodes: it lacks --num-nodes" in await refusal(address)

    async def test_with_a_number_that_does_not_exist_gives_up(self):
        async with head(JoinedNodes(2)) as address:
            node = Node(NodeConfig(head=address, node_rank=7), NodeSecret(), None)
            with pytest.raises(RefusedNodeError, match="there is no node 7"):
                await node.run()

    async def test_joins_again_after_each_start(self, secret_file):
        nodes = JoinedNodes(2)
        async with head(nodes, node_secret_file=secret_file) as address:
            node = Node(NodeConfig(head=address), NodeSecret(SECRET.encode()), None)
            running = asyncio.create_task(node.run())
            async with asyncio.timeout(60):
                for _ in range(2):
                    (link,) = await nodes.wait_for_all(60, lambda stage: None)
                    link.close()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    async def test_joins_over_mutual_tls_and_not_with_a_strange_certificate(self, tmp_path):
        ours, strange = Authority(tmp_path), Authority(tmp_path, "strange")
        pair = ours.issue("head", LOOPBACK)
        server_tls = ServerTls(cert=pair.cert, key=pair.key, client_ca=ours.cert)
        nodes = JoinedNodes(2)
        async with head(nodes, server_tls) as address:
            for authority in (strange, ours):
                pair = authority.issue("node", LOOPBACK)
                tls = ClientTls(ca=ours.cert, cert=pair.cert, key=pair.key)
                node = Node(NodeConfig(head=address), NodeSecret(), tls)
                if authority is strange:
                    with pytest.raises(LostHeadError):
                        await node.join()
                    continue
                joining = asyncio.create_task(node.join())
                (link,) = await nodes.wait_for_all(60, lambda stage: None)
                link.close()
                with pytest.raises(LostHeadError, match="it has ended the ranks"):
                    await joining

    async def test_says_a_reason_for_which_it_cannot_join_once(self, monkeypatch):
        monkeypatch.setattr("services.engine.node.node.MIN_BACKOFF_S", 0)
        reasons = iter(["refused", "refused", "reset"])

        class Unlucky(Node):
            async def join(self):
                raise LostHeadError(next(reasons))

        with capture_logs() as logs, pytest.raises(RuntimeError):  # there are no more reasons
            await Unlucky(NodeConfig(head="127.0.0.1:1"), NodeSecret(), None).run()
        assert [line["reason"] for line in logs] == ["refused", "reset"]

    async def test_waits_for_an_engine_that_is_not_there_yet(self):
        nodes = JoinedNodes(2)
        async with head(nodes) as address:
            pass
        running = asyncio.create_task(Node(NodeConfig(head=address), NodeSecret(), None).run())
        await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


class TestTheHead:
    async def test_refuses_a_proof_of_another_secret(self, secret_file):
        async with (
            head(JoinedNodes(2), node_secret_file=secret_file) as address,
            raw_node(address) as call,
        ):
            await call.write(NodeMessage(hello=hello_of()))
            assert (await call.read()).hello.proof
            await call.write(NodeMessage(proof=NodeProof(proof=b"wrong")))
            assert await status(call) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "the node has another secret than the engine",
            )

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            (
                NodeMessage(hello=hello_of(version="0.0.9")),
                "the node runs Octavo 0.0.9",
            ),
            (NodeMessage(hello=hello_of(nonce=b"short")), "a node's nonce has 32 bytes"),
            (NodeMessage(beat=Beat()), "a node must send hello first"),
        ],
    )
    async def test_refuses_what_is_no_node_of_its_version(self, message, reason):
        async with head(JoinedNodes(2)) as address, raw_node(address) as call:
            await call.write(message)
            code, details = await status(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert reason in details

    async def test_ends_a_stream_that_begins_and_says_nothing_more(self, monkeypatch):
        monkeypatch.setattr(nodes_module, "HELLO_TIMEOUT_S", 0.05)
        async with head(JoinedNodes(2)) as address, raw_node(address) as call:
            await call.wait_for_connection()
            assert "a node must send hello within 0.05 s" in (await status(call))[1]

    async def test_refuses_a_second_node_until_the_first_has_left(self):
        async with head(JoinedNodes(2)) as address, raw_node(address) as second:
            async with raw_node(address) as first:
                assert (await join(first)).node == 1
                await second.write(NodeMessage(hello=hello_of()))
                await second.read()
                await second.write(NodeMessage(proof=NodeProof()))
                code, details = await status(second)
                assert code == grpc.StatusCode.UNAVAILABLE
                assert details == "all 1 nodes beside the head have joined"
            async with asyncio.timeout(60):
                while True:
                    async with raw_node(address) as third:
                        if (await join_or_none(third)) is not None:
                            break

    async def test_loses_a_node_from_which_nothing_comes(self, monkeypatch):
        nodes = JoinedNodes(2)
        async with head(nodes) as address, raw_node(address) as call:
            assert (await join(call)).silence_timeout_ms == SILENCE_TIMEOUT_S * 1000
            (link,) = await nodes.wait_for_all(60, lambda stage: None)
            rank = RemoteRank(2, 1)
            rank.connect(link)
            pass_time(monkeypatch, SILENCE_TIMEOUT_S)
            with pytest.raises(NodeLostError, match="nothing came from it for 600 s"):
                await rank.next_event()

    async def test_loses_a_node_that_reports_a_rank_of_another(self):
        nodes = JoinedNodes(2)
        async with head(nodes) as address, raw_node(address) as call:
            await join(call)
            (link,) = await nodes.wait_for_all(60, lambda stage: None)
            await call.write(NodeMessage(event=RankEvent(rank=9)))
            await until(lambda: link.is_closed)
            assert "node 1 has no rank 9" in str(link.loss)


async def join_or_none(call):
    try:
        return await join(call)
    except (AttributeError, grpc.RpcError, asyncio.InvalidStateError):
        return None
