"""Log-probabilities of given answers, against transformers' full softmax and what `generate` says of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers
from test_cache import build
from test_generate import same, some_ids, state, trained
from torch import Tensor

import lorarun
from lorarun.data import prepare
from lorarun.generate import generate
from lorarun.kernels import cross_entropy
from lorarun.logprobs import logprobs
from lorarun.tokenizer import Tokenizer

Tiny = Callable[[str], Path]
# As the logits in test_cache.py: fp32 sums of a few hundred products, in another order, over six layers.
CLOSE: dict[str, Any] = dict(rtol=0.0, atol=1e-4)
PAIRS = [(some_ids(n), some_ids(m, seed=1)) for n, m in ((5, 3), (1, 30), (17, 1), (40, 12), (2, 2))]


def expected(other: Any, prompt: list[int], answer: list[int]) -> Tensor:
    logits = other(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt), len(prompt) + len(answer))
    return logits[at - 1, torch.tensor(answer)]


@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma2", "gemma3-text"])
def test_against_transformers(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed in one pass, in several, and with the head's rows in chunks of a few."""
    folder = tiny(name)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = build(folder)
    with torch.no_grad():
        wanted = [expected(other, *pair) for pair in PAIRS]
    for most in (8192, 40, 3):
        monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 2**29 if most > 40 else 2**16)
        found = logprobs(model, PAIRS, max_tokens=most)
        assert [each.dtype for each in found] == [torch.float32] * len(PAIRS)
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, **CLOSE)


def test_a_generated_answer_has_the_same(tiny: Tiny) -> None:
    model: Any = trained(tiny)
    prompts = [some_ids(4), some_ids(9)]
    answers = generate(model, prompts, max_new_tokens=8, stop=[], temperature=1.0, seed=0, logprobs=True)
    before = state(model)
    found = lorarun.logprobs(model, list(zip(prompts, [answer.ids for answer in answers], strict=True)))
    assert same(state(model), before)  # dropout was off, and is on again
    for answer, each in zip(answers, found, strict=True):
        torch.testing.assert_close(torch.tensor(answer.logprobs), each, **CLOSE)
        assert not each.requires_grad


@pytest.fixture(scope="module")
def spoken(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Any = build.__wrapped__(tiny("llama3"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% generation %}{{ m['content'] }}<|im_end|>"
        "{% endgeneration %}\n{% endfor %}"
    )
    model.tokenizer = Tokenizer.load(toy.make(tmp_path_factory.mktemp("toy"), template))
    return model


def learned(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Of the labelled tokens, by a full softmax."""
    logits = model(ids[None])[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[1:, None]).squeeze(1)[labels[1:] != -100]


def test_rows_as_in_training(spoken: Any) -> None:
    """Each row's tokens are those that training would learn, in their order."""
    rows: list[Any] = [
        {"prompt": "the quick", "completion": " brown fox"},
        {"text": "the fox answers what the quick fox answers"},
        {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "the fox"}]},
    ]
    documents = prepare(rows, spoken.tokenizer).documents
    found = logprobs(spoken, [*rows, ([5, 6], [7, 8])])
    assert len(found) == 4 and len(found[3]) == 2
    for document, each in zip(documents, found, strict=False):
        torch.testing.assert_close(each, learned(spoken, *document), **CLOSE)
    assert logprobs(spoken, []) == []


def test_a_long_text_comes_in_pieces(spoken: Any) -> None:
    """As in training: each begins with the last token of the one before."""
    row, other = {"text": "the fox answers what the quick fox answers"}, {"text": "the"}
    ids = prepare([row], spoken.tokenizer).documents[0].ids
    found, short = logprobs(spoken, [row, other], max_tokens=4)
    assert len(found) == len(ids) - 1 > 6 and len(short) == 1
    pieces = [ids[start : start + 4] for start in range(0, len(ids) - 1, 3)]
    torch.testing.assert_close(found, torch.cat([learned(spoken, piece, piece) for piece in pieces]), **CLOSE)


def test_rows_that_cannot_be_used(spoken: Any, tiny: Tiny) -> None:
    rows: list[Any] = [{"prompt": "the", "completion": ""}, ([1], []), ([], [4]), ([3], [5, 2000]), {"what": 1}]
    with pytest.raises(ValueError) as error:
        logprobs(spoken, rows)
    said = str(error.value)
    for words in (
        "row 1: without an answer or text to learn",
        "row 2: expected",
        "row 3: expected",
        "row 4 has ids",
        "row 5",
    ):
        assert words in said
    with pytest.raises(ValueError, match="tokenizer"):
        logprobs(build(tiny("llama3")), [{"text": "the fox"}])
