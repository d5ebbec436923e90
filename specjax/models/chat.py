"""Render a conversation into the text a chat model was trained on.

The template comes with the model (`tokenizer.Tokenizer.chat_template`) and is
a program in a file from the internet, so it runs in Jinja's sandbox. The
environment is that of `transformers.apply_chat_template`: same text out. Encode
the result with `special=False`: the template writes its own BOS.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from specjax.errors import UserError
from specjax.models import tokenizer

ROLES = ("system", "user", "assistant")


def render(
  tok: tokenizer.Tokenizer,
  messages: Sequence[Mapping[str, str]],
  *,
  add_generation_prompt: bool = True,
) -> str:
  """Return the text of a conversation, ready for `tokenizer.encode`.

  Some templates add messages of their own: SmolLM2's puts a default system
  message first when the conversation has none.

  Args:
    messages: [{"role": "system" | "user" | "assistant", "content": text}, ...]
    add_generation_prompt: end with the opening of the assistant's answer.

  Raises:
    UserError: no template, a bad message, or a template that refuses.
  """
  if tok.chat_template is None:
    raise UserError(
      "the model has no chat template; --config.chat=False decodes raw text"
    )
  _check(messages)
  # A token the model lacks stays undefined, which prints as nothing; None
  # would print as "None".
  named = {"bos_token": tok.bos, "eos_token": tok.eos}
  try:
    return _compile(tok.chat_template).render(
      messages=messages,
      tools=None,
      documents=None,
      add_generation_prompt=add_generation_prompt,
      **{name: text for name, text in named.items() if text is not None},
    )
  except Exception as error:  # the template's own: a program we did not write
    reason = " ".join(str(error).split()) or type(error).__name__
    raise UserError(
      f"the chat template failed: {reason}; --config.chat=False decodes "
      "raw text"
    ) from None


def _check(messages: Sequence[Mapping[str, str]]):
  if not messages:
    raise UserError("a conversation needs at least one message")
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
      raise UserError(
        f"message {i} is {message!r}, want a role out of {', '.join(ROLES)}"
      )
    if not isinstance(message.get("content"), str):
      raise UserError(
        f"message {i} ({message['role']}) needs a text as content, got "
        f"{message.get('content')!r}"
      )


class _Generation(jinja2.ext.Extension):
  """{% generation %} marks the assistant's words for training; no output."""

  tags = {"generation"}

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  return environment.from_string(template)


def _to_json(
  value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  """Replace Jinja's own filter, which escapes HTML."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise_exception(message):
  raise jinja2.TemplateError(message)


def _strftime_now(pattern):
  return datetime.datetime.now().strftime(pattern)
