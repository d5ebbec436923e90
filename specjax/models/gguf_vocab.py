"""The vocabulary of a GGUF file as a `tokenizers.Tokenizer`.

Two kinds: BPE over bytes, with its merges (GPT-2, Llama 3, Qwen), and BPE of
SentencePiece (Llama 2, Mistral, Gemma), which has a score for each token in
place of merges, writes spaces as U+2581, and falls back to bytes.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from specjax.errors import UserError

# The expressions of llama.cpp's llama-vocab.cpp, as tokenizer.json files write
# them: it drops the last |\s+ because it keeps what lies between matches.
GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


PRE_TOKENIZERS = {  # tokenizer.ggml.pre -> how BPE's words are cut
  "gpt-2": [_split(GPT2)],
  "llama-bpe": [_split(LLAMA3)],
  "qwen2": [_split(LLAMA3.replace("{1,3}", ""))],
  "smollm": [pre_tokenizers.Digits(individual_digits=True), _split(GPT2)],
}
_BYTES, _PIECES = "gpt2", "llama"  # values of tokenizer.ggml.model
_SPACE = "\u2581"


def begins(fields: Mapping[str, Any]) -> bool:
  """Whether texts begin with a BOS if no key of the file says so."""
  pieces = fields["tokenizer.ggml.model"] == _PIECES
  return pieces or fields["tokenizer.ggml.pre"] == "llama-bpe"


def backend(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Make it from GGUF metadata (key -> Python value or list).

  Raises:
    UserError: a key is missing, or its value is not known or does not fit.
  """
  _require(fields, "model", (_BYTES, _PIECES))
  pieces = fields["tokenizer.ggml.model"] == _PIECES
  if not pieces:
    _require(fields, "pre", PRE_TOKENIZERS)
  for key in ("tokens", "scores" if pieces else "merges"):
    _require(fields, key)
  tokens = fields["tokenizer.ggml.tokens"]
  vocab = {token: i for i, token in enumerate(tokens)}
  if len(vocab) < len(tokens):
    raise UserError("tokenizer.ggml.tokens names a token twice; convert again")
  return (_of_pieces if pieces else _of_bytes)(fields, vocab)


def _require(fields, key, known=None):
  folder = "or use the model's folder with its tokenizer.json"
  if (value := fields.get(f"tokenizer.ggml.{key}")) is None:
    raise UserError(
      f"the GGUF has no tokenizer.ggml.{key}; convert it again, {folder}"
    )
  if known and value not in known:
    raise UserError(
      f"tokenizer.ggml.{key} is {value!r}, this reads {', '.join(known)}; "
      f"take another GGUF, {folder}"
    )


def _of_bytes(fields, vocab):
  pre = fields["tokenizer.ggml.pre"]
  merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"]]
  whole = pre == "llama-bpe"  # it has words that no merges reach
  try:
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=whole)
  except Exception as error:  # the library raises nothing more precise
    raise UserError(f"tokenizer.ggml.merges does not fit: {error}") from None
  found = byte_backend(bpe, PRE_TOKENIZERS[pre])
  if pre == "qwen2":  # Qwen's own tokenizer.json does this, llama.cpp does not
    found.normalizer = normalizers.NFC()
  return found


def byte_backend(bpe: models.BPE, cuts: list) -> tokenizers.Tokenizer:
  """A tokenizer over bytes, written as GPT-2's letters."""
  found = tokenizers.Tokenizer(bpe)
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  found.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
  found.decoder = decoders.ByteLevel()
  return found


def _of_pieces(fields, vocab):
  """As tokenizer.json files of these models have it.

  A space is put in front of a text, and of what follows a control token, unless
  add_space_prefix is false (Gemma).
  """
  scores = fields["tokenizer.ggml.scores"]
  if len(scores) != len(vocab):
    raise UserError("tokenizer.ggml.scores is not one a token; convert again")
  unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
  names = fields["tokenizer.ggml.tokens"]
  unknown = names[unknown] if unknown in range(len(names)) else None
  found = tokenizers.Tokenizer(
    models.BPE(
      vocab=vocab,
      merges=_merges(vocab, scores),
      unk_token=unknown,
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
  spaces = normalizers.Replace(" ", _SPACE)
  before = [normalizers.Prepend(_SPACE)] if prefix else []
  found.normalizer = normalizers.Sequence([*before, spaces])
  steps = [
    decoders.Replace(_SPACE, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if prefix:
    steps.append(decoders.Strip(" ", 1, 0))
  found.decoder = decoders.Sequence(steps)
  return found


def _merges(vocab, scores):
  """Pairs of tokens that are a token together, the best score first.

  SentencePiece merges the pair whose result has the highest score; among the
  pairs that give one token the longer left part comes first.
  """
  found = []
  for token, i in vocab.items():
    for at in range(len(token) - 1, 0, -1):
      pair = token[:at], token[at:]
      if pair[0] in vocab and pair[1] in vocab:
        found.append((-scores[i], pair))
  found.sort(key=lambda x: x[0])  # stable
  return [pair for _, pair in found]
