"""Messages of an upload of tensors."""

import hashlib

import numpy as np
import pytest
import torch

from protos.engine.v1 import operator_pb2 as pb
from services.client import weights
from services.client.weights import _messages


def sent(tensors):
    update, *others = _messages(pb.WeightsUpdate(version="1"), tensors)
    assert update.update.version == "1"
    infos = [each for message in others for each in message.tensors.tensors]
    return infos, b"".join(message.data for message in others), others


def test_arrays_and_tensors_are_sent_alike(monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 16)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    by_array = sent({"w": array, "scalar": np.float32(2)})
    tensor = torch.from_numpy(array)
    by_tensor = sent({"w": tensor, "scalar": torch.tensor(2.0)})
    assert by_array == by_tensor
    infos, data, messages = by_array
    content = np.ascontiguousarray(array).tobytes()
    assert [(each.name, each.dtype, list(each.shape)) for each in infos] == [
        ("w", "F32", [3, 2]),
        ("scalar", "F32", []),
    ]
    assert infos[0].sha256 == hashlib.sha256(content).digest()
    assert data == content + np.float32(2).tobytes()
    assert max(len(message.data) for message in messages) == 16


def test_types_that_numpy_lacks_keep_their_bits():
    values = torch.tensor([1.0, -2.5])
    infos, data, _ = sent(
        {"a": values.bfloat16(), "b": values.to(torch.float8_e4m3fn), "c": torch.ones(2).bool()}
    )
    assert [each.dtype for each in infos] == ["BF16", "F8_E4M3", "BOOL"]
    assert data == bytes.fromhex("803f20c0") + bytes.fromhex("38c2") + b"\1\1"


def test_many_tensors_take_several_messages(monkeypatch):
    monkeypatch.setattr(weights, "TENSORS_PER_MESSAGE", 2)
    infos, _, messages = sent({str(n): np.zeros(1) for n in range(5)})
    assert len(infos) == 5
    assert [len(each.tensors.tensors) for each in messages[:3]] == [2, 2, 1]


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="complex64"):
        sent({"a": torch.ones(1, dtype=torch.complex64)})
