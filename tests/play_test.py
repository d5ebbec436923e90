"""Conversations are played whatever their lengths, by one compiled program."""

import atexit
import dataclasses
import functools
import logging
import shutil
import tempfile

import heads
import jax
import numpy as np
import pytest

from configs import tiny
from specjax import adaptive, answers, generate, metrics, pair, play
from specjax.errors import UserError
from specjax.models import load
from specjax.prompts import Prompt

QUIET = play.Show(
  lambda name, turns: None, lambda row, ids, accepted, whole: None, lambda: None
)
TEXTS = ["a", "bb" * 40, "To be, or not to be", "é" * 7, "x" * 90]
PLAIN, SPECULATIVE = "autoregressive", "speculative"
DRAFTS = {
  "lm": dict(layers=(0,), head=300),
  "ngram": dict(),
  "replay": dict(alpha=0.7),
  "feature": dict(),
}


def _config(draft="ngram", **changes):
  config = tiny.get_config()
  config.max_new_tokens = 24
  config.architecture.update(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2
  )
  config.architecture.max_position_embeddings = 512
  config.draft.update(name=draft, num_tokens=3, **DRAFTS[draft])
  if draft == "feature":
    config.draft.weights = _folder()
  config.update(changes)
  return config


@functools.cache
def _folder():
  """An export of a feature head that says about what the target says."""
  folder = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, folder)
  ids = (*range(280), 300)
  head = heads.made(_model(), features=(0, 1), ids=ids, token=0.8, noise=0.1)
  return heads.saved(folder, _model(), head)


@functools.cache
def _model():
  model = load.model(load.random(_config().architecture), dtype="float32")
  # laws that are neither flat nor one-hot
  return model._replace(
    params=model.params | {"head": model.params["head"] * 20}
  )


def _draft(config, model=None):
  model = model or _model()
  chosen = pair.opened(config, load.Opened(model.config, model.tokenizer, None))
  return pair.load(chosen, model, dtype="float32")


def _todo(*turns, seeds=None):
  seeds = seeds or [None] * len(turns)
  return [
    Prompt(str(i), "", (), (t,) if isinstance(t, str) else t, seed)
    for i, (t, seed) in enumerate(zip(turns, seeds, strict=True))
  ]


def _play(todo, config, show=QUIET, sizes=None):
  sizes = sizes or play.sizes(_model(), todo, config)
  return list(play.play(_model(), _draft(config), todo, config, sizes, show))


def _answers(batches, decoder=PLAIN):
  """{(prompt, turn): answer} of one decoder."""
  answers = [a for b in batches if b.decoder == decoder for a in b.answers]
  return {(a.turn.index, a.turn.number): a for a in answers}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_both_decoders_alone_and_in_a_batch(draft, temperature):
  """B15: also where turns run out at different times and seeds differ.

  At T = 0 both decoders hold the same conversations.
  """
  todo = _todo(
    *TEXTS, ("q", "r", "s"), ("t", "u"), seeds=[1, 2, 3, None, 5, None, 7]
  )
  config = _config(draft, seed=11)
  config.sampling.temperature = temperature
  alone = _play(todo, config)
  config.batch_size = 3
  together = _play(todo, config)
  for decoder in (PLAIN, SPECULATIVE):
    assert len(_answers(alone, decoder)) == 10
    assert _answers(together, decoder) == _answers(alone, decoder)
  plain, speculative = _answers(alone), _answers(alone, SPECULATIVE)
  ids = lambda answers: {k: (a.prompt_ids, a.token_ids) for k, a in answers}
  same = ids(plain.items()) == ids(speculative.items())
  assert same == (temperature == 0)
  assert any(any(a.accepted) for a in speculative.values())
  assert not any(any(a.accepted) for a in plain.values())


def test_one_decoder_alone_is_the_same():
  todo = _todo(*TEXTS[:2], ("q", "r"))
  both = _play(todo, _config(seed=2))
  for decoder in (PLAIN, SPECULATIVE):
    batches = _play(todo, _config(seed=2, decoder=decoder))
    assert {batch.decoder for batch in batches} == {decoder}
    assert _answers(batches, decoder) == _answers(both, decoder)


