"""Messages as templates are given them, and the templates of our own: what of chats needs no jinja2, whose import takes
a fifth of lorarun's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# Short templates of our own for base checkpoints that have none: the text, and the control tokens that it needs.
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "{%- endif %}\n",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": (
        "{{- bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
        "    {{- message['content'] | trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
        "{%- endif %}\n",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma": (
        "{{- bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {%- if message['role'] not in ['user', 'assistant'] %}\n"
        "        {{- raise_exception('the gemma template has no role ' + message['role']) }}\n"
        "    {%- endif %}\n"
        "    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}\n"
        "    {{- message['content'] | trim + '<end_of_turn>\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<start_of_turn>model\\n' }}\n"
        "{%- endif %}\n",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
}


def plain(value: Any) -> Any:
    """A copy of ``value`` made of plain JSON types only, for a template must not be handed objects with methods."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise ValueError(f"a message may hold text, numbers, lists and dicts, got a {type(value).__name__}")


def check_messages(messages: Any) -> list[Message]:
    """``messages`` as fresh plain dicts, keys whose value is None left out (as transformers does).

    Raises ValueError for what is not a list of {"role", "content"}; "content" may lack where there are "tool_calls".
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a list of at least one {{'role', 'content'}} dict, got {messages!r:.60}")
    checked: list[Message] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} must be a {{'role', 'content'}} dict, got {message!r:.60}")
        kept = {str(key): plain(value) for key, value in message.items() if value is not None}
        content = kept.get("content", "" if "tool_calls" in kept else None)
        if not isinstance(kept.get("role"), str) or not isinstance(content, (str, list)):
            raise ValueError(
                f"message {number} must have a text 'role' and a 'content' that is text or a list of parts, "
                f"got { {key: type(value).__name__ for key, value in message.items()} }"
            )
        if kept.get("weight", 1) not in (0, 1):
            raise ValueError(f"message {number} must have weight 1 (learned) or 0 (not), got {kept['weight']!r:.60}")
        checked.append(kept)
    return checked


def fold(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Each system text put in front of the next user turn, with a blank line between, for templates without the role.

    Raises ValueError when a system message has no user turn behind it, or its content is not text.
    """
    folded: list[Message] = []
    waiting: list[str] = []
    for message in check_messages(list(messages)):
        if message["role"] == "system":
            if not isinstance(message["content"], str):
                raise ValueError("fold_system needs the system message's content as text, got a list of parts")
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            content = message["content"]
            if isinstance(content, str):
                content = "\n\n".join([*waiting, content])
            else:
                content = [{"type": "text", "text": "\n\n".join([*waiting, ""])}, *content]
            folded.append({**message, "content": content})
            waiting = []
        else:
            folded.append(message)
    if waiting:
        raise ValueError("fold_system found no user message behind the system message to fold it into")
    return folded
