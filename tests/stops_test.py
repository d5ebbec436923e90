"""Stop texts end an answer at the same token in both decoders."""

import functools
import logging

import jax
import numpy as np
import pytest
from play_test import (
  PLAIN,
  SPECULATIVE,
  _answers,
  _config,
  _draft,
  _model,
  _todo,
)
from play_test import _play as played

from specjax import answers, play, screen, settings, stops
from specjax.errors import UserError
from specjax.models import tokenizer

TOK = tokenizer.byte_level(300)


def _ids(text):
  return list(text.encode())


@pytest.mark.parametrize(
  "text, texts, want",
  [
    ("abcdef", ("cd",), (4, "ab", "cd")),
    ("abcdef", ("x", "ef", "de"), (5, "abc", "de")),  # completed first
    ("abcdef", ("bcd", "cd"), (4, "a", "bcd")),  # by one token: the earlier
    ("abcabc", ("c", "abc"), (3, "", "abc")),
    ("aéb", ("é",), (3, "a", "é")),  # two bytes, complete with the second
    ("abc", ("abcd",), None),
    ("abc", (), None),
    ("aab", ("ab",), (3, "a", "ab")),
  ],
)
def test_first(text, texts, want):
  """B30: whatever was looked at before, the first completing token wins."""
  ids = _ids(text)
  assert stops.first(TOK, ids, texts) == want
  for seen in range(len(ids)):
    found = stops.first(TOK, ids, texts, seen=seen)
    assert found == (want if want and seen < want[0] else None) or (
      want and seen >= want[0]
    )


def test_a_minimum_of_tokens():
  """What the first tokens complete ends nothing, now or later."""
  ids = _ids("a.b.c.d")
  ends = [stops.first(TOK, ids, (".",), minimum=n) for n in range(7)]
  cuts = ["a", "a", "a.b", "a.b", "a.b.c", "a.b.c"]
  counts = [2, 2, 4, 4, 6, 6]
  want = [(n, text, ".") for n, text in zip(counts, cuts, strict=True)]
  assert ends == [*want, None]


def test_held_back():
  held = stops.held_back
  assert held("ab", ("bc", "abd")) == 2
  assert held("xb", ("bc", "abd")) == 1
  assert held("bc", ("bc",)) == 0  # a whole one is not the beginning of one
  assert held("anything", ()) == held("", ("a",)) == 0
  assert held("aa", ("aaa",)) == 2


@pytest.mark.parametrize("cut", range(1, 8))
def test_the_screen_shows_the_text_and_no_stop_text(cut):
  """Nothing that a stop text begins with is printed and taken back."""
  ids = _ids("so é be: it")
  accepted = [i % 2 == 0 for i in range(len(ids))]
  text = screen._Text(TOK, ("be:", "e: x"))
  count, whole, _ = stops.first(TOK, ids, ("be:", "e: x"))
  assert whole == "so é "
  shown = []
  for at in range(0, count, cut):
    end = min(at + cut, count)
    last = whole if end == count else None
    shown += text.step(ids[at:end], accepted[at:end], last)
    assert whole.startswith("".join(piece for piece, _ in shown))
  shown += text.flush()
  assert "".join(piece for piece, _ in shown) == whole
  assert shown == text.pieces
  owners = [drafted for piece, drafted in shown for _ in piece]
  assert owners == [True, False, True, True, False]  # é is its last byte's


def test_what_was_held_back_comes_in_the_end():
  text = screen._Text(TOK, ("abc",))
  assert text.step(_ids("xab"), [True] * 3) == [("x", True)]
  assert text.flush() == [("a", True), ("b", True)]


@functools.cache
def _free(draft, temperature):
  """An answer without stop texts, of either decoder."""
  config = _asked(draft, temperature)
  found = played(_todo("To be"), config)
  return {d: _answers(found, d)[0, 0] for d in (PLAIN, SPECULATIVE)}


