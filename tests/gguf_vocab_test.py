"""A SentencePiece vocabulary in a GGUF cuts text as SentencePiece does."""

import random

import pytest

from specjax.models import tokenizer

PIECES = ["▁", *"abcdeé", "ab", "abc", "▁a", "▁ab", "bc", "de", "cde", "▁de"]
PIECES += ["bcd", "dé", "ea", "▁▁"]
FIRST = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
LAST = ["<end_of_turn>", "   "]
SCORE = {piece: -i for i, piece in enumerate(reversed(PIECES))}


def fields(**changes):
  tokens = [*FIRST, *PIECES, *LAST]
  kinds = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [3, 4]
  values = {
    "model": "llama",
    "tokens": tokens,
    "scores": [SCORE.get(token, 0.0) for token in tokens],
    "token_type": kinds,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
  }
  return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items()}


def slow(text):
  """Merge the neighbours whose token has the best score, the leftmost first."""
  parts = list(text.replace(" ", "▁"))
  while True:
    pairs = [a + b for a, b in zip(parts, parts[1:], strict=False)]
    known = [(-SCORE[x], i) for i, x in enumerate(pairs) if x in SCORE]
    if not known:
      break
    _, i = min(known)
    parts[i : i + 2] = [pairs[i]]
  found = []
  for part in parts:
    known = part in SCORE
    found += [part] if known else [f"<0x{b:02X}>" for b in part.encode()]
  return found


def pieces(tok, text):
  return [tok.backend.id_to_token(i) for i in tokenizer.encode(tok, text)]


def test_texts_are_cut_as_by_scores():
  """Random texts, with characters that only bytes can say."""
  rng, tok = random.Random(0), tokenizer.from_gguf(fields())
  for n in range(300):
    text = "".join(rng.choice("abcdeé ü\n猫") for _ in range(n % 23 + 1))
    if "   " in text:
      continue
    got = pieces(tok, text)
    assert got == ["<s>", *slow(f" {text}")], text
    ids = tokenizer.encode(tok, text)
    assert tokenizer.decode(tok, ids) == text
    stream = tokenizer.stream(tok)
    told = "".join(stream.step([i]) for i in ids) + stream.flush()
    assert told == text


def test_gemma_puts_no_space_in_front():
  tok = tokenizer.from_gguf(fields(add_space_prefix=False))
  assert pieces(tok, "de ab") == ["<s>", *slow("de ab")]
  assert tokenizer.decode(tok, tokenizer.encode(tok, " de")) == " de"


def test_special_tokens():
  """An end of a turn ends the text; spaces that are one token stay one."""
  tok = tokenizer.from_gguf(fields(add_space_prefix=False))
  assert pieces(tok, "a   b<end_of_turn>") == [
    *("<s>", "a", "   ", "b", "<end_of_turn>")
  ]
  ids = tokenizer.encode(tok, "a   b<end_of_turn>")
  assert tokenizer.decode(tok, ids) == "a   b"
  assert tok.stop_ids == (2, ids[-1])


@pytest.mark.parametrize("key, has", [(None, True), (False, False)])
def test_bos(key, has):
  """There unless a key says no."""
  changes = {} if key is None else dict(add_bos_token=key)
  tok = tokenizer.from_gguf(fields(**changes))
  assert tok.add_bos == has
  assert (pieces(tok, "ab")[0] == "<s>") == has
