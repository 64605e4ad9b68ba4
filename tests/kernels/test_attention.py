"""Attention: the reference against the contract in words, the kernels against float64 within derived bounds."""

import pytest
import torch
from kernels.checks import narrow, poison

from lorarun.kernels import attention as file
from lorarun.kernels.attention import Spans, attention, document_ends, document_spans, document_starts, serves
from lorarun.kernels.replay import Frame, Running


@pytest.fixture(autouse=True)
def setup(monkeypatch):
    torch.manual_seed(0)
    if not torch.accelerator.is_available():  # the interpreter gets rows short enough to have several blocks
        for kernel, rows in file.BLOCKS.items():
            monkeypatch.setitem(file.BLOCKS, kernel, dict.fromkeys(rows, (16, 16, 4, 1)))
        for key in file.TIGHT:
            monkeypatch.setitem(file.TIGHT, key, (16, 16, 4))


# ---------------------------------------------------------------------------------------------------------- reference


def by_words(q, k, v, documents, window, softcap, scale):
    """One query at a time, in float64, from what the contract says in words."""
    batch, seq, heads, _ = q.shape
    rows = []
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[2])
            for i in range(seq):
                seen = [
                    j
                    for j in range(i + 1)
                    if j > i - window
                    and (j == i or (documents[b, j] >= 0 and len(set(documents[b, j : i + 1].tolist())) == 1))
                ]
                s = torch.stack([(q[b, i, h] * k[b, j, kv]).sum() for j in seen]) * scale
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                rows.append((s.softmax(0).unsqueeze(1) * torch.stack([v[b, j, kv] for j in seen])).sum(0))
    return torch.stack(rows).view(batch, heads, seq, -1).transpose(1, 2)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_definition(packed, window, softcap):
    q = torch.randn(2, 11, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 11, 2, 6, dtype=torch.float64, requires_grad=True) for _ in "kv")
    documents = torch.zeros(2, 11, dtype=torch.int64)
    if packed:
        documents[0] = torch.tensor([-1, -1, 0, 0, 0, 0, 1, 1, 2, -1, -1])
        documents[1] = torch.tensor([5, 5, 5, 5, 5, 4, 4, 4, 4, 5, 5])
    first = document_starts(documents) if packed else None
    ours = attention(q, k, v, first, window, softcap, scale=0.3)
    theirs = by_words(q, k, v, documents, window or 99, softcap, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    exact, _ = exactly(q, k, v, documents if packed else None, window, softcap, 0.3, torch.ones_like(ours))
    torch.testing.assert_close(exact[0], theirs, rtol=1e-10, atol=1e-10)  # the other tests' yardstick
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), upstream), torch.autograd.grad(theirs, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 4])
def test_attention_of_the_last_queries_alone(window, softcap):
    q, k, v = torch.randn(2, 13, 4, 8), torch.randn(2, 13, 2, 8), torch.randn(2, 13, 2, 8)
    documents = torch.tensor([[-1] * 2 + [0] * 11, [0] * 13])
    first = document_starts(documents)
    whole = attention(q, k, v, first, window, softcap)
    for n in (1, 5):
        part = attention(q[:, -n:], k, v, first[:, -n:], window, softcap)
        torch.testing.assert_close(part, whole[:, -n:], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        attention(q[:, -1:], k, v, None, window, softcap),
        attention(q, k, v, None, window, softcap)[:, -1:],
        atol=1e-6,
        rtol=0,
    )


def test_spans_of_documents():
    documents = torch.tensor([[-1, -1, 0, 0, 7, 7, 7, 2, -1], [3, 3, 3, 3, 3, 3, 4, 3, 3]])
    spans = document_spans(documents)
    assert spans.first.tolist() == [[0, 1, 2, 2, 4, 4, 4, 7, 8], [0, 0, 0, 0, 0, 0, 6, 7, 7]]
    assert spans.last is not None and spans.last.tolist() == [[0, 1, 3, 3, 6, 6, 6, 7, 8], [5, 5, 5, 5, 5, 5, 6, 8, 8]]
    assert torch.equal(document_ends(document_starts(documents)), spans.last)


def test_a_call_that_cannot_be_meant_is_refused():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        attention(q, k, k)
    with pytest.raises(ValueError, match="keys >= queries"):
        attention(q[:, :, :2], k[:, :3], k[:, :3])
    with pytest.raises(ValueError, match="must be positive"):
        attention(q, q, q, window=0)