def test_the_draft_may_have_a_temperature_of_its_own():
  """It changes the draft alone: at T = 0 the answers stay."""
  todo, answers = _todo(*TEXTS), []
  for temperature in (-1.0, 3.0):
    config = _config("lm", decoder=SPECULATIVE)
    config.sampling.temperature = 0.0
    config.draft.temperature = temperature
    answers.append(_answers(_play(todo, config), SPECULATIVE).values())
  ids, accepted = zip(
    *[([a.token_ids for a in x], [a.accepted for a in x]) for x in answers],
    strict=True,
  )
  assert ids[0] == ids[1] and accepted[0] != accepted[1]


@pytest.mark.parametrize("num_tokens", [0, 300])
def test_any_number_of_drafted_tokens(num_tokens):
  """None at all, or more than there are slots."""
  config = _config(seed=3)
  config.sampling.temperature = 0.0
  config.draft.num_tokens = num_tokens
  batches = _play(_todo("To be"), config)
  (plain,), (other,) = (
    _answers(batches, name).values() for name in (PLAIN, SPECULATIVE)
  )
  assert plain.token_ids == other.token_ids
  if not num_tokens:
    assert plain == other


def test_seeds_of_prompts_and_config():
  config = _config(seed=1)
  same = _todo("a", "a", "a", seeds=[None, 1, 2])
  for decoder in (PLAIN, SPECULATIVE):
    a, b, c = _answers(_play(same, config), decoder).values()
    assert a.token_ids == b.token_ids != c.token_ids


def test_turns_hold_the_models_own_answers():
  config = _config(seed=4)
  batches = _play(_todo(("q", "r")), config)
  for decoder in (PLAIN, SPECULATIVE):
    answers = _answers(batches, decoder)
    first, second = answers[0, 0], answers[0, 1]
    text = "\n\n".join(["q", first.text, "r"])
    assert bytes(second.prompt_ids).decode() == text


def test_sizes_serve_every_prompt():
  sizes = lambda todo, **c: play.sizes(_model(), todo, _config(**c))
  assert sizes(_todo("a")) == play.Sizes(1, 256, 24, 25)
  assert sizes(_todo("a", "b" * 240)).slots == 512
  # two answers of 24 tokens and 220 characters
  long = sizes(_todo(("a" * 110, "b" * 110)), batch_size=3)
  assert (long.slots, long.tokens) == (512, 110 + 24 + 2 + 110 + 2 + 24)
  # nothing is ever longer than the context
  assert sizes(_todo("a"), max_new_tokens=10**15) == play.Sizes(
    1, 512, 512, 512
  )


@pytest.mark.parametrize("length", [0, 513])
def test_wrong_first_prompt(length):
  with pytest.raises(UserError, match=f"'0' has {length} tokens.* 1 to 512"):
    play.sizes(_model(), _todo("x" * length), _config())


def test_context_is_full():
  """A first prompt may fill it; a later turn may outgrow it."""
  todo = _todo("x" * 512, ("y" * 300, "z" * 300, "w"), "x" * 508)
  batches = _play(todo, _config(batch_size=3, seed=2))
  for decoder in (PLAIN, SPECULATIVE):
    answers = _answers(batches, decoder)
    reasons = {key: a.finish_reason for key, a in answers.items()}
    assert reasons == {
      (0, 0): "context",
      (1, 0): "length",
      (1, 1): "context",
      (1, 2): "context",
      (2, 0): "context",
    }
    lengths = [len(answers[key].token_ids) for key in sorted(answers)]
    assert lengths == [0, 24, 0, 0, 4]


