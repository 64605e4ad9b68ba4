"""Rows, documents and batches: what is learned, what is left out, what is packed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from transformers import PreTrainedTokenizerFast

from lorarun.data import Batch, Prepared, as_batch, batches, prepare, read_rows, supervised, targets
from lorarun.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS, EOS = 1, 2


def load(folder: Path, template: str | None = TEMPLATE, **how: Any) -> Tokenizer:
    tokenizer = Tokenizer.load(toy.make(folder, template, **how))
    assert tokenizer is not None
    return tokenizer


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def words(draw: random.Random, most: int = 12) -> str:
    return " ".join(draw.choice(["the", "quick", "brown", "fox", "world", "é"]) for _ in range(draw.randint(1, most)))


def learned(tokenizer: Tokenizer, prepared: Prepared) -> list[str]:
    """The learned text of each document."""
    return [tokenizer.decode(d.labels[d.labels != -100], skip_special=False) for d in prepared.documents]


# --- rows to documents -----------------------------------------------------------------------------------------------


def test_each_form_of_row(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, begins=True)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rows = [
        chat("what", "fox", "who", "quick"),
        {"prompt": "Question: what\nAnswer:", "completion": " fox", "id": 7, "text": None},
        {"text": "the quick fox"},
    ]
    prepared = prepare(rows, tokenizer)
    assert learned(tokenizer, prepared) == ["fox</s>quick</s>", " fox</s>", "<s>the quick fox</s>"]
    expected = [
        [BOS, *reference.apply_chat_template(rows[0]["messages"])["input_ids"]],
        [*reference("Question: what\nAnswer: fox")["input_ids"], EOS],
        [*reference("the quick fox")["input_ids"], EOS],
    ]
    for document, ids in zip(prepared.documents, expected, strict=True):
        assert document.ids.tolist() == ids and document.ids.dtype == document.labels.dtype == torch.int64
        assert torch.equal(document.labels[document.labels != -100], document.ids[document.labels != -100])
    assert prepared.rows == 3 and prepared.left_out() == ""


@pytest.mark.parametrize("row", [{"text": "the fox</s>"}, {"prompt": "the", "completion": " fox</s>"}])
def test_an_end_token_already_there_is_not_doubled(tmp_path: Path, row: dict[str, str]) -> None:
    ids = prepare([row], load(tmp_path)).documents[0].ids
    assert (ids == EOS).sum() == 1 and ids[-1] == EOS


def test_an_end_token_shared_with_padding_is_learned(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, pad_token="</s>")
    rows = [{"prompt": "what</s> who</s>", "completion": " fox"}, chat("what", "the quick brown fox answers")]
    batch = batches(rows, tokenizer, pack=False)[0]
    assert tokenizer.pad_id == EOS and batch.documents is not None
    padding = batch.documents == -1
    assert padding.any() and (batch.ids[padding] == EOS).all() and (batch.labels[padding] == -100).all()
    assert ((batch.labels == EOS) & ~padding).sum(dim=1).tolist() == [1, 1]  # the answers' ends, not the typed one
    assert ((batch.ids == EOS) & ~padding).sum(dim=1).tolist() == [3, 2]


@pytest.mark.parametrize("how", [{"begins": True}, {"begins": True, "add_bos_token": False}, {"bos_token": None}])
def test_begin_tokens_in_rows_and_packs(tmp_path: Path, how: dict[str, Any]) -> None:
    tokenizer = load(tmp_path, **how)
    rows = [chat("what", "fox"), {"prompt": "what", "completion": " fox"}, {"text": "fox"}, {"text": "<s>fox"}]
    batch = batches(rows, tokenizer, pack=True)[0]
    assert batch.documents is not None
    for number in range(4):
        ids = batch.ids[batch.documents == number]
        wanted = tokenizer.adds_bos or number == 3  # the last one has typed it
        assert (ids == BOS).sum() == wanted and (ids[0] == BOS) == wanted, number


def test_a_token_across_the_end_of_the_prompt_is_told(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    rows = [{"prompt": "Answer:", "completion": " the fox"}, {"prompt": "Answer: ", "completion": "the fox"}]
    with pytest.warns(UserWarning, match="across the end of the prompt in row 2: it is not learned"):
        prepared = prepare(rows, tokenizer)
    assert learned(tokenizer, prepared) == [" the fox</s>", " fox</s>"]
    assert prepared.merged == [2]
    # One word that merges whole would leave an end token alone to be learned: nothing to learn, rather.
    with pytest.raises(
        ValueError, match=r"nothing to learn: 1 of 1 rows left out: 1 without an answer or text to learn \(row 1\)"
    ):
        prepare([{"prompt": "Answer: ", "completion": "the"}], tokenizer)


def test_answers_without_an_end_are_told(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, TEMPLATE.replace("</s>", "."))
    with pytest.warns(UserWarning, match="end in no stop token in row 2"):
        prepare([{"text": "fox"}, chat("what", "fox")], tokenizer)


def test_rows_left_out_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load(tmp_path)
    long = "fox " * 50
    rows = [
        chat("what", "fox"),
        chat("what", long),
        chat("what"),
        {"prompt": long, "completion": " fox"},
        {"text": ""},
        {"prompt": "what", "completion": ""},
        {"text": "</s>"},
        {"text": "fox"},
    ]
    prepared = prepare(rows, tokenizer, max_tokens=30)
    assert (prepared.too_long, prepared.nothing, prepared.rows) == ([2, 4], [3, 5, 6, 7], 8)
    assert len(prepared.documents) == 2
    said = "6 of 8 rows left out: 2 longer than max_tokens=30 (rows 2, 4)"
    said += ", 4 without an answer or text to learn (rows 3, 5, 6, 7)"
    assert capsys.readouterr().err == f"lorarun: {said}\n"
    many = prepare([chat("what", "fox"), *[chat("what")] * 9], tokenizer)
    assert (
        many.left_out() == "9 of 10 rows left out: 9 without an answer or text to learn (rows 2, 3, 4, 5, 6 and 4 more)"
    )
    with pytest.raises(
        ValueError, match="there is nothing to learn: 2 of 2 rows left out: 1 longer than max_tokens=30"
    ):
        batches(rows[1:3], tokenizer, max_tokens=30)
    with pytest.raises(ValueError, match="there is nothing to learn: there are no rows"):
        batches([], tokenizer)


@pytest.mark.parametrize("max_tokens", [2, 3, 7, 8, 100])
def test_every_token_of_a_long_text_is_predicted_once(tmp_path: Path, max_tokens: int) -> None:
    tokenizer = load(tmp_path, begins=True)
    ids = [*tokenizer.encode("the quick brown fox answers what: é"), EOS]
    documents = prepare([{"text": "the quick brown fox answers what: é"}], tokenizer, max_tokens).documents
    predicted = [i for document in documents for i in document.ids[1:].tolist()]
    assert predicted == ids[1:] and documents[0].ids[0] == BOS
    assert all(2 <= len(document.ids) <= max_tokens for document in documents)
    assert all(torch.equal(document.ids, document.labels) for document in documents)


@pytest.mark.parametrize(("row", "message"), [
    ({"question": "a", "answer": "b"}, r"row 2: got the keys \['answer', 'question'\], a row is {'messages'"),
    ({"prompt": "a"}, r"row 2: got the keys \['prompt'\], a row is"),
    ({"text": "a", "prompt": "a", "completion": "b"}, "row 2: .* a row is only one of"),
    ({"text": ["a"]}, "row 2: 'text' must be text, got a list"),
    ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "row 2: 'prompt' must be text, got a list"),
    (["a"], "row 2: got a list"),
    ({"text": "half a pair \ud83d"}, "row 2: only text can be encoded, got .* no valid Unicode"),
    ({"messages": []}, "row 2: messages must be a list of at least one"),
    ({"messages": [{"role": "user"}]}, "row 2: message 1 must have"),
    ({"messages": [{"role": "asistant", "content": "a"}]}, "row 2: role 'asistant' is unknown; known are system"),
    ({"messages": [{"role": "user", "content": "a", "when": {1}}]}, "row 2: a message may hold .* got a set"),
])  # fmt: skip
def test_a_bad_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare([chat("what", "fox"), row, chat("what", "fox")], load(tmp_path))


def test_several_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        prepare([{"text": "fox"}, {"a": 1}, {"text": "fox"}, {"b": 1}], load(tmp_path))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["row 2", "row 4"]
    with pytest.raises(ValueError) as caught:
        prepare([{"a": 1}] * 100, load(tmp_path))
    assert len(str(caught.value).splitlines()) == 5


def test_a_refusing_template_is_quoted_with_the_row(tmp_path: Path) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer = load(tmp_path, strict + TEMPLATE)
    rows = [chat("what", "fox") for _ in range(100)]
    rows[56]["messages"].insert(0, {"role": "system", "content": "the"})
    wanted = r"^row 57: .*\(system, user, assistant\): System role not supported; fold_system=True .--fold-system. puts"
    with pytest.raises(ValueError, match=wanted):
        batches(rows, tokenizer)
    folded = prepare(rows, tokenizer, fold_system=True)
    assert torch.equal(folded.documents[56].ids, prepare([chat("the\n\nwhat", "fox")], tokenizer).documents[0].ids)


def test_tools_of_a_row_reach_the_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ tools | tojson }}" + TEMPLATE)
    row = {**chat("what", "fox"), "tools": [{"name": "f"}]}
    assert tokenizer.decode(prepare([row], tokenizer).documents[0].ids).startswith('[{"name": "f"}]')


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a tokenizer, and this model came without"):
        batches([{"text": "fox"}], None)
    with pytest.raises(ValueError, match="row 1: .* has no chat template"):
        batches([chat("what", "fox")], load(tmp_path, None))
    with pytest.raises(ValueError, match="max_tokens must be at least 2"):
        batches([{"text": "fox"}], load(tmp_path), max_tokens=1)
    with pytest.raises(ValueError, match="read_rows reads files"):
        batches("rows.jsonl", load(tmp_path))  # type: ignore[arg-type]


def test_rows_may_come_from_an_iterator(tmp_path: Path) -> None:
    drawn = []

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(3):
            drawn.append(i)
            yield chat("what", "fox " * (i + 1))

    made = batches(rows(), load(tmp_path), max_tokens=60, pack=False)
    assert drawn == [0, 1, 2]
    first, again = list(made), list(made)
    assert drawn == [0, 1, 2] and len(first) == len(made)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))


# --- JSONL -----------------------------------------------------------------------------------------------------------


def test_read_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"text": "é\u2028\\n"}\r\n\n{"text": "fox"}'.encode())
    assert read_rows(path) == [{"text": "é\u2028\n"}, {"text": "fox"}]


@pytest.mark.parametrize(("line", "message"), [
    (b'{"text": "fox"', "line 3 is not valid JSON: "),
    (b'["fox"]', "line 3 must be a JSON object such as {'messages': .*, got a list"),
    (b"null", "line 3 must be a JSON object such as .*, got a NoneType"),
    (b'{"text": "\xff"}', "line 3 is not UTF-8: .* save the file as UTF-8"),
])  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fox"}\n\n' + line + b'\n{"text": "fox"}\n')
    with pytest.raises(ValueError, match=rf"rows\.jsonl, {message}"):
        read_rows(path)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_hold_every_document_once(tmp_path: Path, pack: bool, shuffle: bool) -> None:
    draw = random.Random(0)
    rows = [chat(words(draw), words(draw)) if draw.random() < 0.7 else {"text": words(draw)} for _ in range(60)]
    tokenizer = load(tmp_path)
    prepared = prepare(rows, tokenizer, max_tokens=64)
    made = batches(rows, tokenizer, max_tokens=64, pack=pack, shuffle=shuffle, seed=3)
    found = []
    for batch in made:
        assert batch.positions is not None and batch.documents is not None
        assert batch.ids.numel() <= 64 and (len(batch.ids) == 1 or not pack)
        for row in range(len(batch.ids)):
            numbers = batch.documents[row].unique_consecutive().tolist()
            assert [n for n in numbers if n >= 0] == list(range(len([n for n in numbers if n >= 0])))
            assert -1 not in numbers[:-1] and not (pack and -1 in numbers)
            for number in numbers:
                here = batch.documents[row] == number
                if number == -1:
                    assert (batch.labels[row][here] == -100).all() and (batch.ids[row][here] == tokenizer.pad_id).all()
                    continue
                assert batch.positions[row][here].tolist() == list(range(int(here.sum())))
                found.append((batch.ids[row][here].tolist(), batch.labels[row][here].tolist()))
    expected = [(document.ids.tolist(), document.labels.tolist()) for document in prepared.documents]
    assert (found == expected) != shuffle
    assert sorted(found) == sorted(expected)
    assert len(made) == len(list(made)) < len(rows)
    assert sum(supervised(batch) for batch in made) == sum(
        int((d.labels[1:] != -100).sum()) for d in prepared.documents
    )


def test_packing_leaves_no_room_for_the_next_document(tmp_path: Path) -> None:
    rows = [{"text": "fox " * n} for n in (3, 9, 4, 4, 1, 12, 2, 2)]
    made = batches(rows, load(tmp_path), max_tokens=24)
    lengths = [len(document.ids) for document in made.prepared.documents]
    assert [i for batch in made.plan for i in batch] == list(range(8))
    for batch, following in zip(made.plan, made.plan[1:], strict=False):
        assert sum(lengths[i] for i in batch) + lengths[following[0]] > 24


def test_shuffling_goes_by_its_seed_alone(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    prepared = prepare([{"text": "fox " * n} for n in range(1, 20)], tokenizer)
    random.seed(1)
    state = random.getstate()
    one, same, other = (batches(prepared, tokenizer, 40, shuffle=True, seed=seed).plan for seed in (5, 5, 6))
    assert one == same != other
    assert random.getstate() == state
    with pytest.raises(ValueError, match="prepared for 8192 tokens, batches hold 10"):
        batches(prepared, tokenizer, 10)


# --- batches of rows that are not held -------------------------------------------------------------------------------


class Endless:
    """Rows one after another, each time anew; ``drawn`` counts them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.drawn = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.most):
            self.drawn += 1
            yield chat("what", "fox " * (i % 7 + 1))