def test_who_serves_a_call_on_the_cpu():
    q = torch.randn(1, 4, 2, 8)
    assert serves(q, q, q).startswith("torch: ") and "Triton" in serves(q, q, q)


# ------------------------------------------------------------------------------------------------------------ kernels


def exactly(q, k, v, documents, window, softcap, scale, do, dtype=torch.float64):
    """o, dq, dk, dv in float64, and how far from each a result in ``dtype`` may be.

    The bounds are elementwise and first order in u, the rounding of ``dtype``: p, ds and every result are rounded once,
    delta is made from a rounded o, and p carries the errors of fp32 scores, relative error ``rho``.
    """
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    batch, seq, heads, _ = q.shape
    group = heads // k.shape[2]
    index = torch.arange(seq, device=q.device)
    mask = (index[:, None] >= index) & (index[:, None] - index < (window or seq))
    if documents is not None:
        run = torch.zeros_like(documents)
        run[:, 1:] = (documents[:, 1:] != documents[:, :-1]).cumsum(1)
        same = (run[:, :, None] == run[:, None, :]) & (documents >= 0)[:, None]
        mask = mask & (same | torch.eye(seq, dtype=torch.bool, device=q.device))
    mask = mask.expand(batch, seq, seq)[:, None, None]  # [batch, kv_heads, group, queries, keys]
    q, do = (x.view(batch, seq, -1, group, x.shape[-1]).permute(0, 2, 3, 1, 4) for x in (q, do))
    k, v = (x.permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))  # [batch, kv_heads, 1, keys, head_dim]
    s = scale * q @ k.mT
    t = torch.tanh(s / softcap) if softcap else torch.zeros_like(s)
    p = (softcap * t if softcap else s).masked_fill(~mask, -torch.inf).softmax(-1)
    o, dp = p @ v, do @ v.mT
    delta = (o * do).sum(-1, keepdim=True)
    ds = p * (dp - delta) * (1 - t * t)
    results = o, scale * ds @ k, scale * (ds.mT @ q).sum(2, keepdim=True), (p.mT @ do).sum(2, keepdim=True)

    u, ulp = torch.finfo(dtype).eps / 2, 2.0**-24
    tiny = torch.finfo(dtype).smallest_normal * u  # where 16-bit numbers lose relative accuracy
    rho = 8 * ulp * (1 + (softcap or 0) + (scale * q.abs() @ k.abs().mT).amax())
    e_o = u * o.abs() + 2 * (u + rho) * p @ v.abs() + tiny * (1 + mask.double() @ v.abs())
    loose = (do.abs() * e_o).sum(-1, keepdim=True) + 8 * ulp * do.abs() @ v.abs().mT
    e_ds = p * ((u + rho) * (dp - delta).abs() + loose) + u * ds.abs() + tiny * mask
    bounds = [
        e_o,
        scale * e_ds @ k.abs(),
        scale * (e_ds.mT @ q.abs()).sum(2, keepdim=True),
        (((u + rho) * p + tiny * mask).mT @ do.abs()).sum(2, keepdim=True),
    ]
    bounds = [e + u * x.abs() + tiny for e, x in zip(bounds, results, strict=True)]
    return [[x.permute(0, 3, 1, 2, 4).flatten(2, 3) for x in part] for part in (results, bounds)]


def packed(batch, seq, device):
    """Rows of documents of many lengths, single tokens and padding on either side among them."""
    rows = []
    for _ in range(batch):
        numbers = [-1] * int(torch.randint(4, ()))
        while len(numbers) < seq:
            longest = (1, 3, 5, 17, 17, seq)[int(torch.randint(6, ()))]
            numbers += [len(numbers)] * int(torch.randint(1, 1 + longest, ()))
        rows.append(numbers[: seq - 2] + [-1, -1] if seq > 8 else numbers[:seq])
    return torch.tensor(rows, device=device)