def test_conversation_that_outgrows_the_slots():
  """What noise decodes to is longer when it is encoded again.

  Both decoders get the slots that the longer conversation needs.
  """
  todo = _todo(("x" * 100, "y" * 80), "later")
  config = _config(max_new_tokens=24)
  batches = _play(todo, config)
  assert play.sizes(_model(), todo, config).slots == 256
  assert len(batches[2].answers[0].prompt_ids) > 256 - 24
  assert [batch.decoder for batch in batches] == [PLAIN, SPECULATIVE] * 3
  assert [batch.slots for batch in batches] == [256] * 2 + [512] * 4
  assert [batch.compile_seconds > 0 for batch in batches] == [0, 0, 1, 1, 0, 0]
  roomy = play.Sizes(batch=1, slots=512, max_new=24, tokens=512)
  more = _play(todo, config, sizes=roomy)
  for decoder in (PLAIN, SPECULATIVE):
    assert _answers(batches, decoder) == _answers(more, decoder)


@pytest.mark.parametrize("longer", [PLAIN, SPECULATIVE])
def test_slots_are_those_of_the_longer_conversation(monkeypatch, longer):
  """Whichever decoder's it is: B41, times are compared at equal slots."""
  monkeypatch.setattr(play, "warm_up", lambda *args: "warmed up")
  config, sizes = _config(), play.Sizes(1, 256, 24, 100)
  ids = {PLAIN: [[1] * 50], SPECULATIVE: [[1] * 50]} | {longer: [[1] * 240]}
  grown, _ = play._grown(_model(), _draft(config), config, sizes, ids)
  assert grown.slots == 512


def test_conversation_that_outgrows_the_drafts_context():
  """One line, not a shape error in the middle of a run."""
  todo, config = _todo(("x" * 100, "y" * 80)), _config("lm")
  draft = _draft(config)
  narrow = dataclasses.replace(draft.opened.config, context=250)
  draft = draft._replace(opened=draft.opened._replace(config=narrow))
  sizes = play.sizes(_model(), todo, config)
  pair.check_context(draft.opened, sizes.tokens)
  with pytest.raises(UserError, match="draft's context holds 250 tokens"):
    list(play.play(_model(), draft, todo, config, sizes, QUIET))


def test_no_tokens_asked_for():
  for batch in _play(_todo("a"), _config(max_new_tokens=0)):
    (answer,) = batch.answers
    assert (answer.token_ids, answer.text) == ((), "")
    assert (answer.finish_reason, batch.steps) == ("length", 0)


def test_show_sees_every_token_once():
  calls, seen = [], {}

  def begin(decoder, turns):
    calls.append([(decoder, t.index, t.number) for t in turns])

  def tokens(row, ids, accepted, whole):
    assert len(ids) == len(accepted) > 0
    key = calls[-1][row]
    seen.setdefault(key, []).extend(zip(ids, accepted, strict=True))

  show = play.Show(begin, tokens, lambda: calls.append("end"))
  todo = _todo("a", ("b", "c"), "d", "e")
  batches = _play(todo, _config(batch_size=3), show)
  groups = [[(0, 0), (1, 0), (2, 0)], [(1, 1)], [(3, 0)]]
  want = []
  for group in groups:
    for name in (PLAIN, SPECULATIVE):
      want += [[(name, *key) for key in group], "end"]
  assert calls == want
  for name in (PLAIN, SPECULATIVE):
    for key, a in _answers(batches, name).items():
      marked = list(zip(a.token_ids, a.accepted, strict=True))
      assert seen.pop((name, *key)) == marked
  assert not seen


def test_rounds_and_steps():
  """A batch makes as many target calls as its slowest row needs (B16)."""
  batches = _play(_todo(*TEXTS), _config(batch_size=3, max_new_tokens=40))
  for batch in batches:
    rounds = [a.rounds for a in batch.answers]
    assert batch.steps == max(r[-1] + 1 for r in rounds)
    if batch.decoder == PLAIN:
      assert all(np.array_equal(r, np.arange(len(r))) for r in rounds)
      assert batch.acceptance is None


@pytest.mark.parametrize("draft", DRAFTS)
def test_acceptance_counts_the_answers(draft):
  """B02: emitted tokens add up, rows that ended and spare rows add none."""
  config = _config(draft, batch_size=3, max_new_tokens=30, seed=1)
  config.sampling.temperature = 0.8
  for batch in _play(_todo(*TEXTS), config):
    if batch.decoder == PLAIN:
      continue
    found, answers = batch.acceptance, batch.answers
    assert found.tokens == sum(len(a.token_ids) for a in answers)
    assert found.rounds == sum(len(set(a.rounds)) for a in answers)
    assert found.histogram.sum() == found.rounds
    accepted = sum(sum(a.accepted) for a in answers)
    assert found.histogram @ np.arange(4) == accepted
    assert np.isfinite(found.overlap).all()
    assert isinstance(found, metrics.Acceptance)


