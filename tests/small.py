"""Small batches of every kind: dense, packed and padded rows of random ids, a part of them supervised."""

import torch

from lorarun.bucket import Given
from lorarun.data import Batch, supervised, targets

LENGTH = 40


def texts(count=2, seq=LENGTH, seed=0, share=0.5):
    """Dense rows, a part of them supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (count, seq), generator=generator)
    return Batch(ids, torch.where(torch.rand(count, seq, generator=generator) < share, ids, -100))


def packed(*lengths, seed=0, share=0.5):
    batch = texts(1, sum(lengths), seed, share)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return Batch(batch.ids, batch.labels, positions, documents)


def padded():
    batch = texts(3)
    lengths = torch.tensor([[40], [7], [21]])
    inside = torch.arange(LENGTH) < lengths
    return Batch(batch.ids, torch.where(inside, batch.labels, -100), documents=torch.where(inside, 0, -1))


def given(batch, denominator=1.0):
    return Given(batch.ids, batch.positions, batch.documents, targets(batch), supervised(batch), denominator)


BATCHES = {"dense": texts, "dense-128": lambda: texts(1, 120), "packed": lambda: packed(9, 1, 17), "padded": padded}
