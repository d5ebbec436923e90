"""Text to token ids and back, for every place a tokenizer can come from.

A `Tokenizer` is made by `from_folder` (Hugging Face layout), `from_gguf` (the
metadata of a GGUF file) or `byte_level` (random weights). All three end in one
`tokenizers.Tokenizer`, so `encode`, `decode` and `stream` have one code path.
Chat templates are carried here as text and rendered by `chat.py`.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, processors

from specjax.errors import UserError
from specjax.models import gguf_vocab


class Tokenizer(NamedTuple):
  """A tokenizer and what the rest of the repository asks about it.

  stop_ids is sorted and holds every token that ends an answer. For a folder it
  is the union of eos_token_id in generation_config.json and config.json and
  eos_token in tokenizer_config.json. For a GGUF it is the union of the eos,
  eot and eom ids and of the control tokens named in END_TOKENS.
  """

  backend: tokenizers.Tokenizer
  stop_ids: tuple[int, ...]
  bos: str | None  # text of the token, for chat templates
  eos: str | None
  add_bos: bool  # whether `encode` puts a BOS in front of raw text
  chat_template: str | None
  vocab_size: int  # largest known id + 1; the model's logits may be wider


def encode(tok: Tokenizer, text: str, *, special: bool = True) -> list[int]:
  """Return the ids of `text`; the names of special tokens become their ids.

  Args:
    special: put a BOS in front if the model wants one (`tok.add_bos`). False
      for the output of a chat template, which writes its own.

  Raises:
    UserError: the text holds a lone surrogate, which no encoding can carry.
  """
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise UserError(
      f"character {error.start} of the text is the lone surrogate "
      f"{text[error.start]!r}, which is not Unicode text; save it as UTF-8"
    ) from None
  return tok.backend.encode(text, add_special_tokens=special).ids


def decode(tok: Tokenizer, ids: Iterable[int], *, skip_special=True) -> str:
  """Return the text of `ids`; broken UTF-8 becomes U+FFFD, unknown ids ""."""
  ids = [int(i) for i in ids]
  return tok.backend.decode(ids, skip_special_tokens=skip_special)


def stream(tok: Tokenizer) -> "Stream":
  """Start decoding one row in pieces, never printing half a character."""
  return Stream(tok)


class Stream:
  """What `step` returns, then `flush`, joins to `decode` of all ids."""

  def __init__(self, tok: Tokenizer):
    self._tok = tok
    self._decoder = decoders.DecodeStream(skip_special_tokens=True)
    self._ids = []
    self._printed = 0  # characters
    self._has_bytes = False  # met a byte-fallback token, as in Llama 2

  def step(self, ids: Iterable[int]) -> str:
    """Return the text that became complete with these ids, perhaps ""."""
    new = [int(i) for i in ids]
    self._ids += new
    self._has_bytes |= any(map(self._is_byte, new))
    if self._has_bytes:
      # A run of these is decoded as a whole, so it is held back to its end.
      return "" if self._is_byte(self._ids[-1]) else self.flush()
    # One id at a time: a chunk holds back only its last, unfinished character.
    pieces = [self._decoder.step(self._tok.backend, i) for i in new]
    text = "".join(piece for piece in pieces if piece)
    self._printed += len(text)
    return text

  def _is_byte(self, i: int) -> bool:
    name = self._tok.backend.id_to_token(i)
    return bool(re.fullmatch(r"<0x[0-9A-F]{2}>", name or ""))

  def flush(self) -> str:
    """Return what is held back when no more ids come: broken characters."""
    text = decode(self._tok, self._ids)[self._printed :]
    self._printed += len(text)
    return text


BYTE_END = 256  # the id that ends a text


def byte_level(vocab_size: int) -> Tokenizer:
  """Make the tokenizer of a model with random weights.

  Ids 0..255 are the bytes of UTF-8, 256 ends the text, and every id above
  decodes to the visible text "⟨id⟩", which nothing encodes to.

  Raises:
    UserError: vocab_size is too small for the bytes and the end token.
  """
  if vocab_size <= BYTE_END:
    raise UserError(f"bytes need vocab_size > {BYTE_END}, got {vocab_size}")
  # GPT-2's letters: printable Latin-1 is itself, the n-th other chr(256 + n).
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = iter(range(256, 512))
  bytes_ = [chr(b if b in printable else next(others)) for b in range(256)]
  names = ["<|end|>", *(f"⟨{i}⟩" for i in range(BYTE_END + 1, vocab_size))]
  vocab = {name: i for i, name in enumerate(bytes_ + names)}
  backend = gguf_vocab.byte_backend(models.BPE(vocab=vocab, merges=[]), cuts=[])
  backend.add_special_tokens(["<|end|>"])
  return _finish(backend, {BYTE_END}, bos=None, eos="<|end|>", template=None)


# llama.cpp ends generation at these even if no key says so.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>")
END_TOKENS += ("<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type


def from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
  """Make a tokenizer from GGUF metadata (key -> Python value or list).

  Raises:
    UserError: a key is missing, or the tokenizer is of a kind not known here.
  """
  backend = gguf_vocab.backend(fields)
  tokens = fields["tokenizer.ggml.tokens"]
  types = fields.get("tokenizer.ggml.token_type", [])
  names = ("bos", "eos", "eot", "eom")
  named = {k: fields.get(f"tokenizer.ggml.{k}_token_id") for k in names}
  # llama.cpp too ignores ids that the vocabulary does not have.
  named = {k: i for k, i in named.items() if i in range(len(tokens))}
  control = {i for i, t in enumerate(types) if t in (UNKNOWN, CONTROL)}
  stop_ids = {i for k, i in named.items() if k != "bos"}
  stop_ids |= {i for i in control if tokens[i] in END_TOKENS}
  control |= {*named.values()}
  defined = {i for i, t in enumerate(types) if t == USER_DEFINED} - control
  added = lambda i: tokenizers.AddedToken(tokens[i], normalized=False)
  backend.add_tokens([added(i) for i in sorted(defined)])
  backend.add_special_tokens([added(i) for i in sorted(control)])
  text = {k: tokens[i] for k, i in named.items()}
  # Llama 3 and SentencePiece have a BOS where no key says so (llama.cpp).
  has = gguf_vocab.begins(fields)
  if fields.get("tokenizer.ggml.add_bos_token", has) and "bos" in named:
    backend.post_processor = processors.TemplateProcessing(
      single=[text["bos"], "$A"],
      special_tokens=[(text["bos"], named["bos"])],
    )
  template = fields.get("tokenizer.chat_template")
  return _finish(backend, stop_ids, text.get("bos"), text.get("eos"), template)


def from_folder(path: str | pathlib.Path) -> Tokenizer:
  """Make a tokenizer from a folder in Hugging Face layout.

  Only tokenizer.json must exist. chat_template.jinja wins over the template in
  tokenizer_config.json. Raw text gets the special tokens that tokenizer.json's
  post-processor adds; add_bos_token has no say then, as in transformers.

  Raises:
    UserError: no tokenizer.json, or a file that cannot be read.
  """
  folder = pathlib.Path(path)
  backend = _folder_backend(folder)
  config = _read_json(folder / "tokenizer_config.json")
  bos, eos = (_token_text(backend, config, k) for k in ("bos", "eos"))
  stop_ids = set() if eos is None else {backend.token_to_id(eos)}
  for name in ("generation_config.json", "config.json"):
    ids = _read_json(folder / name).get("eos_token_id")
    stop_ids |= set(ids if isinstance(ids, list) else [ids]) - {None}
  template = config.get("chat_template")
  if isinstance(template, list):
    template = {t["name"]: t["template"] for t in template}.get("default")
  if (file := folder / "chat_template.jinja").is_file():
    template = file.read_text(encoding="utf-8")
  return _finish(backend, stop_ids, bos, eos, template)


def _folder_backend(folder: pathlib.Path) -> tokenizers.Tokenizer:
  file = folder / "tokenizer.json"
  if not file.is_file():
    raise UserError(
      f"no tokenizer.json in {folder}; transformers makes one from an older "
      "tokenizer: AutoTokenizer.from_pretrained(d).save_pretrained(d)"
    )
  try:
    backend = tokenizers.Tokenizer.from_file(str(file))
  except Exception as error:  # the library raises nothing more precise
    raise UserError(f"cannot read {file}: {error}") from None
  # Saved by a training run, these can be on and cut prompts.
  backend.no_truncation()
  backend.no_padding()
  return backend


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return {}
  except (ValueError, OSError) as error:
    raise UserError(f"cannot read {file}: {error}") from None
  if not isinstance(value, dict):
    raise UserError(f"cannot read {file}: it holds no JSON object")
  return value


def _token_text(backend, config: Mapping[str, Any], name: str) -> str | None:
  token = config.get(f"{name}_token")
  token = token["content"] if isinstance(token, dict) else token
  if token is not None and backend.token_to_id(token) is None:
    raise UserError(f"{name}_token {token!r} is not in tokenizer.json")
  return token


def _finish(backend, stop_ids, bos, eos, template) -> Tokenizer:
  bos_id = None if bos is None else backend.token_to_id(bos)
  return Tokenizer(
    backend=backend,
    stop_ids=tuple(sorted(stop_ids)),
    bos=bos,
    eos=eos,
    add_bos=bos_id is not None and backend.encode("").ids[:1] == [bos_id],
    chat_template=template,
    vocab_size=1 + max(backend.get_vocab().values()),
  )
