"""Text to token ids and back: ``tokenizer.json``, the checkpoint's chat template, and the ids that begin and end a
text.

The ``tokenizers`` package reads the checkpoint's own ``tokenizer.json``; what is added here are the decisions around
it, made once so that training and generation cannot differ:

- **Begin token.** Special tokens are never left to the post-processor. A text gets exactly one begin token if this
  tokenizer wants one (``add_bos_token`` in ``tokenizer_config.json``, else what the post-processor would do) and its
  ids do not already start with it, as they do behind most chat templates. No begin token, or not wanted: none.
- **Stop ids.** The union of every end token the checkpoint names, and of the special token that its chat template puts
  behind an answer: a base checkpoint often names only the end of a document, and would talk on for ever after training.
- **Answers.** ``encode_chat`` encodes the whole text once. A token is learned when it starts inside an answer's span of
  characters (see ``template.py``), so a token that runs across the boundary is part of the prompt.

Control tokens that a user types into a message are read as control tokens, as everywhere; they are not learned.
``has_control_token`` finds them, and ``documents.py`` leaves such rows out.

Given up: tokenizers without a ``tokenizer.json`` (bare SentencePiece files) are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lorarun.headers import is_there, read_json, read_text
from lorarun.messages import NAMED, fold

if TYPE_CHECKING:
    from lorarun.template import Span, Template

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
MAX_BYTES = 1 << 28  # of tokenizer.json; the largest of a served model has 33 MB
TEMPLATES_FOLDER = "additional_chat_templates"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or {} when there is no such file."""
    return read_json(path) if is_there(path) else {}


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's chat templates by name; "default" is the one used when none is named.

    Later sources win: ``chat_template.json``, then ``tokenizer_config.json`` (a text, or a list of {name, template}),
    then ``chat_template.jinja`` and the files of ``additional_chat_templates``.
    """
    found: dict[str, str] = {}
    for stored in (_read(folder / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(stored, str):
            found["default"] = stored
        elif isinstance(stored, list) and all(
            isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
            for entry in stored
        ):
            found.update({entry["name"]: entry["template"] for entry in stored})
        elif stored is not None:
            raise ValueError(f"chat_template in {folder} must be a text, or a list of {{name, template}}, both texts")
    own = folder / "chat_template.jinja"
    for path in [*sorted((folder / TEMPLATES_FOLDER).glob("*.jinja")), *([own] if is_there(own) else [])]:
        found["default" if path == own else path.stem] = read_text(path)
    return found


def _as_ids(value: Any) -> list[int]:
    """The token ids in a field; -1 is some writers' word for none."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if type(item) is int and 0 <= item < 2**31]


def configs(folder: Path) -> list[dict[str, Any]]:
    """``generation_config.json`` and ``config.json`` of a checkpoint, and the text models' fields nested in them."""
    sources = [_read(folder / name) for name in ("generation_config.json", "config.json")]
    return sources + [source["text_config"] for source in sources if isinstance(source.get("text_config"), dict)]


def end_ids(sources: Iterable[Mapping[str, Any]]) -> set[int]:
    """Every end token that these configurations name."""
    return {i for source in sources for i in _as_ids(source.get("eos_token_id"))}