@pytest.mark.parametrize("pack", [True, False])
def test_streamed_batches_in_order_are_the_batches_that_are_held(tmp_path: Path, pack: bool) -> None:
    tokenizer = load(tmp_path)
    rows = [*Endless(60), {"text": "the quick fox " * 20}]
    held = list(batches(rows, tokenizer, 64, pack))
    streamed = batches(iter(rows), tokenizer, 64, pack, buffer=1)
    for one, other in zip(streamed, held, strict=True):
        for name in ("ids", "labels", "positions", "documents"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert streamed.prepared.rows == 61 and not streamed.prepared.documents and not hasattr(streamed, "__len__")
    with pytest.raises(ValueError, match="these rows can be read once only, being an iterator"):
        next(iter(streamed))


def test_streamed_batches_hold_no_more_than_their_buffer(tmp_path: Path) -> None:
    rows = Endless(10**9)
    stream = iter(batches(rows, load(tmp_path), 64, shuffle=True, buffer=20))
    given = 0
    for _ in range(30):
        batch = next(stream)
        assert batch.documents is not None
        given += int(batch.documents.max()) + 1
        assert rows.drawn <= given + 20  # the buffer, one of which waits for the next batch


def test_streamed_batches_are_shuffled_by_seed(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    rows = [{"text": f"{i} fox"} for i in range(40)]

    def order(seed: int, buffer: int = 15) -> list[str]:
        made = batches(rows, tokenizer, 40, shuffle=True, seed=seed, buffer=buffer)
        first, again = ([b.ids[b.documents == n].tolist() for b in made for n in b.documents.unique()] for _ in "12")
        assert first == again
        return [tokenizer.decode(ids) for ids in first]

    random.seed(1)
    state = random.getstate()
    one, same, other, straight = order(5), order(5), order(6), order(0, buffer=1)
    assert one == same != other and random.getstate() == state
    assert straight == [row["text"] for row in rows] != one and sorted(one) == sorted(straight)
    assert all(one.index(text) >= i - 14 for i, text in enumerate(straight))  # none before it was drawn


def test_streamed_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load(tmp_path)
    rows = [*[chat("what", "fox")] * 56, {"a": 1}]
    with pytest.raises(ValueError, match=r"^row 57: got the keys \['a'\]"):
        list(batches(rows, tokenizer, 64, buffer=8))
    assert len(list(batches([chat("what"), chat("what", "fox")], tokenizer, buffer=8))) == 1
    assert capsys.readouterr().err == "lorarun: 1 of 2 rows left out: 1 without an answer or text to learn (row 1)\n"
    with pytest.raises(ValueError, match="there is nothing to learn: 1 of 1 rows left out"):
        list(batches([chat("what")], tokenizer, buffer=8))
    with pytest.raises(ValueError, match="buffer needs rows not yet prepared and at least 1, got a list and 0"):
        batches(rows, tokenizer, buffer=0)
    with pytest.raises(ValueError, match=r"lorarun's own tokenizer, which is model\.tokenizer, got a Linear"):
        prepare([chat("what", "fox")], torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got a mapping: choose one of \['test', 'train'\]"):
        batches({"train": rows, "test": rows}, tokenizer)  # type: ignore[arg-type]


def test_targets_follow_the_definition() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (3, 12))
    labels = torch.where(torch.rand(3, 12) < 0.7, ids, -100)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] + [2] * 5 + [-1] * 2, [-1] * 3 + [0] * 9])
    expected = torch.full_like(labels, -100)
    for row in range(3):
        for t in range(11):
            if documents[row, t] == documents[row, t + 1] != -1:
                expected[row, t] = labels[row, t + 1]
    assert torch.equal(targets(Batch(ids, labels, documents=documents)), expected)
    assert torch.equal(targets({"ids": ids, "labels": labels, "documents": documents}), expected)
    assert supervised(Batch(ids, labels, documents=documents)) == int((expected != -100).sum()) > 0
    without = targets(Batch(ids, labels))
    assert torch.equal(without[:, :-1], labels[:, 1:]) and (without[:, -1] == -100).all()
    assert supervised({"ids": ids[:, :1], "labels": labels[:, :1]}) == 0  # one token predicts nothing


