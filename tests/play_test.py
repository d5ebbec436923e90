"""Conversations are played whatever their lengths, by one compiled program."""

import functools
import logging

import jax
import numpy as np
import pytest

from configs import tiny
from specjax import play
from specjax.errors import UserError
from specjax.models import load
from specjax.prompts import Prompt

QUIET = play.Show(lambda turns: None, lambda row, ids: None, lambda: None)
TEXTS = ["a", "bb" * 40, "To be, or not to be", "é" * 7, "x" * 90]


def _config(**changes):
  config = tiny.get_config()
  config.max_new_tokens = 24
  config.architecture.update(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2
  )
  config.architecture.max_position_embeddings = 512
  config.update(changes)
  return config


@functools.cache
def _model():
  return load.model(load.random(_config().architecture), dtype="float32")


def _todo(*turns, seeds=None):
  seeds = seeds or [None] * len(turns)
  return [
    Prompt(str(i), "", (), (t,) if isinstance(t, str) else t, seed)
    for i, (t, seed) in enumerate(zip(turns, seeds, strict=True))
  ]


def _play(todo, config, show=QUIET, sizes=None):
  sizes = sizes or play.sizes(_model(), todo, config)
  return list(play.play(_model(), todo, config, sizes, show))


def _answers(batches):
  """{(prompt, turn): answer}."""
  answers = [a for batch in batches for a in batch.answers]
  return {(a.turn.index, a.turn.number): a for a in answers}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_equals_alone(temperature):
  """B15: also where turns run out at different times and seeds differ."""
  todo = _todo(
    *TEXTS, ("q", "r", "s"), ("t", "u"), seeds=[1, 2, 3, None, 5, None, 7]
  )
  config = _config(seed=11)
  config.sampling.temperature = temperature
  together = _answers(_play(todo, _config(**{**config, "batch_size": 4})))
  alone = _answers(_play(todo, config))
  assert len(alone) == 10
  assert together == alone


def test_seeds_of_prompts_and_config():
  config = _config(seed=1)
  same = _todo("a", "a", "a", seeds=[None, 1, 2])
  a, b, c = _answers(_play(same, config)).values()
  assert a.token_ids == b.token_ids != c.token_ids


def test_turns_hold_the_models_own_answers():
  config = _config(seed=4)
  answers = _answers(_play(_todo(("q", "r")), config))
  first, second = answers[0, 0], answers[0, 1]
  text = "\n\n".join(["q", first.text, "r"])
  assert bytes(second.prompt_ids).decode() == text


@pytest.mark.parametrize("batch_size", [1, 3])
def test_warm_up_compiles_everything(caplog, batch_size):
  """B09: not one program more, for the first real batch or any later one."""
  todo = _todo(*TEXTS, ("q", "r"), seeds=[1, 2, None, 4, 5, 6])
  config = _config(batch_size=batch_size)
  jax.clear_caches()  # other tests may have compiled what warm_up forgets
  opened = load.random(config.architecture)
  model = load.model(opened, dtype="float32")
  sizes = play.sizes(opened, todo, config)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    play.warm_up(model, sizes)
    assert [r for r in caplog.records if "ompil" in r.message]
    caplog.clear()
    batches = list(play.play(model, todo, config, sizes, QUIET))
  assert not [r.message for r in caplog.records if "ompil" in r.message]
  assert not any(batch.compile_seconds for batch in batches)
  assert {batch.slots for batch in batches} == {sizes.slots}


def test_sizes_serve_every_prompt():
  sizes = lambda todo, **c: play.sizes(_model(), todo, _config(**c))
  assert sizes(_todo("a")) == play.Sizes(batch=1, slots=256, max_new=24)
  assert sizes(_todo("a", "b" * 240)).slots == 512
  # two answers of 24 tokens and 220 characters
  assert sizes(_todo(("a" * 110, "b" * 110)), batch_size=3).slots == 512
  # nothing is ever longer than the context
  assert sizes(_todo("a"), max_new_tokens=10**15) == play.Sizes(1, 512, 512)


