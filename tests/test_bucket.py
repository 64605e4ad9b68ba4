"""Shapes that batches are padded to, and the buffer that holds one."""

import pytest
import torch
from small import BATCHES, given, packed, texts

from lorarun.bucket import Shape, bucket, pack, shape_of, unpack
from lorarun.data import targets


def test_buckets_are_about_a_root_of_two_apart():
    assert [bucket(n) for n in (1, 128, 129, 192, 193, 257, 512, 513, 769)] == [
        128, 128, 192, 192, 256, 384, 512, 768, 1024,
    ]  # fmt: skip
    for n in range(1, 3000):
        assert n <= bucket(n, 16) < max(17, 1.5 * n)


def test_shapes():
    assert shape_of(given(texts(2, 256, share=1.0))) == Shape(2, 256, 512, False, False)
    assert shape_of(given(texts(1, 500, share=0.2)))[:3] == (1, 512, 128)
    assert shape_of(given(texts(8, 40))) == Shape(8, 48, 192, False, True)  # 128 would be three times the work
    assert shape_of(given(packed(100, 30)))[:2] == (1, 192)
    assert all(shape_of(given(packed(n)))[1] >= n for n in range(1, 200))


@pytest.mark.parametrize("name", BATCHES)
def test_what_is_packed_is_unpacked(name):
    batch = BATCHES[name]()
    shape = shape_of(given(batch))
    inputs, clock = unpack(pack(given(batch, 12.5), shape, 2**62 + 3), shape)
    assert clock == 2**62 + 3 and inputs.denominator == 12.5
    seq = batch.ids.shape[1]
    assert torch.equal(inputs.ids[:, :seq], batch.ids) and not inputs.ids[:, seq:].any()
    if batch.positions is not None:
        assert torch.equal(inputs.positions[:, :seq], batch.positions)
    if shape.documents:
        assert (inputs.documents[:, seq:] == -1).all()
        expected = torch.zeros_like(batch.ids) if batch.documents is None else batch.documents
        assert torch.equal(inputs.documents[:, :seq], expected)
    rows = torch.arange(inputs.ids.numel()) if inputs.rows is None else inputs.rows
    assert len(rows.unique()) == len(rows) == shape.rows
    goal = torch.full(inputs.ids.shape, -100).flatten()
    goal[rows] = inputs.goal
    goal = goal.view(inputs.ids.shape)
    assert torch.equal(goal[:, :seq], targets(batch)) and (goal[:, seq:] == -100).all()
