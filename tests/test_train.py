"""The loss against transformers' full logits, alone, packed and accumulated, and what a step without targets does."""

import functools
import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import lorarun
from lorarun import train
from lorarun.data import Batch, supervised
from lorarun.kernels import cross_entropy
from lorarun.optim import Optimizer

FAMILIES = ["llama3", "llama-tied", "mistral-sliding", "qwen2", "qwen3", "gemma", "gemma2", "gemma3-text"]
load = functools.partial(lorarun.load, device="cpu")
SEQ = 24


def ragged(count=8, seed=0, low=3, high=SEQ):
    """Rows of unequal length, padded on the right, each supervised in a random part."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (count, SEQ), generator=generator)
    lengths = torch.randint(low, high + 1, (count, 1), generator=generator)
    inside = torch.arange(SEQ) < lengths
    learned = inside & (torch.rand(count, SEQ, generator=generator) < 0.5)
    return Batch(ids, torch.where(learned, ids, -100), documents=torch.where(inside, 0, -1))


def part(batch, rows):
    """Some rows of a batch."""
    names = ("ids", "labels", "documents", "weights")
    return Batch(**{n: getattr(batch, n)[rows] for n in names if getattr(batch, n) is not None})


def with_adapter(folder):
    """The model in `folder` with an adapter that already does something."""
    model = lorarun.add_lora(load(folder), r=4, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def take_gradients(model):
    """The gradients of the trainable parameters, which are cleared."""
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


def assert_same(got, expected, rel=1e-5):
    """Tensor by tensor, relative to the largest element: fp32 sums in another order differ in their last places."""
    assert got.keys() == expected.keys() and got
    for name, tensor in expected.items():
        assert tensor.abs().max() > 0, name
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=rel * tensor.abs().max().item(), msg=name)


# --- the loss --------------------------------------------------------------------------------------------------------


def hidden_gradient(model, compute):
    """compute(), and the gradient of its result at the output of the final norm; frozen weights stay frozen."""
    seen = []
    hook = model.model.norm.register_forward_hook(
        lambda module, args, out: seen.append(out.detach().requires_grad_()) or seen[-1]
    )
    value = compute()
    value.backward()
    hook.remove()
    return value.detach(), seen[-1].grad


@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradient_equal_those_of_full_logits(tiny, name, chunk_rows, monkeypatch):
    if chunk_rows:
        monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk_rows * 4 * 1024)
    ours = load(tiny(name))
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32, attn_implementation="eager")
    theirs.requires_grad_(False)
    batch = ragged()
    batch.documents = None  # then padding is read as text, by both
    if name == "gemma2":  # raw logits beyond twice the soft-cap
        weight = 5 * ours.lm_head.weight.detach()
        ours.lm_head.weight, theirs.lm_head.weight = (torch.nn.Parameter(weight, requires_grad=False) for _ in range(2))
        assert (ours.hidden_states(batch.ids) @ weight.T).abs().max() > 2 * ours.softcap
    got = hidden_gradient(ours, lambda: lorarun.loss(ours, batch))
    expected = hidden_gradient(theirs, lambda: theirs(batch.ids, labels=batch.labels).loss)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-4 * expected[1].abs().max().item())


class Widest(TorchDispatchMode):
    """How many rows of the vocabulary's width the largest tensor has; the head itself is not meant."""

    def __init__(self, head):
        super().__init__()
        self.width, self.head, self.rows = len(head), head.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (self.width,):
                if made.untyped_storage().data_ptr() != self.head:
                    self.rows = max(self.rows, made.numel() // self.width)
        return out


def test_full_logits_never_exist(tiny, monkeypatch):
    """Logits of one chunk, and never of more rows than are supervised, on the way forward and back."""
    model, batch = with_adapter(tiny("llama3")), ragged(16)
    for chunk, rows in [(8, 8), (10**6, supervised(batch))]:
        monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * chunk * 4 * 1024)  # the reference holds four copies
        with Widest(model.lm_head.weight) as widest:
            lorarun.loss(model, batch).backward()
        assert widest.rows == rows < batch.ids.numel() // 2


