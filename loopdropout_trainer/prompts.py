"""The format of prompts: how a question or a conversation becomes the text that a model continues.

One object decides it for `chat`, for `serve` with both of its engines and for the example that they print. `Source` knows the
format of a training:

    tokenizer = source.load_tokenizer(chat_template)
    prompt_format = choose_prompt_format(tokenizer, source.prompt_template, source.is_chat, chat_template)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.data import FIELD
from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.limits import render_text


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEXT = "{prompt}"
"""Template of prompts that are the question alone."""

EXAMPLE_QUESTION = "What is 7 times 8?"


@dataclass(frozen=True)
class PromptFormat:
    """How a question or a conversation becomes a prompt.

    The same chat template renders it in every engine. For a text, it raises an error unless a conversation is one question.

    Attributes:
        tokenizer: Tokenizer of the model.
        text: Text with a {field} for the question, such as the `prompt_template` of the training. None: the tokenizer's chat
            template.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    text: str | None

    def __post_init__(self):
        if self.text is None and not self.tokenizer.chat_template:
            raise UserError("`chat_template` must be set, because the tokenizer has no chat template.")
        if self.text is not None and not FIELD.search(self.text):
            raise UserError(f"`prompt_template` must be a text with a {{field}} for the question, got {self.text!r}.")

    @property
    def chat_template(self) -> str:
        """Jinja template of a conversation. A text in it begins as the tokenizer begins texts, because chats do not."""
        if self.text is None:
            return self.tokenizer.get_chat_template()
        start = self.tokenizer.decode(self.tokenizer("")["input_ids"])
        return self._make_template(start)

    def _make_template(self, start: str) -> str:
        """Return the Jinja template of `text` after the beginning of a text."""
        fields = list(dict.fromkeys(FIELD.findall(self.text)))
        quoted = lambda text: json.dumps(text, ensure_ascii=False)
        if len(fields) > 1:
            reason = f"This model was trained on prompts with the fields {', '.join(fields)}, which one question cannot fill."
            return f"{{{{ raise_exception({quoted(f'{reason} {_WAYS}')}) }}}}"
        reason = f"This model was trained on prompts {short_repr(self.text)}, so `messages` must be one turn of the role user"
        roles = '", got the roles " ~ messages | map(attribute="role") | join(", ")'
        is_question = 'messages | length == 1 and messages[0].role == "user"'
        prompt = FIELD.sub('" ~ messages[0].content ~ "', quoted(start + self.text))
        return (
            f"{{% if {is_question} %}}{{{{ {prompt} }}}}"
            f"{{% else %}}{{{{ raise_exception({quoted(reason)} ~ {roles} ~ {quoted(f'. {_WAYS}')}) }}}}{{% endif %}}"
        )

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a conversation. A text does not have the tokens at the beginning, which `encode` adds.

        Args:
            messages: Turns with `role` and `content`, a text or a list of text parts as in OpenAI's protocol.

        Raises:
            UserError: If the format cannot express the conversation, or the chat template does not end.
        """
        from jinja2 import TemplateError

        if not messages:
            raise UserError("`messages` must have at least one turn.")
        template = self.chat_template if self.text is None else self._make_template("")
        turns = [{**turn, "content": _join_parts(turn.get("content"))} for turn in messages]
        try:
            return render_text(self.tokenizer, turns, chat_template=template, add_generation_prompt=True)
        except TemplateError as error:
            if self.text is not None:
                raise UserError(str(error)) from None
            raise UserError(f"The chat template cannot render `messages`: {error}") from None

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of the prompt of a conversation, as in the training."""
        return self.tokenizer(self.render(messages), add_special_tokens=self.text is not None)["input_ids"]

    @property
    def stop_strings(self) -> list[str]:
        """First label of the text, such as "Question:", with which a base model may continue after its answer."""
        return re.findall(r"\w+:", self.text or "")[:1]

    def describe(self, system_instruction: str | None = None) -> str:
        """Return two lines for the start of a command: the format and one rendered example, with the user's system turn."""
        name = "the tokenizer's chat template" if self.text is None else repr(self.text)
        if self.text == PLAIN_TEXT:
            name = "plain text"
        try:
            example = repr(self.render(make_turns(EXAMPLE_QUESTION, system_instruction)))
        except UserError as error:
            example = str(error)
        return f"Format of the prompts: {name}\nExample: {example}"


_WAYS = "Send the whole text as a raw prompt, or start with `--chat_template` for conversations."


def choose_prompt_format(
    tokenizer: PreTrainedTokenizerBase,
    trained_text: str | None = None,
    is_chat: bool | None = None,
    chat_template: str | None = None,
) -> PromptFormat:
    """Return the format of the prompts: the user's choice, else the training's, else the tokenizer's, else plain text.

    Args:
        tokenizer: Tokenizer of the model, with the user's chat template if there is one.
        trained_text: Text with a {field} that made the prompts of the training.
        is_chat: Whether the training's examples were conversations. None: unknown, as for a base model.
        chat_template: The user's choice of a chat template, which is set in `tokenizer`.
    """
    if chat_template is not None:
        return PromptFormat(tokenizer, None)
    if trained_text is not None:
        return PromptFormat(tokenizer, trained_text)
    if is_chat is False or not tokenizer.chat_template:
        return PromptFormat(tokenizer, PLAIN_TEXT)
    return PromptFormat(tokenizer, None)


def make_turns(question: str, system_instruction: str | None = None) -> list[dict[str, str]]:
    """Return the turns of a question, after a system turn if there is one."""
    turns = [{"role": "user", "content": question}]
    if system_instruction is not None:
        turns.insert(0, {"role": "system", "content": system_instruction})
    return turns


def _join_parts(content: Any) -> Any:
    """Return the text of a turn's content, which OpenAI's protocol also allows as a list of parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UserError(f"`content` must be a text or a list of text parts, got the part {short_repr(part)}.")
    return "\n".join(part["text"] for part in content)