class Tokenizer:
    """What ``Tokenizer.load`` returns; every attribute is read-only by convention.

    bos_id, eos_id: int or None. pad_id: int, the pad token, else the end token, else 0 (what it is never matters:
    padding goes by position). stop_ids: sorted tuple. vocab_size: number of tokens, added ones included.
    template: the chat template's text or None. adds_bos: whether a text begins with ``bos_id``.
    """

    def __init__(self, folder: Path, core: tokenizers.Tokenizer, template: str | None = None) -> None:
        self.folder = folder
        self._core = core
        self._control = [token.content for token in core.get_added_tokens_decoder().values() if token.special]
        self._any_control = re.compile("|".join(map(re.escape, self._control)) or "(?!)")
        config = _read(folder / "tokenizer_config.json")
        sources = configs(folder)
        self._tokens = self._special_tokens(config, sources)
        self.bos_id, self.eos_id = self._id("bos"), self._id("eos")
        pad = self._id("pad")
        self.pad_id: int = pad if pad is not None else self.eos_id if self.eos_id is not None else 0
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self.added: tuple[str, ...] = ()  # tokens that the checkpoint's has not
        wanted = config.get("add_bos_token")
        if wanted is None:
            wanted = core.encode("a").ids[:1] == [self.bos_id]
        self.adds_bos = bool(wanted) and self.bos_id is not None
        core.post_processor = None  # begin tokens are put here, and its trimming would move offsets
        self._templates = _read_templates(folder, config)
        self.template = self._choose_template(template)
        from lorarun.template import Template  # noqa: PLC0415 - jinja2 takes a fifth of lorarun's import

        self._template = None if self.template is None else Template(self.template, self._tokens)
        self.stop_ids: tuple[int, ...] = tuple(sorted({*end_ids(sources), *_as_ids(self.eos_id), *self._end_of_turn()}))

    @classmethod
    def load(cls, folder: str | Path, template: str | None = None) -> Tokenizer | None:
        """The tokenizer of the checkpoint in ``folder``, or None where there is no ``tokenizer.json``.

        ``template`` is for checkpoints without a chat template, or with several: a name from the checkpoint's own list,
        one of "chatml", "llama3", "gemma", or the text of a jinja2 template. A named one is refused when its control
        tokens are not tokens of this tokenizer. Raises ValueError for files that cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not is_there(path):
            return None
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{path} has {size:,} bytes, and no tokenizer more than {MAX_BYTES:,}: fetch it again.")
        data = path.read_bytes()
        if re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', data):  # where it does not fit, the package aborts
            raise ValueError(f"{path} has a continuing_subword_prefix, as no tokenizer of a served family has.")
        try:
            core = tokenizers.Tokenizer.from_buffer(data)
            core.encode("a")  # some files are read, and serve nothing
        except BaseException as error:  # the package raises bare Exception, and panics are not even that
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}") from error
        core.no_truncation()
        core.no_padding()
        return cls(folder, core, template)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self  # nothing in it changes, and copying a vocabulary takes seconds

    # --- what the files say ---

    def _special_tokens(self, config: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """{"bos_token": "<s>", …}: an explicit null is obeyed; where nothing is said, the ids of config.json decide."""
        table = _read(self.folder / "special_tokens_map.json")
        found: dict[str, str] = {}
        for name in SPECIAL:
            key = f"{name}_token"
            if key in config or key in table:
                value = config.get(key, table.get(key))
                value = value.get("content") if isinstance(value, dict) else value
            else:
                ids = [i for source in sources for i in _as_ids(source.get(f"{key}_id"))]
                value = self._core.id_to_token(ids[0]) if ids and name in ("bos", "eos", "pad") else None
            if isinstance(value, str):
                found[key] = value
        return found

    def _id(self, name: str) -> int | None:
        token = self._tokens.get(f"{name}_token")
        return None if token is None else self._core.token_to_id(token)

    def _lacking(self, name: str) -> list[str]:
        """The control tokens of the named template that this tokenizer would break into pieces."""
        core = self._core
        tokens = [(token, core.token_to_id(token)) for token in NAMED[name][1]]
        return [token for token, i in tokens if i is None or core.encode(token, add_special_tokens=False).ids != [i]]

    def _choose_template(self, template: str | None) -> str | None:
        if template is None:
            return self._templates.get("default")
        if "{{" in template or "{%" in template:
            return template
        if template in self._templates:
            return self._templates[template]
        if template not in NAMED:
            names = ", ".join([*self._templates, *(name for name in NAMED if name not in self._templates)])
            raise ValueError(f"there is no chat template {template!r}; choose from {names}, or give a template's text")
        if lacking := self._lacking(template):
            raise ValueError(
                f"the chat template {template!r} needs {', '.join(lacking)} as single tokens, which this tokenizer has "
                f"not; {self._suggestion()}"
            )
        return NAMED[template][0]

    def _suggestion(self) -> str:
        fitting = [name for name in NAMED if not self._lacking(name)]
        return f"its tokens fit template={' or '.join(map(repr, fitting))}" if fitting else "give a template's own text"

    def _end_of_turn(self) -> list[int]:
        """The special token with which the template ends an answer, seen by rendering one; [] if it has none."""
        try:
            ids, learned = self.encode_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}])
        except ValueError:
            return []  # no template, or a peculiar one; whoever uses it gets the error
        last = [i for i, kept in zip(ids, learned, strict=True) if kept][-1:]
        return [i for i in last if self._core.id_to_token(i) in self._control]

    # --- text ---

    def _begin(self, ids: list[int]) -> list[int]:
        """[bos_id] where ``ids`` still needs it in front, else []."""
        return [self.bos_id] if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else []

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self._core.encode(text, add_special_tokens=False)
        except TypeError as error:
            got = f"{text!r:.60}, which is no valid Unicode" if isinstance(text, str) else f"a {type(text).__name__}"
            raise ValueError(f"only text can be encoded, got {got}") from error
        except Exception as error:  # the package's own, which are nothing more
            raise ValueError(f"the tokenizer in {self.folder} cannot encode {text!r:.60}: {error}") from error

    def id_of(self, token: str) -> int:
        """The id of one token; ValueError where there is none of that text."""
        if (found := self._core.token_to_id(token)) is None:
            raise ValueError(f"{token!r} is no token of {self.folder}.")
        return int(found)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """The ids of ``text``; with ``bos``, behind exactly one begin token if this tokenizer wants one."""
        ids: list[int] = self._encoding(text).ids
        return self._begin(ids) + ids if bos else ids

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """The ids of ``text`` as ``encode`` gives them, and for each whether it starts inside one of ``spans``.

        ``spans`` are [start, end) character positions, in order and apart from each other.
        """
        encoding = self._encoding(text)
        inside: list[bool] = []
        waiting = iter([*spans, (len(text) + 1, len(text) + 1)])
        low, high = next(waiting)
        for start, _ in encoding.offsets:
            while start >= high:
                low, high = next(waiting)
            inside.append(start >= low)
        begin = self._begin(encoding.ids)
        return begin + encoding.ids, [False] * len(begin) + inside

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids`` (any iterable of ints, a 1-D tensor too); ids that are no token give nothing."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    # --- chats ---

    def _chat(self) -> Template:
        if self._template is None:
            raise ValueError(
                "the checkpoint has no chat template, so messages cannot be written as text: load it "
                f"with template= ({self._suggestion()}), or use plain text"
            )
        return self._template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        fold_system: bool = False,
        **extra: Any,
    ) -> str:
        """``messages`` ({"role", "content"} dicts) as the chat template writes them; ``extra`` goes to the template.

        ``fold_system=True`` puts system texts in front of the next user turn, for templates that refuse the role.
        Raises ValueError without a template, or with the template's own message when it refuses.
        """
        template = self._chat()
        return template.render(fold(messages) if fold_system else messages, add_generation_prompt, tools, **extra)

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        """The ids of ``messages`` and the generation prompt; ``how`` as in ``render``."""
        return self.encode(self.render(messages, add_generation_prompt=True, **how))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fold_system: bool = False,
        **extra: Any,
    ) -> tuple[list[int], list[bool]]:
        """The ids of a whole conversation, and for each whether it belongs to an answer (its end token included)."""
        template = self._chat()
        return self.encode_spans(*template.answers(fold(messages) if fold_system else messages, tools, **extra))

    def has_control_token(self, value: Any) -> bool:
        """Whether a control token is spelled out in ``value``: a text, or lists and dicts of texts."""
        if isinstance(value, (list, tuple, Mapping)):
            return any(map(self.has_control_token, value.values() if isinstance(value, Mapping) else value))
        return isinstance(value, str) and self._any_control.search(value) is not None

    # --- files ---

    @property
    def replaced(self) -> bool:
        """Whether this is not the checkpoint's own: ``template=`` chose another chat template, or tokens were added."""
        return bool(self.added) or self.template != self._templates.get("default")

    def save(self, folder: str | Path) -> None:
        """Copies the checkpoint's text files to ``folder``, byte for byte; a template chosen by ``template=`` is added.

        That one is written as ``chat_template.jinja``, which wins over any other when the folder is read again.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in [*(self.folder / name for name in FILES), *(self.folder / TEMPLATES_FOLDER).glob("*.jinja")]:
            if path.is_file():
                _write(folder / path.relative_to(self.folder), path.read_bytes())
        if self.template != self._templates.get("default") and self.template is not None:
            _write(folder / "chat_template.jinja", self.template.encode("utf-8"))


class Stream:
    """Text from ids that come one by one, in whole characters: the pieces joined are the text of all the ids.

    A token may hold part of a character, or a space that shows only behind another token; so each step decodes a short
    window, from the last tokens that gave text, and gives what is new once it no longer ends in a broken character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self._window: list[int] = []  # [:_given] have given their text, the rest not yet
        self._given = 0

    def put(self, *ids: int) -> str:
        """The text that ``ids`` complete, often one token's, sometimes ""."""
        self._window += ids
        return self._take(final=False)

    def end(self) -> str:
        """What is left when no more ids come, a broken character included."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        before = self.tokenizer.decode(self._window[: self._given], self.skip_special)
        after = self.tokenizer.decode(self._window, self.skip_special)
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return after[len(before) :]