@pytest.mark.parametrize("where", [PLAIN, SPECULATIVE])
def test_an_interrupt_keeps_what_was_decoded(where):
  """Ctrl-C in the second chunk: both are the answer, then it goes on up."""
  todo, config = _todo("To be", "or not"), _config(seed=3, max_new_tokens=100)
  whole = _answers(_play(todo, config), where)[0, 0]
  decoder, chunks = None, []

  def begin(name, turns):
    nonlocal decoder
    decoder = name

  def tokens(row, ids, accepted, whole):
    del row, accepted, whole
    if decoder == where:
      chunks.append(ids)
    if len(chunks) == 2:
      raise KeyboardInterrupt

  show = QUIET._replace(begin=begin, tokens=tokens)
  sizes = play.sizes(_model(), todo, config)
  batches = []
  with pytest.raises(KeyboardInterrupt):
    for batch in play.play(_model(), _draft(config), todo, config, sizes, show):
      batches.append(batch)
  *before, batch = batches
  assert [b.decoder for b in before] == [PLAIN] * (where == SPECULATIVE)
  assert not any(b.interrupted for b in before)
  (answer,) = batch.answers
  assert batch.interrupted and answer.finish_reason == "interrupted"
  kept = sum(map(len, chunks))
  assert answer.rounds[-1] + 1 == 2 * answers.CHUNK_STEPS == batch.steps
  assert kept < len(whole.token_ids)
  assert answer.token_ids == whole.token_ids[:kept]


@pytest.mark.parametrize("draft", ["ngram", "lm", "feature"])
def test_warm_up_runs_each_width(draft, monkeypatch):
  """Of an adaptive call: the first run of one takes longer than the next."""
  config, run, seen = _config(draft, decoder=SPECULATIVE), generate.advance, []
  policy = adaptive.Policy(0.1, 1 + 0.1 * np.arange(4), 0.0)

  def advance(*args, draft, **how):
    state = run(*args, draft=draft, **how)
    free = int((np.asarray(draft.policy.verify) < 1).sum()) - 1
    tested = ~np.isnan(np.asarray(state.overlap)).all(1)
    seen.append((free, tested.tolist()))
    return state

  monkeypatch.setattr(generate, "advance", advance)
  own = _draft(config)._replace(policy=policy)
  sizes = play.sizes(_model(), _todo("a"), config)
  play.warm_up(_model(), own, config, sizes)
  assert seen == [(n, [n > 0]) for n in range(4)]


@pytest.mark.parametrize(
  "draft, batch_size", [("lm", 1), ("ngram", 3), ("replay", 3)]
)
def test_warm_up_compiles_everything(caplog, draft, batch_size):
  """B09: not one program more, for the first real batch or any later one."""
  todo = _todo(*TEXTS, ("q", "r"), seeds=[1, 2, None, 4, 5, 6])
  config = _config(draft, batch_size=batch_size)
  jax.clear_caches()  # other tests may have compiled what warm_up forgets
  opened = load.random(config.architecture)
  model = load.model(opened, dtype="float32")
  sizes = play.sizes(opened, todo, config)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    spent = play.warm_up(model, _draft(config, model), config, sizes)
    assert [r for r in caplog.records if "ompil" in r.message]
    caplog.clear()
    batches = []
    for temperature in (-1.0, 1.5):
      config.draft.temperature = temperature
      draft = _draft(config, model)
      batches += play.play(model, draft, todo, config, sizes, QUIET)
  assert not [r.message for r in caplog.records if "ompil" in r.message]
  assert not any(batch.compile_seconds for batch in batches)
  assert {batch.slots for batch in batches} == {sizes.slots}
  assert list(spent) == [PLAIN, SPECULATIVE] and min(spent.values()) > 0