def _asked(draft, temperature, **changes):
  config = _config(draft, max_new_tokens=24, seed=4, **changes)
  config.sampling.temperature = temperature
  return config


@pytest.mark.parametrize("chunk", [1, 8, 100])
@pytest.mark.parametrize("draft", ["lm", "replay"])
def test_each_place_of_an_answer(monkeypatch, draft, chunk):
  """B30: at each place of a block, across rounds and chunks (T3)."""
  monkeypatch.setattr(answers, "CHUNK_STEPS", chunk)
  for decoder, free in _free(draft, 0.8).items():
    ids = free.token_ids
    for at in range(0, len(ids) - 1, 1 if chunk == 8 else 7):
      # some characters that two tokens make together
      text = tokenizer.decode(_model().tokenizer, ids[at : at + 2])
      want = stops.first(_model().tokenizer, ids, (text,))
      config = _asked(draft, 0.8, stop=text)
      found = _answers(played(_todo("To be"), config), decoder)[0, 0]
      assert found.token_ids == ids[: want[0]]
      assert found.accepted == free.accepted[: want[0]]
      assert found.rounds == free.rounds[: want[0]]
      assert (found.text, found.stop_text) == want[1:]
      assert found.finish_reason == "stop"


def test_half_a_character_ends_an_answer_wherever_chunks_end():
  """What a token completes counts, though the next one undoes it."""
  tok = _model().tokenizer
  ids = tokenizer.encode(tok, "a\u00e9b", special=False)
  assert "\ufffd" not in tokenizer.decode(tok, ids)
  assert "\ufffd" in tokenizer.decode(tok, ids[:2])
  whole = stops.first(tok, ids, ("\ufffd",))
  assert whole == stops.first(tok, ids[:2], ("\ufffd",)) == (2, "a", "\ufffd")


def test_both_decoders_stop_alike():
  """B30: at T = 0 and in coupled mode, in a batch of unlike rows."""
  todo = _todo("a", "To be, or not", ("x" * 30, "y"), seeds=[1, 2, 3])
  for options in (dict(), dict(verifier="coupled")):
    config = _config("lm", batch_size=3, seed=1, **options)
    config.sampling.temperature = 0.8 * bool(options)
    free = _answers(played(todo, config))
    stop = [a.text[4:6] for a in free.values()][:2]
    config.stop = str(stop).replace("'", '"')
    assert settings.stop_texts(config) == tuple(stop)
    batches = played(todo, config)
    plain, speculative = (_answers(batches, d) for d in (PLAIN, SPECULATIVE))
    assert {a.finish_reason for a in plain.values()} >= {"stop"}
    for key, a in plain.items():
      b = speculative[key]
      assert a[:5] + a[7:] == b[:5] + b[7:]  # all but the rounds


def test_counts_are_those_of_what_is_kept():
  """B02: rounds behind the stop text are made, and counted nowhere."""
  free = _free("replay", 0.8)[SPECULATIVE]
  stop = free.text[3:5]
  config = _asked("replay", 0.8, stop=stop)
  batch = played(_todo("To be"), config)[1]
  (answer,) = batch.answers
  assert 0 < len(answer.token_ids) < len(free.token_ids)
  assert batch.acceptance.tokens == len(answer.token_ids)
  assert batch.acceptance.rounds == answer.rounds[-1] + 1 <= batch.steps


def test_a_stop_text_at_the_last_token_allowed():
  """B30: the reason is the stop, not the length."""
  free = _free("lm", 0.8)[PLAIN]
  stop = tokenizer.decode(_model().tokenizer, free.token_ids[5:8])
  count, _, _ = stops.first(_model().tokenizer, free.token_ids, (stop,))
  for limit, reason in ((count, "stop"), (count - 1, "length")):
    config = _asked("lm", 0.8, stop=stop)
    config.max_new_tokens = limit
    found = _answers(played(_todo("To be"), config))[0, 0]
    assert found.finish_reason == reason
    assert len(found.token_ids) == min(limit, count)


