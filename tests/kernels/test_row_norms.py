"""The lengths that DoRA divides by, and its scales, against float64."""

import pytest
import torch
from kernels.checks import narrow, poison

from lorarun.kernels.lora import Branch
from lorarun.kernels.row_norms import row_norms, row_scales, row_squares


def factors(rank, rows, cols, device, dtype=torch.float32):
    """W, A and B whose update is about as long as the weight, and turns some of its rows around."""
    w = (torch.randn(rows, cols) / cols**0.5).to(device, dtype)
    return w, torch.randn(rank, cols, device=device) / cols**0.5, torch.randn(rows, rank, device=device) / rank**0.5


def exact(w, a, b, scale):
    """A rounded to the dtype of W, as it is in the adapter's product; all else in float64."""
    return (w.double() + scale * b.double() @ a.to(w.dtype).double()).norm(dim=1)


def check(got, expected, cols=0):
    """Squares of fp32 sums, whose roundings stay within some 2⁻²⁴ · √columns; the root halves them.

    cols: of a product by tensor cores, which cut off what does not fit at each 16 columns, always downwards: 2⁻²³ each.
    """
    assert got.dtype == torch.float32 and got.shape == expected.shape
    error = (got.double() / expected - 1).abs().max()
    assert error < 2**-19 + cols / 16 * 2**-24, error


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("rank", "rows", "cols"), [(1, 1, 1), (1, 35, 300), (16, 64, 256), (16, 33, 7), (64, 40, 70)])
def test_lengths(device, rank, rows, cols, half):
    torch.manual_seed(0)
    w, a, b = factors(rank, rows, cols, device, narrow(device) if half else torch.float32)
    for squares in (None, row_squares(w)):
        poison(device)
        check(row_norms(w, a, b, 0.7, squares), exact(w, a, b, 0.7))


@pytest.mark.kernel
def test_a_row_of_zeros_has_a_length_to_divide_by(device):
    torch.manual_seed(0)
    w, a, b = factors(4, 5, 70, device)
    w[3], b[3] = 0, 0
    got = row_norms(w, a, b, 1.0)
    assert 0 < got[3] < 1e-15 and (got[:3] > 0.1).all()


@pytest.mark.kernel
def test_wider_adapters_strides_and_float64_are_served(device):
    torch.manual_seed(0)
    w, a, b = factors(65, 20, 30, device)
    check(row_norms(w, a, b, 1.0), exact(w, a, b, 1.0))
    w, a, b = (t.T.contiguous().T for t in factors(4, 20, 30, device))
    check(row_norms(w, a, b, 1.0), exact(w, a, b, 1.0))
    assert (row_norms(w.double(), a, b, 1.0) / exact(w.double(), a, b, 1.0) - 1).abs().max() < 1e-12


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
def test_scales_of_projections_side_by_side(device, half):
    """The second has no adapter, and a plain one stands beside those with magnitudes: both stay as they are."""
    torch.manual_seed(0)
    sizes, ranks = (70, 33, 40), (4, 0, 20)
    whole = (torch.randn(sum(sizes), 50) / 7).to(device, narrow(device) if half else torch.float32)
    weights = whole.split(sizes)
    branches = [
        Branch(n, torch.randn(r, 50, device=device) / 7, torch.randn(n, r, device=device), 0.5) if r else Branch(n)
        for n, r in zip(sizes, ranks, strict=True)
    ]
    for plain in (None, 2):
        learned = [i for i in (0, 2) if i != plain]
        magnitudes = [torch.randn(n, device=device) if i in learned else None for i, n in enumerate(sizes)]
        squares = [row_squares(w) if i in learned else None for i, w in enumerate(weights)]
        poison(device)
        norms, scales = row_scales(weights, branches, squares, magnitudes)
        for i, (length, scale) in enumerate(zip(norms.split(sizes), scales.split(sizes), strict=True)):
            if i in learned:
                check(length, exact(weights[i], *branches[i][1:]))
                assert torch.equal(scale, magnitudes[i] / length)
            else:
                assert (length == 1).all() and (scale == 1).all()


@pytest.mark.kernel
def test_a_fresh_magnitude_scales_by_exactly_one(device):
    """Lengths of a B of zeros, alone and beside a wider adapter's."""
    torch.manual_seed(0)
    w, a, b = factors(4, 40, 60, device)
    wide = factors(32, 40, 60, device)
    squares = row_squares(w)
    magnitude = row_norms(w, a, b * 0, 2.0)
    branches = [Branch(40, a, b * 0, 2.0), Branch(40, *wide[1:])]
    _, scales = row_scales([w, wide[0]], branches, [squares, row_squares(wide[0])], [magnitude, magnitude])
    assert (scales[:40] == 1).all() and (scales[40:] != 1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference(dtype):
    torch.manual_seed(0)
    w, a, b = torch.randn(50, 70).to(dtype), torch.randn(4, 70), torch.randn(50, 4)
    w[7] = 0
    b[7] = 0
    rounded = a.to(dtype).double()
    exact = (w.double() + 0.7 * b.double() @ rounded).norm(dim=1)
    got = row_norms(w, a, b, 0.7)
    assert got.dtype == torch.float32
    exact[7] = got[7]  # a row of zeros has a length to divide by
    assert 0 < got[7] < 1e-15
    bound = 1e-6 if dtype == torch.float32 else 2**-8  # W · Aᵀ is rounded to the dtype
    assert ((got / exact - 1).abs() < bound).all()
    assert (row_norms(w.double(), a, b, 0.7) - (w.double() + 0.7 * (b @ a).double()).norm(dim=1))[8:].abs().max() < 1e-4


def test_an_update_that_cancels_the_weight_is_no_nan():
    torch.manual_seed(0)
    a, b = torch.randn(4, 70), torch.randn(50, 4)
    w = -(b @ a)
    assert (row_norms(w, a, b, 1.0) < 2**-10 * w.norm(dim=1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 16, 64])
@pytest.mark.parametrize("rows", [4096, 28672])
def test_weights_of_real_size(device, rows, rank):
    torch.manual_seed(0)
    w, a, b = factors(rank, rows, 4096, device, torch.bfloat16)
    poison(device)
    got = row_norms(w, a, b, 2.0)
    check(got, exact(w, a, b, 2.0), cols=4096)
    assert torch.equal(got, row_norms(w, a, b, 2.0))