def draw(shape, heads, dtype, device, kv_heads=None):
    """q and do of ``heads``, k and v of ``kv_heads``: views of one product as wide as all, NaN between and around."""
    batch, seq, head_dim = shape
    kv_heads = kv_heads or heads
    wide = torch.full((batch, seq, 2 * heads + 2 * kv_heads + 1, head_dim), torch.nan, dtype=dtype, device=device)
    parts = wide[:, :, :heads], wide[:, :, heads + 1 : 2 * heads + 1], *wide[:, :, 2 * heads + 1 :].chunk(2, 2)
    q, do, k, v = (part.normal_() for part in parts)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def check(device, dtype, shape, heads, kv_heads, documents=False, window=None, softcap=None, scale=None):
    q, k, v, do = draw(shape, heads, dtype, device, kv_heads)
    numbers = packed(*shape[:2], device) if documents else None
    spans = document_spans(numbers) if documents else None
    assert serves(q, k, v, spans, window, softcap).startswith("Triton: ")
    poison(device)
    o = attention(q, k, v, spans, window, softcap, scale)
    poison(device)
    ours = [o, *torch.autograd.grad(o, (q, k, v), do)]
    scale = scale or shape[-1] ** -0.5
    for name, x, exact, bound in zip(
        ("o", "dq", "dk", "dv"), ours, *exactly(q, k, v, numbers, window, softcap, scale, do, dtype), strict=True
    ):
        assert x.dtype == dtype and x.shape == exact.shape
        worst = ((x.double() - exact).abs() / bound).max().item()
        assert worst <= 1, (name, worst)  # a NaN is not <= 1 either


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "seq", "documents", "window", "softcap"),
    [
        (64, 4, 1, 37, True, None, None),
        (64, 2, 2, 48, True, 3, 2.0),
        (64, 4, 2, 41, True, 20, None),
        (72, 1, 1, 16, True, None, None),
        (80, 4, 2, 33, False, 1, None),
        (96, 2, 1, 35, False, 18, 3.0),
        (128, 4, 2, 49, True, 99, None),
        (256, 2, 1, 40, False, 17, None),
        (256, 2, 2, 23, True, None, 1.5),
    ],
)
def test_values_and_gradients(device, head_dim, heads, kv_heads, seq, documents, window, softcap, half):
    dtype = narrow(device) if half else torch.float32
    scale = 0.17 if softcap else None
    check(device, dtype, (2, seq, head_dim), heads, kv_heads, documents, window, softcap, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("seq", [2, 3, 129, 1000, 2049])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 64), (torch.bfloat16, 80), (torch.bfloat16, 96), (torch.bfloat16, 128), (torch.bfloat16, 256)]
    + [(torch.float16, 128), (torch.float32, 80), (torch.float32, 256)],
)
def test_values_and_gradients_of_longer_rows(device, dtype, head_dim, seq):
    check(device, dtype, (2, seq, head_dim), 8, 2, documents=True)
    check(device, dtype, (1, seq, head_dim), 4, 4, window=130 if seq > 130 else 2, softcap=5.0, scale=0.3)


@pytest.mark.kernel
def test_strides_change_nothing_but_the_reading(device):
    """Views, copies, views that no copy engine can read and an expanded upstream give the same bits."""
    q, k, v, do = draw((2, 21, 64), 4, narrow(device), device, 2)
    spans = document_spans(packed(2, 21, device))

    def run(q, k, v, do):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o = attention(q, k, v, spans, 9)
        return [o, *torch.autograd.grad(o, (q, k, v), do)]

    def shifted(x, width):
        wide = x.new_full((*x.shape[:-1], width), torch.nan)[..., 1:65]  # rows start at odd elements
        return wide.copy_(x)

    views = run(q, k, v, do)
    turned = [lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: shifted(x, 65)]
    for copy in (torch.clone, *turned, lambda x: shifted(x, 72)):
        assert all(torch.equal(a, b) for a, b in zip(views, run(*map(copy, (q, k, v, do))), strict=True))
    ones = torch.ones_like(do)
    expanded = run(q, k, v, ones[:1, :1, :1, :1].expand_as(ones))
    assert all(torch.equal(a, b) for a, b in zip(expanded, run(q, k, v, ones), strict=True))


