"""Chat templates: messages become text, and the answers in that text are found while it is being written.

A checkpoint brings its own jinja2 template, so the text can be exactly what the model was tuned on. The usual way to
train on answers only is to look for marker strings ("<|im_start|>assistant") in the result. That fails silently when a
marker is spelled differently in context, and a user who types the marker is mistaken for the model. Here the template
itself is asked: every ``for`` loop of its syntax tree gets a hidden call at the top of its body, which writes a random,
invisible mark when the loop variable is one of the messages. The marks say which message wrote which stretch of text;
stripped of them the text must equal the plain render, or they are not believed. What a generation prompt would already
contain is then taken off the front of an assistant's stretch. Where a template names its answers itself, with
``{% generation %}``, that is obeyed to the letter.

The price is a few renders per conversation (four, most often). A template that does not loop over its
messages is still served if its renders of the first i messages are prefixes of each other; otherwise it is refused.

A template is somebody else's program. It runs in jinja2's immutable sandbox, and its loops, its output and its
repetition operators are bounded. Memory is not otherwise accounted for.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from os.path import commonprefix
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

from lorarun.messages import Message, check_messages, plain

MAX_CHARACTERS = 2**24  # of one rendered conversation
MAX_BITS = 2**13  # of a product of whole numbers
MAX_ITERATIONS = 10**5  # of all the loops of one render together

Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


# --- the sandbox -----------------------------------------------------------------------------------------------------


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, with ``*`` and ``**`` kept from making something enormous out of something small."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 32):
            raise SecurityError("a power in the template is too large")
        for some, times in ((left, right), (right, left)):
            if isinstance(some, (str, list, tuple)) and isinstance(times, int) and len(some) * times > MAX_CHARACTERS:
                raise SecurityError(f"the template repeats something beyond {MAX_CHARACTERS:,} items")
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "*" and whole and left.bit_length() + right.bit_length() > MAX_BITS:
            raise SecurityError("the template multiplies numbers without end")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **how: Any) -> Any:
        mark = context.parent.get("_mark")  # macros may call each other without a loop
        if isinstance(mark, _Marks) and called is not mark:
            mark.count()
        return super().call(context, called, *args, **how)


def _mark_call(kind: str, loop: int, target: nodes.Expr) -> nodes.Output:
    call = nodes.Call(nodes.Name("_mark", "load"), [nodes.Const(kind), nodes.Const(loop), target], [], None, None)
    return nodes.Output([call])


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: the template's author says that this is the model's own text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        scope = nodes.Scope(body, lineno=line)  # what is set inside stays inside, as in transformers
        return [_mark_call("<", 0, nodes.Const(None)), scope, _mark_call(">", 0, nodes.Const(None))]


class _MarkLoops(NodeTransformer):
    """Puts a mark at the top of every loop's body, and one behind the loop."""

    loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.loops += 1
        loop = self.loops
        self.generic_visit(node)
        item = node.target
        target = nodes.Name(item.name, "load") if isinstance(item, nodes.Name) else nodes.Const(None)
        node.body.insert(0, _mark_call("+", loop, target))
        return [node, _mark_call("-", loop, nodes.Const(None))]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter writes <, > and & as escapes, which models never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=32)
