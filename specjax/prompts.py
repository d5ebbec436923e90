"""What to decode: prompts from the config, a JSONL file or standard input."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from specjax.errors import UserError
from specjax.models import chat, tokenizer


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
    text = sys.stdin.read() if config.prompt == "-" else config.prompt
    if not (text or "").strip():
      raise UserError('the prompt is empty: --config.prompt="your text"')
    return [Prompt("prompt", "", (), (text,), None)]
  lines = _lines(path)
  rows = [
    _row(line, f"{path}, line {i}", str(i))
    for i, line in enumerate(lines, 1)
    if line.strip()
  ]
  if not rows:
    raise UserError(f"{path} holds no prompts")
  return rows[:limit] if limit else rows


def _lines(path):
  try:
    text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
  except OSError as e:
    raise UserError(f"cannot read prompts from {path}: {e.strerror}") from e
  except UnicodeDecodeError as e:
    raise UserError(f"{path} is not UTF-8 text: {e}") from e
  return text.split("\n")  # not splitlines: JSON may hold a raw U+2028


def _row(line, where, number):
  try:
    row = json.loads(line)
  except ValueError as e:
    raise UserError(f"{where}: not JSON: {e}") from e
  forms = [k for k in ("prompt", "turns", "messages") if k in row]
  if not isinstance(row, dict) or len(forms) != 1:
    raise UserError(f'{where}: needs one of "prompt", "turns" or "messages"')
  history, turns = _turns(row, forms[0], where)
  if not turns or not all(isinstance(t, str) for t in turns):
    raise UserError(f"{where}: {forms[0]!r} must hold text")
  if not all(turn.strip() for turn in turns):
    raise UserError(f"{where}: the prompt is empty")
  seed = row.get("seed")
  if not (seed is None or (isinstance(seed, int) and 0 <= seed < 2**32)):
    raise UserError(f"{where}: seed must be a whole number in 0..2^32 - 1")
  return Prompt(
    id=str(row.get("id", row.get("question_id", number))),
    kind=str(row.get("kind", row.get("category", ""))),
    history=tuple(history),
    turns=tuple(turns),
    seed=seed,
  )


def _turns(row, form, where):
  """(messages before, the user's turns) of a parsed row."""
  history = []
  if "system" in row:
    history.append({"role": "system", "content": row["system"]})
  value = row[form]
  if form == "prompt":
    return history, [value]
  if not isinstance(value, list):
    raise UserError(f"{where}: {form!r} must be a list")
  if form == "turns":
    return history, value
  *before, last = value or [{}]
  if not isinstance(last, dict) or last.get("role") != "user":
    raise UserError(f"{where}: the last message must be a user's")
  return [*history, *before], [last.get("content")]


def encode(tok, messages, *, as_chat):
  """Return the ids that the model is to continue.

  With `as_chat` the tokenizer's chat template is rendered; without it the
  texts are joined by blank lines and encoded as they stand.
  """
  if as_chat:
    return tokenizer.encode(tok, chat.render(tok, messages), special=False)
  return tokenizer.encode(tok, "\n\n".join(m["content"] for m in messages))