@pytest.mark.kernel
def test_the_same_bits_again_and_nothing_written_to(device):
    q, k, v, do = draw((1, 40, 64), 4, narrow(device), device, 2)
    spans = document_spans(packed(1, 40, device))
    before = [x.detach().clone() for x in (q, k, v, do, *spans)]
    o = attention(q, k, v, spans, softcap=4.0)
    first = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    poison(device)
    second = torch.autograd.grad(o, (q, k, v), do)
    again = attention(q, k, v, Spans(spans.first), softcap=4.0)  # the ends derived in the call
    third = torch.autograd.grad(again, (q, k, v), do)
    for a, b, c in zip((o, *first), (o, *second), (again, *third), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for a, b in zip((q, k, v, do, *spans), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("trained", ["q", "k", "v", "kv"])
def test_gradients_of_some_inputs(device, trained):
    q, k, v, do = draw((1, 20, 64), 2, narrow(device), device)
    some = {"q": (q,), "k": (k,), "v": (v,), "kv": (k, v)}[trained]
    everything = dict(zip((q, k, v), torch.autograd.grad(attention(q, k, v, None, 7), (q, k, v), do), strict=True))
    leaves = [x if any(x is y for y in some) else x.detach() for x in (q, k, v)]
    for x, grad in zip(some, torch.autograd.grad(attention(*leaves, None, 7), some, do), strict=True):
        assert torch.equal(grad, everything[x])


@pytest.mark.kernel
def test_a_window_counts_the_current_token(device):
    q, k, v, _ = draw((1, 20, 64), 4, narrow(device), device, 2)
    with torch.no_grad():
        alone = attention(q, k, v, None, 1)
        assert torch.equal(alone, v.repeat_interleave(2, 2))
        before = attention(q, k, v, None, 4)
        k[:, 0], v[:, 0] = -k[:, 0], -v[:, 0]
        changed = (attention(q, k, v, None, 4) != before).flatten(2).any(-1)[0]
    assert changed.tolist() == [True] * 4 + [False] * 16


@pytest.mark.kernel
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 10])
def test_the_last_queries_of_longer_rows(device, window, softcap):
    """As a chunk of a prompt beside a cache whose free slots hold anything."""
    documents = torch.tensor([[-1] * 6 + [0] * 35, [0] * 41], device=device)
    first = document_starts(documents)
    q, k, v, _ = (x.detach() for x in draw((2, 50, 64), 4, narrow(device), device, 2))
    q, k, v = q[:, :41], k[:, :41], v[:, :41]
    k._base[:, 41:] = torch.nan
    whole = attention(q, k, v, first, window, softcap)
    for n in (2, 19):
        assert serves(q[:, -n:], k, v, first[:, -n:], window, softcap).startswith("Triton: ")
        part = attention(q[:, -n:], k, v, first[:, -n:], window, softcap)
        eps = torch.finfo(whole.dtype).eps  # p and o are rounded by either, and |o| <= max |v|
        torch.testing.assert_close(part, whole[:, -n:], rtol=0, atol=2 * eps * v.abs().max().item())


