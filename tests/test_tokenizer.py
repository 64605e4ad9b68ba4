"""Tokens, chat templates and answer spans, against transformers on the same files."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy
from transformers import PreTrainedTokenizerFast

from lorarun.tokenizer import Stream, Tokenizer

Messages = list[dict[str, Any]]


def load(folder: Path, template: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, template=template)
    assert tokenizer is not None
    return tokenizer


def theirs(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def chat(*contents: str, system: str | None = None) -> Messages:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def learned(tokenizer: Tokenizer, messages: Messages, **how: Any) -> list[str]:
    """The text of each run of learned tokens."""
    runs: list[list[int]] = []
    previous = False
    for i, kept in zip(*tokenizer.encode_chat(messages, **how), strict=True):
        if kept and not previous:
            runs.append([])
        if kept:
            runs[-1].append(i)
        previous = kept
    return [tokenizer.decode(run, skip_special=False) for run in runs]


# --- where the answers are -------------------------------------------------------------------------------------------

# Templates of the shapes seen in the wild. In each the author's generation tags stand around the answers: transformers
# finds them there, and without the tags lorarun must find the same tokens by itself.
BEGIN, END = "{% generation %}", "{% endgeneration %}"


def said(text: str, message: str = "m") -> str:
    """Template code that writes `text`, inside generation tags where the message is an answer."""
    return f"{{% if {message}.role == 'assistant' %}}{BEGIN}{text}{END}{{% else %}}{text}{{% endif %}}"


EACH = "{% for m in messages %}"
HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
LINE = "{{ '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
THOUGHT = "'<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n'"
TEMPLATES = {
    "header in the loop, text trimmed": (
        "{{ bos_token }}" + EACH + HEADER + said("{{ m['content'] | trim }}<|im_end|>") + LINE + "{% endfor %}" + PROMPT
    ),
    "header at the end of the user's turn, no prompt": (
        EACH + "{% if m.role == 'assistant' %}" + BEGIN + "{{ ' ' + m.content + eos_token }}" + END + "{% else %}"
        "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "prompt inside the loop, line ends outside of tags": (
        EACH + "\n" + HEADER + said("{{ m['content'] + eos_token }}") + "\n\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|im_start|>assistant' }}\n{% endif %}\n{% endfor %}\n"
    ),
    "only the last answer keeps its thought": (
        "{%- set ns = namespace(last=0) -%}\n"
        "{%- for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}"
        "{% set ns.last = messages | length - loop.index0 %}{% endif %}{% endfor -%}\n"
        + EACH + HEADER + "{% set thought = " + THOUGHT + " if loop.index0 >= ns.last else '' %}"
        "{% set answer = thought + m.content.split('</think>')[-1].lstrip('\n') %}"
        "{% set text = answer if m.role == 'assistant' else m.content %}"
        + said("{{ text + '<|im_end|>' }}") + LINE + "{% endfor %}" + PROMPT
    ),
    "prompt opens a thought that history lacks": (
        "{{ bos_token }}" + EACH + "{% if m.role == 'assistant' %}" + HEADER + BEGIN
        + "{{ m.content.split('</think>')[-1] + '<|im_end|>' }}" + END
        + "{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "the user's turn differs when it is the last": (
        EACH + HEADER + "{% if loop.last and m.role == 'user' %}(date){% endif %}"
        + said("{{ m.content }}<|im_end|>") + LINE + "{% endfor %}" + PROMPT
    ),
    "the user's turn is cut short when it is the last": (
        EACH + "{% if loop.last and m.role == 'user' %}{{ m.content[:1] }}{% else %}"
        + said("{{ m.content + eos_token }}") + "{% endif %}{% endfor %}"
    ),
    "another tail without a prompt": (
        EACH + "<|im_start|>{{ m.role }}:" + said("{{ m.content }}<|im_end|>") + "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% else %}<|im_start|>{% endif %}"
    ),
    "a macro, and a loop over parts": (
        "{% macro text(m) %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
        + EACH + HEADER + said("{{ text(m) + '<|im_end|>' }}") + LINE + "{% endfor %}" + PROMPT
    ),
    "a loop over numbers": (
        "{% for i in range(messages | length) %}" + HEADER.replace("m.", "messages[i].")
        + said("{{ messages[i].content + '<|im_end|>' }}", "messages[i]") + LINE + "{% endfor %}" + PROMPT
    ),
    "system text folded, roles renamed": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|im_start|>' + role + '\n' + (first if loop.first else '') }}" + said("{{ m.content|trim }}<|im_end|>")
        + LINE + "{% endfor %}" + PROMPT.replace("assistant", "model")
    ),
}  # fmt: skip
CONVERSATIONS = {
    "one turn": chat("what", "the fox"),
    "three turns": chat("what", "the fox", "who?", "quick", "why", "<think>\nhm\n</think>\n\nthe brown fox"),
    "an early thought": chat("what", "<think>\nhm\n</think>\n\nthe fox", "who?", "quick"),
    "ends with the user": chat("what", "the fox", "who?"),
    "markers typed by the user": chat("<|im_end|>\n<|im_start|>assistant\nno", "the fox", "[/INST] no</s>", "quick"),
    "same words everywhere": chat("the fox", "the fox", "the fox", "the fox"),
    "not ASCII": chat("Grüße 世", "界 🦙 é"),
}


@pytest.mark.parametrize("shape", TEMPLATES)
def test_answers_are_found_where_the_template_writes_them(tmp_path: Path, shape: str) -> None:
    tagged = TEMPLATES[shape]
    ours = load(toy.make(tmp_path / "plain", tagged.replace(BEGIN, "").replace(END, "")))
    ours_tagged = load(toy.make(tmp_path / "tagged", tagged))
    reference = theirs(tmp_path / "tagged")
    for name, messages in CONVERSATIONS.items():
        expected = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = ours.encode_chat(messages)
        assert ids == expected["input_ids"], name
        assert [int(kept) for kept in mask] == expected["assistant_masks"], name
        assert any(mask), name
        assert ours_tagged.encode_chat(messages) == (ids, mask), name
        prompt = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode_prompt(messages) == prompt, name


def test_answers_after_a_system_message(tmp_path: Path) -> None:
    template = TEMPLATES["system text folded, roles renamed"].replace(BEGIN, "").replace(END, "")
    tokenizer = load(toy.make(tmp_path, template))
    messages = chat("what", "the fox", "who?", "quick", system="answers")
    assert learned(tokenizer, messages) == ["the fox<|im_end|>", "quick<|im_end|>"]
    assert tokenizer.encode_chat(messages)[0] == theirs(tmp_path).apply_chat_template(messages)["input_ids"]


def test_answers_with_parts_and_tools(tmp_path: Path) -> None:
    template = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""  # noqa: E501
    tokenizer = load(toy.make(tmp_path, template))
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "<a>"}, {"type": "text", "text": "é"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "<f>", "arguments": {"b": 1, "a": "é"}}]},
        {"role": "tool", "content": [{"type": "text", "text": "1"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "fox"}]},
    ]
    tools = [{"name": "<f>", "description": "it's"}]
    reference = theirs(tmp_path).apply_chat_template(messages, tools=tools)["input_ids"]
    assert tokenizer.encode_chat(messages, tools=tools)[0] == reference
    answers = ['{"name": "<f>", "arguments": {"b": 1, "a": "é"}}</s>', "fox</s>"]
    assert learned(tokenizer, messages, tools=tools) == answers


def test_an_answer_may_open_the_conversation_or_be_empty(tmp_path: Path) -> None:
    template = TEMPLATES["header in the loop, text trimmed"].replace(BEGIN, "").replace(END, "")
    messages = [{"role": "assistant", "content": "fox"}, *chat("what", "", "who", "quick")]
    tokenizer = load(toy.make(tmp_path, template))
    assert learned(tokenizer, messages) == ["fox<|im_end|>", "<|im_end|>", "quick<|im_end|>"]
    needs_two = load(toy.make(tmp_path, "{% if messages[1].role == 'x' %}{% endif %}" + template))  # cannot write less
    assert learned(needs_two, messages) == ["fox<|im_end|>", "<|im_end|>", "quick<|im_end|>"]


ASKED = "{% if add_generation_prompt %}[assistant]{% endif %}"
MESSAGE = "[{{ m.role }}]{{ m.content }}"
ODD = "{% if messages | length % 2 %}odd{% endif %}"  # so that renders of fewer messages are no prefixes


@pytest.mark.parametrize(("template", "message"), [
    # what is captured and trimmed no longer has its marks where they were
    ("{% set all %}{% for m in messages %}" + MESSAGE + "\n{% endfor %}{% endset %}{{ all | trim }}" + ASKED,
     r"message 2 \(assistant\) cannot be told .*generation"),
    # the same with tags: transformers would return shifted positions
    ("{% set all %}{% for m in messages %} {% generation %}" + MESSAGE + "\n{% endgeneration %}{% endfor %}{% endset %}"
     "{{ all | trim }}", "changes the text of its {% generation %} tags"),
    # a capture that looks at its own length refuses the marks
    ("{% set all %}{% for m in messages %}" + MESSAGE + "{% endfor %}{% endset %}{% if all | length > 60 %}"
     "{{ raise_exception('long') }}{% endif %}{{ ODD }}{{ all }}".replace("{{ ODD }}", ODD) + ASKED, "cannot be told"),
    # what stands in front of answers is not what the generation prompt says
    (ODD + "{% for m in messages %}" + MESSAGE + "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}",
     r"message 2 \(assistant\) is not written behind the template's generation prompt '<model>'"),
    # the flag changes the front of the text
    ("{% if add_generation_prompt %}now{% endif %}{% for m in messages %}" + MESSAGE + "{% endfor %}",
     "changes more than the end"),
])  # fmt: skip
def test_a_template_that_hides_its_answers_is_refused(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = load(toy.make(tmp_path, template))
    assert tokenizer.encode_prompt(chat("what"))  # it can still be used
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(chat("what", "fox", "who", "quick"))


def test_an_answer_that_is_not_written_is_not_learned(tmp_path: Path) -> None:
    template = "{% for m in messages if m.content %}" + MESSAGE + "</s>{% endfor %}" + ASKED
    silent = "{% for m in messages %}{% if m.content %}" + MESSAGE + "</s>{% endif %}{% endfor %}" + ASKED
    messages = chat("what", "", "who", "quick")
    assert learned(load(toy.make(tmp_path, silent)), messages) == ["quick</s>"]
    assert learned(load(toy.make(tmp_path, template)), chat("what", "fox", "", "quick")) == ["fox</s>", "quick</s>"]


def test_a_marker_that_merges_with_its_surroundings(tmp_path: Path) -> None:
    # As pieces, "\n### Answer: " is one token behind a question and another one alone: its text or ids match nowhere.
    template = "{% for m in messages %}{{ ('\n### Answer: ' if m.role == 'assistant' else '\n### Question: ') + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\n### Answer: ' }}{% endif %}"  # noqa: E501
    tokenizer = load(toy.make(tmp_path, template, kind="pieces", begins=True))
    marker = tokenizer.encode("\n### Answer: ", bos=False)
    messages = chat("what\n### Answer: fox", "quick", "the", "zebra", "what", "brown")
    ids, mask = tokenizer.encode_chat(messages)
    assert not any(ids[i : i + len(marker)] == marker for i in range(len(ids)))  # the usual search finds nothing
    assert learned(tokenizer, messages) == ["quick</s>", "zebra</s>", "brown</s>"]
    assert ids == [1, *theirs(tmp_path).apply_chat_template(messages)["input_ids"]]


def test_a_token_across_the_boundary_belongs_to_the_prompt(tmp_path: Path) -> None:
    # A post-processor that trims offsets would make " fox" start behind its space, inside the answer.
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # noqa: E501
    tokenizer = load(toy.make(tmp_path, template, trims=True))
    assert learned(tokenizer, chat("what", "fox the")) == [" the</s>"]


# --- begin tokens ----------------------------------------------------------------------------------------------------

LOOP = "{% for m in messages %}" + MESSAGE + "</s>{% endfor %}" + ASKED


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(("template", "config", "begins"), [
    ("{{ bos_token }}" + LOOP, {"add_bos_token": True}, 1),
    (LOOP, {"add_bos_token": True}, 1),
    (LOOP, {"add_bos_token": False, "bos_token": None}, 0),
])  # fmt: skip
def test_begin_tokens(tmp_path: Path, template: str, config: dict[str, Any], begins: int, explicit: bool) -> None:
    processed = bool(config["add_bos_token"])
    if not explicit:
        del config["add_bos_token"]  # then the post-processor decides
    tokenizer = load(toy.make(tmp_path, template, begins=processed, **config))
    reference = theirs(tmp_path)
    messages = chat("what", "fox")
    for ids in (tokenizer.encode_chat(messages)[0], tokenizer.encode_prompt(messages[:1]), tokenizer.encode("fox")):
        assert ids.count(1) == begins and ids[:begins] == [1] * begins and None not in ids
    templated = "bos_token" in template
    rendered = reference.apply_chat_template(messages, tokenize=False)
    assert tokenizer.encode_chat(messages)[0] == reference(rendered, add_special_tokens=not templated)["input_ids"]
    assert tokenizer.encode("fox") == reference("fox")["input_ids"]
    assert tokenizer.encode("<s>fox").count(1) == 1  # one already typed
    assert tokenizer.encode("fox", bos=False) == tokenizer.encode("fox")[begins:]
    with pytest.raises(ValueError, match="only text can be encoded, got a list"):
        tokenizer.encode(["fox"])  # type: ignore[arg-type]
    assert tokenizer.adds_bos == (begins == 1) and tokenizer.bos_id == (1 if begins else None)


def test_an_explicit_setting_beats_the_post_processor(tmp_path: Path) -> None:
    assert load(toy.make(tmp_path / "a", begins=True, add_bos_token=False)).encode("fox")[0] != 1
    assert load(toy.make(tmp_path / "b", begins=False, add_bos_token=True)).encode("fox")[0] == 1


def test_special_ids(tmp_path: Path) -> None:
    folder = toy.make(tmp_path, pad_token={"__type": "AddedToken", "content": "<pad>"}, eos_token="</s>")
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3]}, "bos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    tokenizer = load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    assert tokenizer.stop_ids == (2, 3, 4)
    assert tokenizer.vocab_size == len(theirs(folder))
    assert load(toy.make(tmp_path / "bare")).pad_id == 2  # none named: the end token


def test_ids_of_config_serve_where_the_tokenizer_says_nothing(tmp_path: Path) -> None:
    folder = toy.make(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [2, 4], "bos_token_id": 1}))
    tokenizer = load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2, 4))


def test_the_end_of_turn_is_a_stop_id(tmp_path: Path) -> None:
    # A base checkpoint names the end of a document only; trained on chats it would never stop.
    assert load(toy.make(tmp_path)).stop_ids == (2,)
    assert load(tmp_path, template="chatml").stop_ids == (2, 4)


# --- where templates come from, and files ----------------------------------------------------------------------------


def test_template_sources(tmp_path: Path) -> None:
    folder = toy.make(tmp_path, "from config")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load(folder).template == "from config"
    (folder / "chat_template.jinja").write_bytes(b"from\r\nits own file {{ bos_token }}\n")
    assert load(folder).template == "from\r\nits own file {{ bos_token }}\n"
    assert load(folder).render(chat("a")) == theirs(folder).apply_chat_template(chat("a"), tokenize=False)
    named = [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]
    listed = toy.make(tmp_path / "listed", named)
    (listed / "additional_chat_templates").mkdir()
    (listed / "additional_chat_templates" / "tool_use.jinja").write_text("three")
    assert load(listed).template == "one"
    assert load(listed, template="rag").template == "two"
    assert load(listed, template="tool_use").template == "three"
    with pytest.raises(ValueError, match="no chat template 'other'; choose from tool_use, default, rag, chatml|choose"):
        load(listed, template="other")
    only = toy.make(tmp_path / "only")
    (only / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load(only).template == "from json"
    assert load(toy.make(tmp_path / "none")).template is None


@pytest.mark.parametrize("where", ["jinja", "config", "both", "named"])
def test_saved_files_are_the_checkpoints_own(tmp_path: Path, where: str) -> None:
    listed: Any = [{"name": "default", "template": LOOP}, {"name": "short", "template": LOOP.replace("</s>", "<s>")}]
    folder = toy.make(tmp_path / "from", {"jinja": None, "named": listed}.get(where, "{{ bos_token }}" + LOOP))
    if where in ("jinja", "both"):
        (folder / "chat_template.jinja").write_bytes(LOOP.encode() + b"\r\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2,   4]}')
    (folder / "model.safetensors").write_text("weights are not text files")
    before = load(folder)
    before.save(tmp_path / "to")
    before.save(folder)  # onto itself
    expected = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "model.safetensors"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()} == expected
    after = load(tmp_path / "to")
    assert after.template == before.template and after.stop_ids == before.stop_ids
    assert after.encode_prompt(chat("what")) == before.encode_prompt(chat("what"))


@pytest.mark.parametrize("chosen", ["chatml", "short", LOOP.replace("[", "(")])
def test_a_chosen_template_is_saved(tmp_path: Path, chosen: str) -> None:
    listed = [{"name": "default", "template": LOOP}, {"name": "short", "template": LOOP.replace("</s>", "<s>")}]
    before = load(toy.make(tmp_path / "from", listed), template=chosen)
    before.save(tmp_path / "to")
    after = load(tmp_path / "to")
    assert after.template == before.template != LOOP
    assert after.encode_prompt(chat("what")) == before.encode_prompt(chat("what"))
    assert theirs(tmp_path / "to").apply_chat_template(chat("what"), tokenize=False) == before.render(chat("what"))


def test_named_templates_write_the_published_formats(tmp_path: Path) -> None:
    controls = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
    folder = toy.make(tmp_path)
    core = toy.core()
    core.add_special_tokens(controls)
    core.save(str(folder / "tokenizer.json"))
    messages = [*chat("what ", "fox", "who")]
    assert load(folder, template="chatml").render(messages, add_generation_prompt=True) == (
        "<|im_start|>user\nwhat <|im_end|>\n<|im_start|>assistant\nfox<|im_end|>\n<|im_start|>user\nwho<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert load(folder, template="llama3").render(messages, add_generation_prompt=True) == (
        f"<s>{header.format('user')}what<|eot_id|>{header.format('assistant')}fox<|eot_id|>"
        f"{header.format('user')}who<|eot_id|>{header.format('assistant')}"
    )
    assert load(folder, template="gemma").render(messages, add_generation_prompt=True) == (
        "<s><start_of_turn>user\nwhat<end_of_turn>\n<start_of_turn>model\nfox<end_of_turn>\n"
        "<start_of_turn>user\nwho<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(ValueError, match="the gemma template has no role system"):
        load(folder, template="gemma").render(chat("what", system="the"))
    for name, ends in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")):
        tokenizer = load(folder, template=name)
        assert learned(tokenizer, messages) == ["fox" + ends]
        assert core.token_to_id(ends) in tokenizer.stop_ids


def test_a_named_template_needs_its_tokens(tmp_path: Path) -> None:
    folder = toy.make(tmp_path)
    with pytest.raises(ValueError, match=r"'gemma' needs <start_of_turn>, <end_of_turn> .*fit template='chatml'"):
        load(folder, template="gemma")
    with pytest.raises(ValueError, match=r"no chat template.*template= \(its tokens fit template='chatml'\)"):
        load(folder).encode_prompt(chat("what"))
    with pytest.raises(ValueError, match="no chat template"):
        load(folder).encode_chat(chat("what", "fox"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    folder = toy.make(tmp_path / "a")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read by tokenizers \d"):
        load(folder)
    toy.make(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got a list"):
        load(folder)


def test_stored_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    folder = toy.make(tmp_path)
    core = toy.core()
    core.enable_truncation(3)
    core.enable_padding(length=50)
    core.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("the quick brown fox answers") == toy.core().encode("the quick brown fox answers").ids


def test_a_copied_model_shares_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = load(toy.make(tmp_path, LOOP))
    tokenizer.encode_chat(chat("what", "fox"))
    assert copy.deepcopy(tokenizer) is tokenizer
    assert pickle.loads(pickle.dumps(tokenizer)).encode_chat(chat("what", "fox")) == tokenizer.encode_chat(
        chat("what", "fox")
    )


# --- templates are somebody else's programs --------------------------------------------------------------------------

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_refusal_carries_the_templates_words(tmp_path: Path) -> None:
    tokenizer = load(toy.make(tmp_path, STRICT))
    with pytest.raises(ValueError, match=r"refused a conversation \(system, user, assistant\): System role not suppor"):
        tokenizer.encode_chat(chat("what", "fox", system="the"))
    with pytest.raises(ValueError, match=r"\(user, user\), at message 2 \(user\): Roles must alternate"):
        tokenizer.encode_prompt([*chat("what"), *chat("who")])


def test_system_text_is_folded_when_asked(tmp_path: Path) -> None:
    tokenizer = load(toy.make(tmp_path, STRICT))
    messages = chat("what", "fox", "who", "quick", system="the")
    assert tokenizer.render(messages, fold_system=True) == tokenizer.render(chat("the\n\nwhat", "fox", "who", "quick"))
    assert learned(tokenizer, messages, fold_system=True) == ["fox</s>", "quick</s>"]
    assert tokenizer.encode_prompt(messages[:2], fold_system=True) == tokenizer.encode_prompt(chat("the\n\nwhat"))
    assert messages == chat("what", "fox", "who", "quick", system="the")  # the caller's are untouched
    parts = [{"role": "user", "content": [{"type": "text", "text": "what"}]}]
    assert "{'type': 'text', 'text': 'the\\n\\n'}, {'type'" in tokenizer.render([messages[0], *parts], fold_system=True)
    with pytest.raises(ValueError, match="content as text, got a list"):
        tokenizer.render([{"role": "system", "content": parts[0]["content"]}, *parts], fold_system=True)
    with pytest.raises(ValueError, match="no user message behind the system message"):
        tokenizer.render([{"role": "system", "content": "the"}], fold_system=True)


@pytest.mark.parametrize(("template", "message"), [
    ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "calls more than"),
    ("{% for a in range(200) %}{% for b in range(200) %}{% endfor %}{% endfor %}", "loops or calls more than 10,000"),
    ("{% for a in range(9999) %}" + "x" * 9999 + "{% endfor %}", "grows beyond 16,777,216 characters"),
    ("{{ 'ab' * 10**9 }}", "repeats something beyond"),
    ("{{ 10 ** 10 ** 9 }}", "power in the template is too large"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ("{{ nothing.there }}", "'nothing' is undefined"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% for m in messages %}", "not valid jinja2: line 1"),
])  # fmt: skip
def test_templates_are_kept_in_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr("lorarun.template.MAX_ITERATIONS", 10_000)
    tokenizer = load(toy.make(tmp_path, template))
    with pytest.raises(ValueError, match=message):
        tokenizer.render(chat("what"))


def test_what_templates_may_use_renders_as_in_transformers(tmp_path: Path) -> None:
    template = """
    {%- set data = {'b': '<é&\\'>', 'a': [1, none, true]} %}
    {% if true %}
      indented
    {% endif %}
{{ data | tojson }} {{ data | tojson(indent=2, sort_keys=true) }} {{ data | tojson(separators=(',', ':')) }}
{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'none' %}{% continue %}{% endif %}{{ loop.index }}{% else %}none{% endfor %}
{{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }} {{ pad_token is defined }} {{ eos_token }} {{ flag }}
{{ messages | map(attribute='role') | join(',') }} {{ namespace(a=1).a }} {{ 3 ** 2 * 2 }} {{ 'ab' * 3 }} {{ dict(a=1) }}
"""  # noqa: E501
    folder = toy.make(tmp_path, template)
    messages = chat("what", "fox", "who")
    expected = theirs(folder).apply_chat_template(messages, tokenize=False, flag=[1, "a"])
    assert load(folder).render(messages, flag=[1, "a"]) == expected


@pytest.mark.parametrize(("messages", "message"), [
    ([], "at least one"),
    ("what", "must be a list"),
    (["what"], "message 1 must be a"),
    ([{"role": "user"}], "'content' that is text"),
    ([{"from": "human", "value": "what"}], "message 1 must have a text 'role'.*'from': 'str'"),
    ([{"role": "user", "content": None}], "'content' that is text"),
    ([{"role": "user", "content": 3}], "'content': 'int'"),
    ([{"role": "user", "content": "a", "extra": {1, 2}}], "got a set"),
])  # fmt: skip
def test_messages_are_checked(tmp_path: Path, messages: Any, message: str) -> None:
    tokenizer = load(toy.make(tmp_path, LOOP))
    for call in (tokenizer.render, tokenizer.encode_chat, tokenizer.encode_prompt):
        with pytest.raises(ValueError, match=message):
            call(messages)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_pieces_of_a_stream_are_whole_and_complete(tmp_path: Path) -> None:
    texts = [" the fox", "世界 🦙🦙 Grüße", "the</s> fox<|im_end|>  \n é", "\n\n the", "e\u0301 zwei"]
    for kind in ("bytes", "pieces"):
        tokenizer = load(toy.make(tmp_path / kind, kind=kind))
        for text in texts:
            ids = tokenizer.encode(text, bos=False)
            for skip in (True, False):
                stream = Stream(tokenizer, skip_special=skip)
                pieces = [stream.put(i) for i in ids]
                assert not any("\ufffd" in piece for piece in pieces)
                assert stream.end() == ""
                assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
                assert len([piece for piece in pieces if piece]) > 1  # as they come, not all at the end


def test_a_stream_gives_a_broken_character_at_its_end(tmp_path: Path) -> None:
    tokenizer = load(toy.make(tmp_path))
    ids = tokenizer.encode("the 世", bos=False)[:-1]
    stream = Stream(tokenizer)
    assert stream.put(*ids) == "" and stream.end() == "the \ufffd"


def test_a_stream_begins_behind_a_prompt(tmp_path: Path) -> None:
    # Decoded alone, the first token of an answer would lose the space that separates it from the prompt.
    tokenizer = load(toy.make(tmp_path, kind="pieces"))
    ids = tokenizer.encode("what z", bos=False)
    stream = Stream(tokenizer)
    pieces = [stream.put(*ids[:-2]), *(stream.put(i) for i in ids[-2:])]
    assert "".join(pieces) == "what z"


# --- real checkpoints ------------------------------------------------------------------------------------------------

TEXTS = [
    "The capital of France is",
    "Grüße, 世界! 🦙 12345\n\n\tdon't  stop",
    "",
    " leading",
    "a<|im_end|>b<end_of_turn>c",
]


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_tokenizers(real: Callable[[str], Path], name: str) -> None:
    folder = real(name)
    own = {"smollm2-135m": None, "gemma3-270m": "gemma"}[name]
    tokenizer, reference = load(folder, template=own), theirs(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"], text
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, bos=False) == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special=False) == text
        stream = Stream(tokenizer)
        assert "".join([*map(stream.put, ids), stream.end()]) == tokenizer.decode(ids)
    end = {"smollm2-135m": "<|im_end|>", "gemma3-270m": "<end_of_turn>"}[name]
    messages = chat("Hi <start_of_turn>model\n<|im_start|>assistant\nno", "Hello 世界", "Why?", "Because.\n")
    answers = ["Hello 世界" + end, ("Because." if own else "Because.\n") + end]
    assert learned(tokenizer, messages) == answers
    ids = reference.apply_chat_template(messages, chat_template=tokenizer.template)["input_ids"]
    assert tokenizer.encode_chat(messages)[0] == ids
    assert tokenizer._core.token_to_id(end) in tokenizer.stop_ids


def test_streams_of_random_ids(real: Callable[[str], Path]) -> None:
    tokenizer = load(real("smollm2-135m"))
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(20)]
        stream = Stream(tokenizer)
        assert "".join([*map(stream.put, ids), stream.end()]) == tokenizer.decode(ids)


def test_the_generation_tag_is_found_however_it_is_spelled(tmp_path: Path) -> None:
    template = re.sub(r"\{% (end)?generation %\}", r"{%- \1generation -%}", TEMPLATES["a loop over numbers"])
    tokenizer = load(toy.make(tmp_path, template))
    assert learned(tokenizer, chat("what", "fox")) == ["fox<|im_end|>"]
