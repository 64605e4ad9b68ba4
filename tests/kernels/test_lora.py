"""The low-rank kernels against the composed form in float64, with mixed ranks, absent adapters and dropout."""

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.kernels.dropout import Dropout, dropout, philox, philox_rounds
from lorarun.kernels.lora import Branch, lora_down, lora_grad, lora_input_grad, lora_up_, slot


def make(device, dtype, rows, cols, sizes, ranks, masters=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(rows, cols).to(device, dtype)
    branches = []
    for i, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        a, b = torch.randn(rank, cols) / cols**0.5, torch.randn(size, rank)
        a, b = a.to(device, masters), b.to(device, masters)
        branches.append(Branch(size, a, b, 0.5 + i) if rank else Branch(size))
    return x, branches


def check(device, dtype, rows, cols, sizes, ranks, drop=None, masters=torch.float32, roundings=8):
    x, branches = make(device, dtype, rows, cols, sizes, ranks, masters)
    width = slot(branches)
    dx64 = dropout(x.double(), *drop) if drop else x.double()
    keep = (dropout(torch.ones_like(x).double(), *drop)) if drop else 1.0

    poison(device)
    u = lora_down(x, branches, drop)
    y = torch.randn(rows, sum(sizes)).to(device, dtype)
    residual = torch.randn(rows, sum(sizes)).to(device, dtype) if len(sizes) == 1 else None
    before = y.clone()
    out = lora_up_(y, u, branches, residual)
    assert out is y
    dy = torch.randn(rows, sum(sizes)).to(device, dtype)
    poison(device)
    du, dbs = lora_grad(dy, u, branches)
    poison(device)
    dx, das = lora_input_grad(x, du, branches, drop)
    nothing, only = lora_input_grad(x, du, branches, drop, needs_dx=False)
    assert nothing is None

    expected_dx, start = torch.zeros_like(x).double(), 0
    for i, branch in enumerate(branches):
        cols_i = slice(start, start + branch.size)
        at = slice(i * width, (i + 1) * width)
        expected_y = before[:, cols_i].double()
        if branch.a is None:
            assert dbs[i] is None and das[i] is None and (u[:, at] == 0).all() and (du[:, at] == 0).all()
        else:
            a, b = branch.a.double(), branch.b.double()
            u64 = dx64 @ a.T
            close(u[:, at][:, : branch.rank], u64, "u", roundings)
            assert (u[:, at][:, branch.rank :] == 0).all()
            expected_y = expected_y + branch.scale * u64 @ b.T
            du64 = branch.scale * dy[:, cols_i].double() @ b
            close(du[:, at][:, : branch.rank], du64, "du", roundings)
            assert dbs[i].dtype == das[i].dtype == torch.float32
            close(dbs[i].to(dtype), branch.scale * dy[:, cols_i].double().T @ u64, "dB", roundings)
            close(das[i].to(dtype), du64.T @ dx64, "dA", roundings)
            assert torch.equal(das[i], only[i])
            expected_dx = expected_dx + keep * (du64 @ a)
        if residual is not None:
            expected_y = expected_y + residual.double()
        close(y[:, cols_i], expected_y, "y", roundings)
        start += branch.size
    close(dx, expected_dx, "dx", roundings)
    assert all(torch.equal(p, q) for p, q in zip(lora_grad(dy, u, branches)[1], dbs, strict=True) if p is not None)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("rows", "cols", "sizes", "ranks"),
    [
        (1, 64, [48], [4]),
        (70, 100, [130, 40, 40], [16, 16, 16]),
        (33, 136, [40, 24, 200], [8, 0, 20]),
        (65, 64, [130, 130], [1, 3]),
        (130, 72, [50], [33]),
        (5, 64, [96], [80]),  # wider than the kernels take
    ],
)
def test_values_and_gradients(device, rows, cols, sizes, ranks, half):
    check(device, narrow(device) if half else torch.float32, rows, cols, sizes, ranks, roundings=8 if half else 64)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
def test_dropout_draws_the_reference_mask(device, half):
    dtype = narrow(device) if half else torch.float32
    for sizes, ranks in (([40, 24], [8, 16]), ([70], [4])):
        check(device, dtype, 37, 132, sizes, ranks, Dropout(0.25, 2**40 + 3, 1), roundings=8 if half else 64)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [None, 0.05])
@pytest.mark.parametrize(
    ("rows", "cols", "sizes", "ranks"),
    [
        (8192, 4096, [4096, 1024, 1024], [16, 16, 16]),
        (4097, 4096, [14336, 14336], [16, 16]),
        (3, 14336, [4096], [64]),
        (1000, 2560, [2048, 1024, 1024], [8, 0, 32]),
    ],
)
def test_values_and_gradients_large(device, rows, cols, sizes, ranks, p):
    check(device, torch.bfloat16, rows, cols, sizes, ranks, p and Dropout(p, 2**62 + 9, 77), roundings=8)


@pytest.mark.kernel
def test_masters_of_16_bits_and_no_rows(device):
    check(device, narrow(device), 20, 64, [48, 16], [8, 8], masters=narrow(device))
    x, branches = make(device, torch.float32, 0, 64, [48, 16], [8, 8])
    u = lora_down(x, branches)
    assert u.shape == (0, 32)
    lora_up_(x.new_zeros(0, 64), u, branches)
    du, dbs = lora_grad(x.new_zeros(0, 64), u, branches)
    assert du.shape == (0, 32) and all((db == 0).all() for db in dbs)
    dx, das = lora_input_grad(x, du, branches)
    assert dx.shape == (0, 64) and all((da == 0).all() for da in das)


def test_philox_gives_the_published_numbers():
    """Known answers of Random123's philox4x32-7, for a zero and for a π-digit counter and key."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = philox_rounds(zero, zero, zero, zero, 0, 0)
    assert [int(w) for w in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    pi = [torch.tensor([w]) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = philox_rounds(*pi, 0xA4093822, 0x299F31D0)
    assert [int(w) for w in words] == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]


def test_dropout_keeps_its_share_and_its_mean():
    x = torch.ones(400, 500)
    y = dropout(x, 0.1, seed=7, stream=3)
    n = x.numel()
    sigma = (0.1 * 0.9 / n) ** 0.5
    assert abs((y == 0).float().mean() - 0.1) < 5 * sigma
    assert abs(y.mean() - 1) < 5 * sigma / 0.9
    share = (
        1 - round(0.1 * 2**15) / 2**15
    )  # what is kept is scaled by the probability that was taken, not the one asked for
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / share))
    assert torch.equal(y, dropout(x, 0.1, seed=7, stream=3))
    for seed, stream in ((8, 3), (7, 4)):
        both = ((y == 0) & (dropout(x, 0.1, seed, stream) == 0)).float().mean()
        assert abs(both - 0.01) < 5 * (0.01 * 0.99 / n) ** 0.5  # independent masks
    words = philox(7, 3, 10, torch.device("cpu"))
    assert torch.equal(words, philox(7, 3, 1000, torch.device("cpu"))[:10])