@pytest.mark.kernel
def test_who_serves_a_call(device):
    q, k, _, _ = draw((1, 128, 64), 2, narrow(device), device, 1)
    assert serves(q, k, k, document_starts(packed(1, 128, device)), 5, 1.0) == (
        "Triton: documents, sliding window, soft-cap"
    )
    assert serves(q, k, k, window=128, softcap=1.0) == "Triton: soft-cap"
    assert serves(q.double(), k.double(), k.double(), window=5).startswith("torch: ")
    assert serves(q, k.float(), k.float(), window=5).startswith("torch: ")
    assert serves(q[..., :50], k[..., :50], k[..., :50], window=5).startswith("torch: head_dim 50")
    assert serves(q[:, -1:], k, k, window=5).startswith("torch: one query")
    assert serves(q[:, -5:], k, k, window=5).startswith("torch: gradients")
    for odd in (lambda x: x.double(), lambda x: x[..., :50]):  # and what is refused is served all the same
        attention(odd(q), odd(k), odd(k), None, 5).sum().backward()
    assert attention(q[:0], k[:0], k[:0], None, 5).shape == (0, 128, 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dense_rows_go_to_cudnn_and_no_switch_is_touched(device, head_dim):
    q, k, v, do = draw((2, 256, head_dim), 8, torch.bfloat16, device, 2)
    switches = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    assert serves(q, k, v) == "cuDNN: dense causal rows"
    assert serves(q[:, :200], k[:, :200], v[:, :200]).startswith("Triton: ")
    o = attention(q, k, v, window=256)
    ours = [o, *torch.autograd.grad(o, (q, k, v), do)]
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()) == switches
    exact, bounds = exactly(q, k, v, None, None, None, head_dim**-0.5, do, torch.bfloat16)
    with torch.no_grad():
        ours.append(attention(q, k, v))
    for a, b, bound in zip(ours, [*exact, exact[0]], [*bounds, bounds[0]], strict=True):
        assert ((a.double() - b).abs() <= 2 * bound).all()  # where it rounds is not known to us


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 16, 4), (2, 12, 3)])
def test_long_rows_go_back_by_few_heads_at_a_time(device, batch, heads, kv_heads, monkeypatch):
    """Heads know nothing of each other: dk and dv are the same bits, dq differs by the order in which cuDNN adds."""
    shapes = [(batch, 16_384, h, 128) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, do = (torch.randn(s, dtype=torch.bfloat16, device=device).requires_grad_() for s in shapes)
    calls, found = [], []
    whole = file._heads_at_once
    for few in (lambda *sizes: 2**31, whole):
        monkeypatch.setattr(file, "_heads_at_once", lambda *sizes, few=few: calls.append(few(*sizes)) or calls[-1])
        found.append(torch.autograd.grad(attention(q, k, v), (q, k, v), do.detach()))
    assert calls == [2**31, -(-131_072 // (16_384 * (heads // kv_heads)))] and calls[1] < kv_heads
    (dq, dk, dv), (dq_few, dk_few, dv_few) = found
    assert torch.equal(dk, dk_few) and torch.equal(dv, dv_few)
    assert (dq - dq_few).float().norm() < 2**-8 * dq.float().norm()
    assert dq.stride() == dq_few.stride()


@pytest.mark.gpu
@pytest.mark.parametrize(("seq", "head_dim", "heads", "kv_heads"), [(65_536, 256, 8, 4), (131_072, 128, 132, 4)])
def test_long_rows_and_more_than_two_billion_elements(device, seq, head_dim, heads, kv_heads):
    """A few queries, the last among them, against float64 over what they see; dk and dv there too."""
    q = torch.randn(1, seq, heads, head_dim, dtype=torch.bfloat16, device=device).requires_grad_()
    k, v = (torch.randn(1, seq, kv_heads, head_dim, dtype=torch.bfloat16, device=device) for _ in "kv")
    do = torch.zeros_like(q)
    window = 100
    chosen = [range(0, 130), range(seq // 2 - 20, seq // 2 + 110), range(seq - 130, seq)]
    for rows in chosen:
        do[:, rows.start : rows.stop].normal_()
    leaves = q, k.requires_grad_(), v.requires_grad_()
    o = attention(*leaves, None, window)
    ours = [o, *torch.autograd.grad(o, leaves, do)]
    for rows in chosen:
        near = slice(max(0, rows.start - window + 1), rows.stop)
        cut = [x.detach()[:, near] for x in (q, k, v)]
        exact, bounds = exactly(*cut, None, window, None, head_dim**-0.5, do[:, near], torch.bfloat16)
        inside = slice(rows.start - near.start, None)  # earlier queries see keys that are cut off
        for name, a, b, bound in zip(("o", "dq", "dk", "dv"), ours, exact, bounds, strict=True):
            here = inside if name in ("o", "dq") else slice(None)
            assert ((a[:, near].double() - b).abs()[:, here] <= bound[:, here]).all(), name


@pytest.mark.gpu
def test_one_captured_graph_serves_any_packing(device):
    q, k, v, do = draw((1, 1024, 128), 8, torch.bfloat16, device, 2)
    spans = document_spans(packed(1, 1024, device))

    def run():
        o = attention(q, k, v, spans)
        return [o, *torch.autograd.grad(o, (q, k, v), do)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for old, new in zip(spans, document_spans(packed(1, 1024, device)), strict=True):
            old.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.gpu
def test_deterministic_algorithms_are_ours(device):
    q, k, v, _ = draw((1, 256, 64), 2, torch.bfloat16, device)
    try:
        torch.use_deterministic_algorithms(True)
        assert serves(q, k, v) == "Triton: deterministic algorithms"
    finally:
        torch.use_deterministic_algorithms(False)
    assert serves(q, k, v) == "cuDNN: dense causal rows"
    with Running(Frame(deterministic=True)):
        assert serves(q, k, v) == "Triton: deterministic algorithms"
