"""Between text and token ids: the model's own tokenizer file and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...kernels import InputError
from .problems import Message

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
"""The template where none is given."""


class Text:
    """A tokenizer and a template.

    Attributes:
        template_source: what made prompts of messages, for the report.
        stops: ids that end an output.
    """

    def __init__(self, tokenizer: Path, template: Path | None = None, stops: Sequence[str] = ()) -> None:
        """Load.

        Args:
            tokenizer: a ``tokenizer.json``, or the folder that has one (a ``chat_template.jinja`` there is used, too).
            template: a Jinja chat template that is given ``messages`` and ``add_generation_prompt``.
            stops: tokens, as text, that end an output; default: the ``eos_token`` of the folder's tokenizer_config.json.

        Raises:
            InputError: the library is not there, a file cannot be read, or a stop is no token.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError("text needs the library tokenizers: pip install 'k3lab[eval]'") from None
        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(f"cannot read the tokenizer {file}: {str(error).splitlines()[0]}") from None
        beside = folder / "chat_template.jinja"
        chosen = template or (beside if tokenizer.is_dir() and beside.exists() else None)
        self.template_source = str(chosen) if chosen else "plain roles and contents"
        self._template = _template(_read(chosen) if chosen else PLAIN, chosen)
        words = list(stops) or _end_of_text(folder / "tokenizer_config.json")
        self.stops = frozenset(self._id(word) for word in words)

    def _id(self, word: str) -> int:
        found = self._tokenizer.token_to_id(word)
        if found is None:
            raise InputError(f"the stop {word!r} is no token of the tokenizer")
        return int(found)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt that asks for the assistant's answer.

        Raises:
            InputError: the template refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True)
        except TemplateError as error:
            raise InputError(f"the chat template {self.template_source} fails: {error}") from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an output, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'no text'}") from None


def _template(source: str, path: Path | None) -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        # a template comes with a checkpoint: it is text, not code that may reach this process
        return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    except TemplateError as error:
        raise InputError(f"{path} is no template: {error}") from None


def _end_of_text(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        found = json.loads(_read(path)).get("eos_token")
    except (ValueError, AttributeError):
        raise InputError(f"{path} is no tokenizer config") from None
    if isinstance(found, dict):
        found = found.get("content")
    return [found] if isinstance(found, str) else []