@pytest.mark.parametrize("length", [0, 513])
def test_wrong_first_prompt(length):
  with pytest.raises(UserError, match=f"'0' has {length} tokens.* 1 to 512"):
    play.sizes(_model(), _todo("x" * length), _config())


def test_context_is_full():
  """A first prompt may fill it; a later turn may outgrow it."""
  todo = _todo("x" * 512, ("y" * 300, "z" * 300, "w"), "x" * 508)
  answers = _answers(_play(todo, _config(batch_size=2, seed=2)))
  reasons = {key: a.finish_reason for key, a in answers.items()}
  assert reasons == {
    (0, 0): "context",
    (1, 0): "length",
    (1, 1): "context",
    (1, 2): "context",
    (2, 0): "context",
  }
  assert [len(a.token_ids) for a in answers.values()] == [0, 24, 0, 0, 4]


def test_conversation_that_outgrows_the_slots():
  """What noise decodes to is longer when it is encoded again."""
  todo = _todo(("x" * 100, "y" * 80), "later")
  config = _config(max_new_tokens=24)
  batches = _play(todo, config)
  assert play.sizes(_model(), todo, config).slots == 256
  assert len(batches[1].answers[0].prompt_ids) > 256 - 24
  assert [batch.slots for batch in batches] == [256, 512, 512]
  assert [batch.compile_seconds > 0 for batch in batches] == [0, 1, 0]
  roomy = play.Sizes(batch=1, slots=512, max_new=24)
  assert _answers(batches) == _answers(_play(todo, config, sizes=roomy))


def test_no_tokens_asked_for():
  (batch,) = _play(_todo("a"), _config(max_new_tokens=0))
  (answer,) = batch.answers
  assert (answer.token_ids, answer.text) == ((), "")
  assert (answer.finish_reason, batch.steps) == ("length", 0)


def test_show_sees_every_token_once():
  calls, seen = [], {}

  def begin(turns):
    calls.append([(t.index, t.number) for t in turns])

  def tokens(row, ids):
    assert ids
    seen.setdefault(calls[-1][row], []).extend(ids)

  show = play.Show(begin, tokens, lambda: calls.append("end"))
  todo = _todo("a", ("b", "c"), "d")
  answers = _answers(_play(todo, _config(batch_size=2), show))
  assert calls == [[(0, 0), (1, 0)], "end", [(1, 1)], "end", [(2, 0)], "end"]
  assert seen == {key: list(a.token_ids) for key, a in answers.items()}


def test_rounds_and_steps():
  """A batch makes as many target calls as its slowest row needs (B16)."""
  for batch in _play(_todo(*TEXTS), _config(batch_size=3, max_new_tokens=40)):
    rounds = [a.rounds for a in batch.answers]
    assert all(np.array_equal(r, np.arange(len(r))) for r in rounds)
    assert batch.steps == max(r[-1] + 1 for r in rounds)


def test_an_interrupt_keeps_what_was_decoded():
  """Ctrl-C in the second chunk: the first is the answer, then it goes on up."""
  todo, config = _todo("To be", "or not"), _config(seed=3)
  whole = _answers(_play(todo, config))[0, 0]
  assert len(whole.token_ids) > 2 * play.CHUNK_STEPS
  chunks = []

  def tokens(row, ids):
    del row
    chunks.append(ids)
    if len(chunks) == 2:
      raise KeyboardInterrupt

  show = QUIET._replace(tokens=tokens)
  sizes = play.sizes(_model(), todo, config)
  batches = []
  with pytest.raises(KeyboardInterrupt):
    for batch in play.play(_model(), todo, config, sizes, show):
      batches.append(batch)
  (batch,) = batches
  (answer,) = batch.answers
  assert batch.interrupted and answer.finish_reason == "interrupted"
  kept = 2 * play.CHUNK_STEPS
  assert answer.token_ids == whole.token_ids[:kept]
