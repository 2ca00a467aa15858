"""Copies of weights whose callers leave while they are made."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from protos.engine.v1 import operator_pb2 as pb
from services.engine.checkpoint.kept_weights import WeightsFolder
from services.engine.rpc.weights import update_from_caller, update_from_host
from tests.support.waiting import until

UPDATE = pb.WeightsUpdate(version="1")


class SlowFolder(WeightsFolder):
    """Copies are made when the test allows it."""

    def __init__(self, root):
        super().__init__(root)
        self.begins, self.may_go_on = threading.Event(), threading.Event()
        self.copies = []

    def make_copy(self, num_bytes, names=None):
        self.begins.set()
        assert self.may_go_on.wait(60)
        self.copies.append(super().make_copy(num_bytes, names))
        return self.copies[-1]

    def copy_shared_memory(self, name, sha256=b""):
        return self.make_copy(1)


async def upload(weights):
    async def messages():
        yield pb.UploadWeightsRequest(update=UPDATE)
        tensor = pb.TensorInfo(name="a", dtype="F32", shape=[1])
        yield pb.UploadWeightsRequest(tensors=pb.TensorList(tensors=[tensor]))

    await update_from_caller(weights, messages())


async def from_memory(weights):
    await update_from_host(weights, pb.UpdateWeightsRequest(update=UPDATE, shared_memory="new"))


@pytest.mark.parametrize("update", [upload, from_memory])
async def test_a_copy_goes_if_its_caller_left_while_it_was_made(tmp_path, update):
    async def obtain_alone(_, obtain):
        await obtain()

    folder = SlowFolder(tmp_path)
    task = asyncio.create_task(update(SimpleNamespace(folder=folder, update=obtain_alone)))
    await until(folder.begins.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    folder.may_go_on.set()
    await until(lambda: folder.copies and not folder.copies[0].folder.exists())
    folder.close()