@pytest.mark.parametrize(("fields", "message"), [
    ({"ids": torch.zeros(1, 3, dtype=torch.int64)}, r"has ids, labels and maybe \['positions'.*got \['ids'\]"),
    ({"input_ids": 1, "labels": 2, "ids": 3}, "got .*'input_ids'"),
    ({"ids": torch.zeros(1, 3), "labels": torch.zeros(1, 3).long()}, r"ids is torch.float32 \[1, 3\]"),
    ({"ids": torch.zeros(3).long(), "labels": torch.zeros(3).long()}, r"ids is torch.int64 \[3\]; labels"),
    ({"ids": torch.zeros(1, 3).long(), "labels": torch.zeros(1, 2).long()}, r"got: labels is torch.int64 \[1, 2\]"),
    ({"ids": [[1]], "labels": torch.zeros(1, 1).long()}, "ids is a list"),
    ([1, 2], r"got a list; lorarun\.batches\(rows, model\.tokenizer\) makes batches of rows"),
])  # fmt: skip
def test_a_malformed_batch_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_batch(fields)


def test_real_rows(real: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(real("smollm2-135m"))
    reference = PreTrainedTokenizerFast.from_pretrained(real("smollm2-135m"))
    rows = read_rows(real("data") / "chatterbot.train.jsonl")
    made = batches(rows, tokenizer, max_tokens=512)
    documents = made.prepared.documents
    assert len(documents) == len(rows) == made.prepared.rows and json.dumps(rows[0]).isascii()
    for row, document in list(zip(rows, documents, strict=True))[::25]:
        assert document.ids.tolist() == reference.apply_chat_template(row["messages"])["input_ids"]
        answers = [m["content"].strip() + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert reference.decode(document.labels[document.labels != -100]) == "".join(answers)
    assert sum(batch.ids.numel() for batch in made) == sum(len(document.ids) for document in documents)
