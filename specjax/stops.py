"""Texts that end an answer, wherever tokens, rounds and chunks divide them.

The host looks for them between chunks of the loop. What decides is the token,
not the chunk: the first one with which the answer's text holds a stop text is
the last one kept, and the text is cut before it.
"""

from specjax.models import tokenizer


def first(tok, ids, texts, *, seen=0, minimum=0):
  """Return (tokens kept, the answer's text, which stop text), or None.

  Where one token completes several, the one that begins first is named; where
  these begin together, the longest.

  Args:
    tok: a `Tokenizer`; ids: an answer's token ids.
    texts: the stop texts.
    seen: with so many ids none was found, so only longer prefixes can end it.
    minimum: as many tokens, and what they complete, end nothing.
  """
  seen = max(seen, minimum)
  if not texts or len(ids) <= seen:
    return None
  behind = len(tokenizer.decode(tok, ids[:minimum])) if minimum else 0
  # each prefix: what a token completes, the next may undo (half a character)
  for count in range(seen + 1, len(ids) + 1):
    text = tokenizer.decode(tok, ids[:count])
    if found := _found(text, texts, behind):
      start, stop = found
      return count, text[:start], stop
  return None


def _found(text, texts, behind):
  """(where it starts, which) of the first stop text that ends > behind."""
  places = []
  for stop in texts:
    start = text.find(stop, max(0, behind - len(stop) + 1))
    if start >= 0:
      places.append((start, -len(stop), stop))
  if not places:
    return None
  start, _, stop = min(places)
  return start, stop


def held_back(text, texts):
  """How many characters at the end of `text` may begin a stop text."""
  most = max(map(len, texts), default=1) - 1
  for n in range(min(most, len(text)), 0, -1):
    if any(stop.startswith(text[-n:]) for stop in texts):
      return n
  return 0