def _compile(text: str) -> jinja2.Template:
    """The template ``text`` with marks in its loops, ready to run; the whitespace rules are transformers'."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    for slow in ("lipsum", "cycler", "joiner"):  # jinja's own; no chat needs them, and the first writes without end
        sandbox.globals.pop(slow, None)
    for slow in ("wordwrap", "urlize"):
        sandbox.filters.pop(slow, None)
    try:
        tree = _MarkLoops().visit(sandbox.parse(text))
        tree.set_environment(sandbox)
        return jinja2.Template.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid jinja2: line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError, ValueError, MemoryError, OverflowError) as error:  # python's own limits
        raise ValueError(f"the chat template cannot be compiled: {error}") from error


class _Marks:
    """The hidden function that a running template calls: counts iterations, and writes marks if it has a nonce."""

    def __init__(self, messages: Sequence[Message], nonce: str = "") -> None:
        self.order = {id(message): i for i, message in enumerate(messages)}
        self.nonce = nonce
        self.calls = 0
        self.reached: int | None = None

    def count(self) -> None:
        self.calls += 1
        if self.calls > MAX_ITERATIONS:
            raise SecurityError(f"the template loops or calls more than {MAX_ITERATIONS:,} times")

    def __call__(self, kind: str, loop: int, item: Any) -> str:
        self.count()
        index = self.order.get(id(item), -1)
        if index >= 0:
            self.reached = index
        return f"\x02{self.nonce}{kind}{loop}:{index}\x03" if self.nonce else ""


# --- the template ----------------------------------------------------------------------------------------------------


class Template:
    """A chat template's text and the special tokens (``bos_token``, ``eos_token``, …) that it may name."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        self.text = text
        self.tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The conversation as text. ``extra`` goes to the template as it is (``enable_thinking=False``, …).

        Raises ValueError with the template's own message and the roles when the template refuses.
        """
        return _Conversation(self, check_messages(messages), tools, extra).render(prompt=add_generation_prompt)

    def answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> tuple[str, list[Span]]:
        """The conversation as text, and the [start, end) character spans in it that the model has to learn.

        A span begins where the generation prompt ends and reaches through the end-of-turn token; white space behind
        that is left out. Every message of the role "assistant" gives one, unless the template has generation tags;
        those with ``"weight": 0`` give none.
        """
        return _Conversation(self, check_messages(messages), tools, extra).answers()


class _Conversation:
    """One conversation being rendered by one template, several times with the same clock and arguments."""

    def __init__(self, template: Template, messages: list[Message], tools: Any, extra: dict[str, Any]) -> None:
        self.template = template
        self.learned = [bool(message.pop("weight", 1)) for message in messages]  # no template is to write it
        self.messages = messages
        self.now = datetime.now()
        self.variables = {**template.tokens, "documents": None, "tools": plain(tools), **plain(extra)}

    def render(self, messages: list[Message] | None = None, prompt: bool = False, nonce: str = "") -> str:
        messages = self.messages if messages is None else messages
        mark = _Marks(messages, nonce)
        variables = {**self.variables, "messages": messages, "add_generation_prompt": prompt, "_mark": mark}
        pieces: list[str] = []
        room = MAX_CHARACTERS
        template = _compile(self.template.text)
        try:
            for piece in template.generate(variables, strftime_now=self.now.strftime):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise SecurityError(f"the text grows beyond {MAX_CHARACTERS:,} characters")
        except _FAILURES as error:
            roles = ", ".join(message["role"] for message in messages) or "no messages"
            at = "" if mark.reached is None else f", at message {mark.reached + 1} ({messages[mark.reached]['role']})"
            raise ValueError(f"the chat template refused a conversation ({roles}){at}: {error}") from error
        return "".join(pieces)

    def attempt(self, messages: list[Message], prompt: bool = False) -> str | None:
        try:
            return self.render(messages, prompt)
        except ValueError:
            return None

    def marked(self, messages: list[Message], text: str) -> tuple[dict[int, list[Span]], list[Span]] | None:
        """Which spans of ``text`` each message wrote, and those of generation tags; None if marks change the text."""
        nonce = secrets.token_hex(8)
        try:
            parts = re.split(f"\x02{nonce}([-+<>])(\\d+):(-?\\d+)\x03", self.render(messages, nonce=nonce))
        except ValueError:
            return None
        if "".join(parts[::4]) != text:
            return None
        written: dict[int, list[Span]] = {}
        tagged: list[Span] = []
        at = tag = 0
        running: tuple[int, int, int] | None = None  # the outermost loop over messages: its number, message, start
        for piece, kind, loop, index in zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=False):
            at += len(piece)
            if kind == "<":
                tag = at
            elif kind == ">":
                tagged.append((tag, at))
            elif running is None or running[0] == int(loop):
                if running is not None:
                    written.setdefault(running[1], []).append((running[2], at))
                running = (int(loop), int(index), at) if kind == "+" and int(index) >= 0 else None
        return written, tagged

    def answers(self) -> tuple[str, list[Span]]:
        text = self.render()
        found = self.marked(self.messages, text)
        if _GENERATION_TAG.search(self.template.text):
            if found is None:
                raise ValueError("this chat template changes the text of its {% generation %} tags after writing it")
            return text, [span for span in found[1] if span[0] < span[1] and not self.unwanted(span, found[0])]
        written = found[0] if found else {}
        known: dict[str, tuple[str, ...]] = {}
        spans: list[Span] = []
        for i, message in enumerate(self.messages):
            if message["role"] != "assistant" or not self.learned[i]:
                continue
            stretches = [(start, end) for start, end in written.get(i, []) if text[start:end].strip()]
            if not stretches and i in written and not message.get("content"):
                continue  # the template writes nothing for it, and there was nothing to write
            start, end = self.trim(i, text, stretches[0], known) if len(stretches) == 1 else self.between(i, text)
            end = start + len(text[start:end].rstrip())
            if start < end:
                spans.append((start, end))
        return text, spans

    def unwanted(self, span: Span, written: dict[int, list[Span]]) -> bool:
        """Whether a generation tag's ``span`` lies in what a message of weight 0 wrote."""
        zero = [i for i, learned in enumerate(self.learned) if not learned]
        if any(i not in written for i in zero if self.messages[i]["role"] == "assistant"):
            raise ValueError("this chat template does not tell which message wrote what, so weight 0 cannot be obeyed")
        return any(low <= span[0] < high for i in zero for low, high in written.get(i, []))

    def trim(self, i: int, text: str, stretch: Span, known: dict[str, tuple[str, ...]]) -> Span:
        """What message i wrote, without what the generation prompt of the messages before it already contains.

        ``known`` keeps, for the role of the message before, the headers that were found, so that a long conversation
        costs no more renders than a short one.
        """
        start, end = stretch
        before = self.messages[i - 1]["role"] if i else ""
        for header in known.get(before, ()):
            if text.startswith(header, start, end):
                return start + len(header), end
        opening = self.attempt(self.messages[:i], prompt=True)
        if opening is not None and text.startswith(opening) and len(opening) <= end:
            known[before] = (text[start : len(opening)],)  # "" when the user's turn ends in the header
            return max(start, len(opening)), end
        # The start of the conversation is rendered differently when more follows (or refused): compare headers.
        prompt = self.generation_prompt(i, opening, text)
        if text.startswith(prompt, start, end):
            known[before] = (prompt,)
            return start + len(prompt), end
        # This answer's header is not the whole prompt (a prompt that opens a thought, say): it is as much of it as
        # stands before the content, whatever the content is.
        probe = secrets.token_hex(8)
        probed = [dict(message) for message in self.messages]
        probed[i]["content"] = probe
        other = self.render(probed)
        found = self.marked(probed, other)
        for low, high in found[0].get(i, []) if found else ():
            header = commonprefix([other[low:high].partition(probe)[0], prompt])
            if probe in other[low:high] and header.strip() and text.startswith(header, start, end):
                known[before] = (prompt, header)
                return start + len(header), end
        raise ValueError(
            f"message {i + 1} (assistant) is not written behind the template's generation prompt {prompt!r}, so where "
            "the answer begins cannot be told; put {% generation %} tags around answers in the template"
        )

    def generation_prompt(self, i: int, opening: str | None, text: str) -> str:
        closed = self.attempt(self.messages[:i]) if opening is not None else None
        if opening is None or closed is None or not opening.startswith(closed):
            opening, closed = self.render(prompt=True), text
        if not opening.startswith(closed):
            raise ValueError("add_generation_prompt changes more than the end of this chat template's text")
        return opening[len(closed) :]

    def between(self, i: int, text: str) -> Span:
        """Without marks: from the end of the prompt for answer i to the end of the conversation up to it."""
        opening = self.attempt(self.messages[:i], prompt=True)
        closing = self.attempt(self.messages[: i + 1])
        if opening is None or closing is None or not text.startswith(opening) or not text.startswith(closing):
            raise ValueError(
                f"which text belongs to message {i + 1} (assistant) cannot be told from this chat template; "
                "put {% generation %} tags around answers in the template"
            )
        return len(opening), max(len(opening), len(closing))
