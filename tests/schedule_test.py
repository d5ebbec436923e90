"""The draft's length is chosen before a run, and said."""

import numpy as np
import pytest
from play_test import (
  PLAIN,
  SPECULATIVE,
  _answers,
  _config,
  _draft,
  _model,
  _play,
  _todo,
)

from specjax import play, predict, schedule, settings, timing
from specjax.errors import UserError

TODO = _todo("To be", "or not")


def _costs(draft, call):
  """Of a plain step of one second; `call` [K + 1] of 1..K + 1 tokens."""
  cost = lambda x: timing.Cost(x, x, x)
  whole = {k: cost(k * draft + x) for k, x in enumerate(call) if k}
  calls = {k + 1: cost(x) for k, x in enumerate(call)}
  return timing.Costs(cost(1.0), calls, cost(draft), whole, 1, 100)


def _decide(monkeypatch, name, kind, costs, **changes):
  monkeypatch.setattr(timing, "measure", lambda *a, **k: {"": costs})
  config = _config(name, seed=3, **changes)
  config.draft.schedule = kind
  sizes = play.sizes(_model(), TODO, config)
  draft = _draft(config)
  return config, sizes, schedule.decide(_model(), draft, config, sizes, TODO)


@pytest.mark.parametrize("draft, wide, most", [(0.0, 1.0, 3), (9.0, 1.0, 0)])
def test_auto_keeps_the_length_that_pays(monkeypatch, draft, wide, most):
  """Free drafts: all K. Dear ones: none, and it is said why."""
  costs = _costs(draft, [1.0, wide, wide, wide])
  config, sizes, chosen = _decide(monkeypatch, "lm", "auto", costs)
  assert chosen.opened.num_draft == most
  assert f"K = {most}" in chosen.opened.chosen
  found = list(
    play.play(
      _model(),
      chosen,
      TODO,
      config,
      sizes,
      play.Show(lambda *a: None, lambda *a: None, lambda: None),
    )
  )
  config.sampling.temperature = 0.0
  assert all(b.acceptance is None or b.acceptance.tokens for b in found)


@pytest.mark.parametrize("name", ["lm", "feature"])
def test_auto_is_the_best_of_the_predicted(monkeypatch, name):
  costs = _costs(0.2, [1.0, 1.1, 1.2, 1.3])
  seen = []
  inner = predict.speedups
  keep = lambda *args: seen.append(inner(*args)) or seen[-1]
  monkeypatch.setattr(predict, "speedups", keep)
  _, _, chosen = _decide(monkeypatch, name, "auto", costs)
  (S,) = seen
  best = np.append(1.0, S.mean[1:])
  assert chosen.opened.num_draft == best.argmax()


@pytest.mark.parametrize("name", ["lm", "ngram", "feature"])
def test_adaptive_decodes_the_same_tokens(monkeypatch, name):
  """At T = 0, as decode.py does it; lengths differ from round to round."""
  costs = _costs(0.05, [1.0, 1.1, 1.2, 1.3])
  config, sizes, chosen = _decide(monkeypatch, name, "adaptive", costs)
  config.sampling.temperature = 0.0
  assert chosen.policy is not None and "adaptive" in chosen.opened.chosen
  quiet = play.Show(lambda *a: None, lambda *a: None, lambda: None)
  batches = list(play.play(_model(), chosen, TODO, config, sizes, quiet))
  ids = lambda d: [a.token_ids for a in _answers(batches, d).values()]
  assert ids(PLAIN) == ids(SPECULATIVE)


def test_constant_stays_as_it_is():
  config = _config("lm")
  draft = _draft(config)
  sizes = play.sizes(_model(), TODO, config)
  assert schedule.decide(_model(), draft, config, sizes, TODO) is draft


@pytest.mark.parametrize(
  "name, kind, message",
  [
    ("lm", "adaptiv", "did you mean adaptive?"),
    ("replay", "auto", "needs --config.draft.schedule=constant"),
  ],
)
def test_mistakes(name, kind, message):
  config = _config(name)
  config.draft.schedule = kind
  with pytest.raises(UserError, match=message):
    settings.check(config)


def test_a_plain_run_is_not_changed():
  """A calibration decodes prompts of its own; the answers stay."""
  config = _config("ngram", decoder=PLAIN)
  want = _answers(_play(TODO, config))
  config = _config("ngram")
  config.draft.schedule = "auto"
  sizes = play.sizes(_model(), TODO, config)
  schedule.decide(_model(), _draft(config), config, sizes, TODO)
  assert _answers(_play(TODO, config)) == want