def test_minimum_and_end_tokens():
  """B49: no end before min_new_tokens; ignore_eos has no end token at all."""
  model = _model()
  free = _free("lm", 0.8)[PLAIN]
  stop = tokenizer.decode(model.tokenizer, free.token_ids[:2])
  config = _asked("lm", 0.8, stop=stop)
  config.sampling.min_new_tokens = 12
  for decoder in (PLAIN, SPECULATIVE):
    a = _answers(played(_todo("To be"), config), decoder)[0, 0]
    assert len(a.token_ids) >= 12
  end = free.token_ids[3]
  ended = model._replace(tokenizer=model.tokenizer._replace(stop_ids=(end,)))
  lengths = []
  for ignore in (False, True):
    config = _asked("lm", 0.8, ignore_eos=ignore)
    sizes = play.sizes(ended, _todo("To be"), config)
    found = play.play(
      ended, _draft(config), _todo("To be"), config, sizes, QUIET
    )
    lengths.append(len(_answers(list(found))[0, 0].token_ids))
  assert lengths[0] <= 4 and lengths[1] == 24


QUIET = play.Show(lambda *a: None, lambda *a: None, lambda: None)


def test_stopping_compiles_nothing(caplog):
  """B09: the host ends a row by changing two numbers."""
  free = _free("lm", 0.8)[PLAIN]
  todo = _todo("To be", "and")
  config = _asked("lm", 0.8, stop=free.text[6:8])
  sizes = play.sizes(_model(), todo, config)
  draft = _draft(config)
  play.warm_up(_model(), draft, config, sizes)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    found = list(play.play(_model(), draft, todo, config, sizes, QUIET))
  assert not [r.message for r in caplog.records if "ompil" in r.message]
  assert "stop" in {a.finish_reason for b in found for a in b.answers}


def test_logprobs_of_each_token():
  """Both decoders' agree where their tokens do."""
  config = _asked("lm", 0.0, logprobs=True)
  plain, speculative = played(_todo("To be"), config)
  (a,), (b,) = plain.answers, speculative.answers
  assert a.token_ids == b.token_ids
  for x, y in zip(a.logprobs, b.logprobs, strict=True):
    assert len(x) == len(a.token_ids)
    np.testing.assert_allclose(x, y, atol=1e-4)
  assert set(a.logprobs.law) == {0.0} and max(a.logprobs.raw) < 0


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(stop="["), "config.stop must be one text or a JSON list"),
    (dict(stop='["a", 1]'), "config.stop must be one text or a JSON list"),
    (dict(stop='[""]'), "config.stop must be one text or a JSON list"),
    (dict(bias="5"), "sampling.bias must be JSON of token ids"),
    (dict(bias='{"a": 1}'), "sampling.bias must be JSON of token ids"),
    (dict(bias='{"1": null}'), "sampling.bias must be JSON of token ids"),
    (dict(banned=("a",)), "sampling.banned must be token ids"),
    (dict(repetition_penalty=0.0), "repetition_penalty must be > 0"),
    (dict(min_new_tokens=-1), "min_new_tokens must be >= 0"),
  ],
)
def test_values_outside_their_range(changes, message):
  config = _config()
  for key, value in changes.items():
    (config if key == "stop" else config.sampling)[key] = value
  with pytest.raises(UserError, match=message):
    settings.check(config)


def test_bias_and_banned_ids():
  config = _config()
  assert "bias" not in settings.sampling(config, 10)
  config.sampling.bias, config.sampling.banned = '{"3": -2.5}', (1, 4)
  bias = settings.sampling(config, 10)["bias"]
  assert bias.tolist() == [0, -np.inf, 0, -2.5, -np.inf, 0, 0, 0, 0, 0]
  with pytest.raises(UserError, match="token id 4 is outside 0..3"):
    settings.sampling(config, 4)
  config.sampling.bias, config.sampling.banned = "", tuple(range(5))
  with pytest.raises(UserError, match="leaves no token"):
    settings.sampling(config, 5)
