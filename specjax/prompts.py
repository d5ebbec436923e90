"""What to decode: prompts from the config, a JSONL file or standard input."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from specjax.errors import UserError
from specjax.models import chat, tokenizer

_FORMS = ("prompt", "turns", "messages")


class Prompt(NamedTuple):
  """A conversation to play: `history`, then each turn with its answer."""

  id: str
  kind: str  # "" when the row does not say
  history: tuple[dict, ...]  # messages before the first turn, system included
  turns: tuple[str, ...]  # the user's, at least one
  seed: int | None  # None: the config's


def read(config):
  """Return the prompts that a config asks for.

  `config.prompts.path` names a JSONL file ("-": standard input) and wins over
  `config.prompt`, one text ("-": all of standard input). A JSONL row has one
  of "prompt" (text), "turns" (the user's texts) or "messages" (role and
  content, the last one a user's), and may have "system", "id" or
  "question_id", "kind" or "category", and "seed". Other keys are ignored.

  Raises:
    UserError: a file that cannot be read, a malformed row or an empty prompt,
      each with its line.
  """
  path, limit = config.prompts.path, config.prompts.limit
  if not path:
    # a shell's echo ends the text with a newline that is not meant
    read = lambda: _contents("-").removesuffix("\n")
    asked = read() if config.prompt == "-" else config.prompt
    if not asked.strip():
      raise UserError('the prompt is empty: type --config.prompt="your text"')
    return [Prompt("prompt", "", (), (text(asked, "the prompt"),), None)]
  return from_file(path, limit)


def from_file(path, limit=0):
  """Return the first `limit` prompts of a JSONL file, 0 for all; see `read`."""
  found = [parse(*row) for row in rows(path)]
  if not found:
    raise UserError(f"{_name(path)} holds no prompts")
  return found[:limit] if limit else found


def rows(path):
  """Yield (row, where it stands, its number) of a JSONL file, "-" for stdin.

  Raises:
    UserError: the file cannot be read, or a line is not JSON.
  """
  # not splitlines: JSON may hold a raw U+2028
  for i, line in enumerate(_contents(path).split("\n"), 1):
    if line.strip():
      where = f"{_name(path)}, line {i}"
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: not JSON: {e}") from e
      yield row, where, str(i)


def _name(path):
  return "standard input" if path == "-" else path


def _contents(path):
  """The text of a file, or of standard input: UTF-8 whatever the locale."""
  try:
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    return data.decode("utf-8-sig")  # Windows' editors begin with a mark
  except OSError as e:
    raise UserError(f"cannot read prompts from {path}: {e.strerror}") from e
  except UnicodeDecodeError as e:
    raise UserError(
      f"{_name(path)} is not UTF-8 text: {e.reason} at byte {e.start}"
    ) from e


def parse(row, where, number):
  """Return the `Prompt` of a JSONL row; see `read`."""
  forms = [k for k in _FORMS if k in row] if isinstance(row, dict) else []
  if len(forms) != 1:
    raise UserError(f'{where}: needs one of "prompt", "turns" or "messages"')
  history, turns = _turns(row, forms[0], where)
  seed = row.get("seed")
  if seed is not None and (type(seed) is not int or not 0 <= seed < 2**32):
    raise UserError(f"{where}: seed must be a whole number in 0..2^32 - 1")
  return Prompt(
    id=str(row.get("id", row.get("question_id", number))),
    kind=str(row.get("kind", row.get("category", ""))),
    history=history,
    turns=tuple(text(turn, f"{where}: {forms[0]!r}") for turn in turns),
    seed=seed,
  )


def _turns(row, form, where):
  """(messages before, the user's turns) of a parsed row."""
  value = [row[form]] if form == "prompt" else row[form]
  if not isinstance(value, list) or not value:
    raise UserError(f"{where}: {form!r} must be a list that is not empty")
  before, turns = [], value
  if form == "messages":
    *before, last = [_message(message, where) for message in value]
    if last["role"] != "user":
      raise UserError(f"{where}: the last message must be a user's")
    turns = [last["content"]]
  if "system" in row:
    before.insert(0, {"role": "system", "content": row["system"]})
    text(row["system"], f'{where}: "system"', may_be_empty=True)
  return tuple(before), turns


def _message(message, where):
  """A row's message without whatever else it holds."""
  role = message.get("role") if isinstance(message, dict) else None
  if role not in chat.ROLES:
    roles = ", ".join(chat.ROLES)
    raise UserError(f"{where}: a message needs a role out of {roles}")
  content = text(
    message.get("content"), f"{where}: a content", may_be_empty=True
  )
  return {"role": role, "content": content}


def text(value, what, *, may_be_empty=False):
  """Return `value`; raise UserError unless it is text that has UTF-8."""
  if not isinstance(value, str):
    raise UserError(f"{what} must be text, got {json.dumps(value)[:40]}")
  if not may_be_empty and not value.strip():
    raise UserError(f"{what} is empty")
  try:
    value.encode()
  except UnicodeEncodeError as e:  # half of a surrogate pair
    raise UserError(f"{what} holds what is no character: {e.reason}") from e
  return value


def encode(tok, messages, *, as_chat):
  """Return the ids that the model is to continue.

  With `as_chat` the tokenizer's chat template is rendered; without it the
  texts are joined by blank lines and encoded as they stand.
  """
  if as_chat:
    return tokenizer.encode(tok, chat.render(tok, messages), special=False)
  return tokenizer.encode(tok, "\n\n".join(m["content"] for m in messages))