def test_upstream_gradient_scales(tiny):
    model = with_adapter(tiny("llama3"))
    lorarun.loss(model, ragged()).backward()
    once = take_gradients(model)
    (3 * lorarun.loss(model, ragged())).backward()
    assert_same(take_gradients(model), {name: 3 * grad for name, grad in once.items()})


def test_a_mapping_serves_as_batch(tiny):
    model, batch = load(tiny("llama3")), ragged()
    mapping = {"ids": batch.ids, "labels": batch.labels, "documents": batch.documents}
    assert lorarun.loss(model, mapping) == lorarun.loss(model, batch)
    with pytest.raises(ValueError, match="batch.adapters"):
        lorarun.loss(model, {**mapping, "adapters": torch.zeros(8, dtype=torch.int64)})


@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma2", "gemma3-text"])
def test_packed_rows_learn_as_if_they_were_alone(tiny, name):
    model, batch = with_adapter(tiny(name)), ragged(6, low=SEQ // 2)
    inside = batch.documents >= 0
    count = supervised(batch)
    packed = Batch(
        batch.ids[inside][None],
        batch.labels[inside][None],
        positions=torch.arange(SEQ).expand_as(inside)[inside][None],
        documents=torch.arange(6)[:, None].expand_as(inside)[inside][None],
    )
    assert supervised(packed) == count
    whole = lorarun.loss(model, packed)
    whole.backward()
    gradients = take_gradients(model)
    total = 0.0
    for row in range(6):
        length = int(inside[row].sum())
        alone = lorarun.loss(model, {"ids": batch.ids[[row], :length], "labels": batch.labels[[row], :length]}, count)
        alone.backward()
        total += alone.item()
    assert whole.item() == pytest.approx(total, rel=1e-5)
    assert_same(gradients, take_gradients(model), rel=2e-5)


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_smoothed_labels_and_weighted_tokens_are_those_of_full_logits(tiny, name):
    model, batch = with_adapter(tiny(name)), ragged()
    batch.weights = 2 * torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(2))
    batch.weights[1] = 0.0
    for smoothing, weights in ((0.2, None), (0.0, batch.weights), (0.2, batch.weights)):
        logits, goal = model(batch.ids, documents=batch.documents)[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(logits, goal, reduction="none", label_smoothing=smoothing)
        w = (torch.ones_like(batch.ids[:, 1:]) if weights is None else weights[:, 1:]).flatten() * (goal >= 0)
        expected = (w * each).sum() / w.sum()
        expected.backward()
        gradients = take_gradients(model)
        given = Batch(batch.ids, batch.labels, documents=batch.documents, weights=weights)
        got = lorarun.loss(model, given, smoothing=smoothing)
        got.backward()
        assert got.item() == pytest.approx(expected.item(), rel=1e-5)
        assert_same(take_gradients(model), gradients, rel=2e-5)
        assert "smoothed labels or weighted tokens" in model.graphs.reason
        step = [part(given, rows) for rows in (slice(0, 3), slice(3, 4), slice(4, 8))]
        total, count = train.accumulated(model, step, smoothing)
        assert count == supervised(given) and total.item() == pytest.approx(expected.item(), rel=1e-5)
        assert_same(take_gradients(model), gradients, rel=2e-5)


def test_weights_that_make_no_sense_are_refused(tiny):
    model, batch = with_adapter(tiny("llama3")), ragged(2)
    for weights, message in (
        (torch.ones(2, 3), "float32 tensor"),
        (torch.ones(2, SEQ, dtype=torch.float64), "float32 tensor"),
        (torch.full((2, SEQ), -1.0), "cannot be learned backwards"),
        (torch.full((2, SEQ), float("nan")), "finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            Batch(batch.ids, batch.labels, weights=weights)
    with pytest.raises(ValueError, match="smoothing is 1.0"):
        lorarun.loss(model, batch, smoothing=1.0)
    nothing = Batch(batch.ids, batch.labels, weights=torch.zeros(2, SEQ))
    with pytest.warns(UserWarning, match="no token of this step is supervised"):
        lorarun.loss(model, nothing).backward()
    assert not any(gradient.any() for gradient in take_gradients(model).values())


def test_a_loss_scale_keeps_gradients_that_float16_would_lose(tiny):
    """Of a step of a million tokens: without it all that flows back is below float16's smallest number."""
    exact = with_adapter(tiny("llama3"))
    lorarun.loss(exact, ragged()).backward()
    expected = take_gradients(exact)
    model = lorarun.load(tiny("llama3"), device="cpu", dtype=torch.float16)
    lorarun.add_lora(model, r=4, seed=0)
    model.load_state_dict({n: p for n, p in exact.state_dict().items() if ".lora_" in n}, strict=False)
    errors = []
    for scale in (1.0, 2.0**16):
        (lorarun.loss(model, ragged(), denominator=1e6) * scale).backward()
        unit = 1e6 / scale / supervised(ragged())
        found = {name: unit * gradient for name, gradient in take_gradients(model).items()}
        errors.append(max(((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()))
    assert errors[0] > 0.5 and errors[1] < 0.05


# --- accumulation: huggingface/transformers#34191 and its kin --------------------------------------------------------


def test_a_step_is_the_mean_over_its_tokens_not_over_its_batches(tiny, monkeypatch):
    """One batch has 1 token of loss 4, the other 9 of loss 1: the step's loss is 13/10, not the mean of 4 and 1."""
    model = with_adapter(tiny("llama3"))
    losses = lambda hidden, weight, targets, softcap, **how: targets + 0.0 * hidden.sum(-1)  # noqa: E731
    monkeypatch.setattr(cross_entropy, "linear_cross_entropy", losses)
    ids = torch.full((1, 10), 5)
    few, many = torch.full((1, 10), -100), torch.full((1, 10), 1)
    few[0, 4] = 4
    loss, count = train.accumulated(model, [Batch(ids, few), Batch(ids, many)])
    assert count == 10
    assert loss.item() == pytest.approx(1.3, abs=1e-6)


def test_every_split_of_a_step_gives_the_same_loss_and_gradient(tiny):
    model, batch = with_adapter(tiny("llama3")), ragged(8)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    logits = model(batch.ids, documents=batch.documents)[:, :-1]
    goal = batch.labels[:, 1:]  # a row's padding is its end, and has no labels
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten())
    reference.backward()
    gradients = take_gradients(model)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    for size in (8, 4, 2, 1):
        step = [part(batch, slice(at, at + size)) for at in range(0, 8, size)]
        loss, count = train.accumulated(model, step)
        assert count == supervised(batch)
        assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
        found = {name: p.grad.clone() for name, p in parameters.items()}
        assert_same(found, gradients, rel=2e-5)
        measured, broken = Optimizer(parameters, clip=1e-3).step(
            0.0
        )  # the norm before clipping; a rate of 0 moves nothing
        assert measured == pytest.approx(norm, rel=1e-5)
        assert not broken


# --- nothing supervised: nvidia-cosmos/cosmos-rl#155, unslothai/unsloth#2900 -----------------------------------------


def test_a_row_with_nothing_supervised_counts_for_nothing(tiny):
    model, batch = with_adapter(tiny("llama3")), ragged(4)
    batch.labels[2] = -100
    lorarun.loss(model, batch).backward()
    gradients = take_gradients(model)
    lorarun.loss(model, part(batch, [0, 1, 3])).backward()
    assert_same(gradients, take_gradients(model))


def test_a_batch_with_nothing_supervised_adds_exactly_zero(tiny):
    model = with_adapter(tiny("llama3"))
    some, none = part(ragged(), slice(0, 4)), part(ragged(), slice(4, 8))
    none.labels.fill_(-100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the step as a whole has something to learn
        loss, count = train.accumulated(model, [some])
        gradients = take_gradients(model)
        for step in ([some, none], [none, some]):
            assert train.accumulated(model, step) == (loss, count)
            for name, gradient in take_gradients(model).items():
                assert torch.equal(gradient, gradients[name]), name


def test_a_step_with_nothing_supervised_is_zero_and_says_so(tiny):
    model = with_adapter(tiny("llama3"))
    none = ragged()
    none.labels.fill_(-100)
    optimizer = Optimizer({name: p for name, p in model.named_parameters() if p.requires_grad})
    for compute in (lambda: lorarun.loss(model, none), lambda: lorarun.loss(model, none, denominator=0)):
        with pytest.warns(UserWarning, match="no token of this step is supervised"):
            loss = compute()
        loss.backward()
        assert loss.item() == 0.0
        assert all(not p.grad.any() for p in optimizer.parameters.values())
        assert optimizer.step(1e-3) == (0.0, [])
        assert all(p.isfinite().all() for p in optimizer.parameters.values())
    with pytest.raises(ValueError, match="used up before"):
        train.evaluate(model, iter(()))


def test_labels_that_are_no_ids_are_refused(tiny):
    model = load(tiny("llama3"))
    for label in (-1, 1024):
        batch = ragged()
        batch.labels[0, 2] = label
        with pytest.raises(ValueError, match=f"no ids of the model, such as {label}; expected 0 to 1023"):
            lorarun.loss(model, batch)


@pytest.mark.filterwarnings("ignore:loss. no token")
def test_empty_batches_are_refused(tiny):
    model = with_adapter(tiny("llama3"))
    for shape in ((0, 5), (2, 0)):
        with pytest.raises(ValueError, match="at least one token"):
            lorarun.loss(model, Batch(*torch.zeros(2, *shape, dtype=torch.int64)))


def test_evaluation_is_a_mean_over_tokens_in_eval_mode(tiny):
    model, batch = lorarun.add_lora(load(tiny("llama3")), dropout=0.5, seed=0), ragged(6)
    expected = lorarun.loss(model.eval(), batch).item()
    clock = model.train().clock.step
    got = train.evaluate(model, [part(batch, slice(0, 1)), part(batch, slice(1, 6))])
    assert got.loss == pytest.approx(expected, rel=1e-5)
    assert model.training and model.clock.step == clock
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["llama3", "gemma2", "gemma3-text"])
def test_evaluation_is_that_of_transformers(tiny, name, monkeypatch):
    """Loss, perplexity and accuracy of their full logits; ours never hold more rows of them than a chunk has."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * 8 * 4 * 1024)
    ours = load(tiny(name))
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32, attn_implementation="eager")
    batch = ragged(12)
    batch.documents = None  # then padding is read as text, by both
    with torch.no_grad():
        logits = theirs(batch.ids).logits[:, :-1].flatten(0, 1)
    goal = batch.labels[:, 1:].flatten()
    best = logits.argmax(dim=-1)
    lucky = (goal >= 0) & (torch.arange(len(goal)) % 3 == 0)
    goal[lucky] = best[lucky]  # a random model would be right nowhere
    batch.labels[:, 1:] = goal.view(12, -1)
    with Widest(ours.lm_head.weight) as widest:
        got = lorarun.evaluate(ours, [part(batch, slice(0, 5)), part(batch, slice(5, 12))])
    loss = torch.nn.functional.cross_entropy(logits, goal).item()
    assert got.loss == pytest.approx(loss, rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert got.tokens == (goal >= 0).sum() and widest.rows == 8
    assert got.accuracy == ((best == goal) & (goal >= 0)).sum().item() / got.tokens > 0.2


# --- which adapters learn: huggingface/transformers#42494 and its kin ------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "gemma3-text"])
def test_every_adapter_learns_below_a_frozen_embedding(tiny, name):
    """B starts at zero, so A has no gradient in the first step; in the second both do."""
    model = lorarun.add_lora(load(tiny(name)), r=4, seed=0)
    optimizer = Optimizer({path: p for path, p in model.named_parameters() if p.requires_grad})
    assert len(optimizer.parameters) == 2 * 7 * model.config.num_hidden_layers
    for first in (True, False):
        train.accumulated(model, [ragged()])
        for path, parameter in optimizer.parameters.items():
            learns = ".lora_B." in path or not first
            assert parameter.grad is not None and bool(parameter.grad.any()) == learns, path
        optimizer.step(1e-3)
