"""From a run's plain answers to what they foretell of its speculative ones."""

import copy
import functools

import documented
import numpy as np
import play_test
import pytest
from play_test import TEXTS, _config, _draft, _model, _play, _todo

from specjax import forecast, metrics, play, predict, report, settings

same = lambda items: items


def _run(draft="lm", todo=None, **changes):
  """(config, sizes, batches of both decoders)."""
  config = _config(draft, **changes)
  config.sampling.temperature = 0.0
  todo = todo or _todo(*TEXTS[:4], ("q", "r"))
  sizes = play.sizes(_model(), todo, config)
  return config, sizes, _play(todo, config, sizes=sizes)


def _of_run(config, sizes, batches):
  return forecast.of_run(_model(), _draft(config), config, sizes, batches)


@pytest.mark.parametrize(
  "draft, batch_size",
  [
    ("lm", 1),
    ("ngram", 1),
    ("ngram", 3),
    ("feature", 3),
    pytest.param("lm", 3, marks=pytest.mark.slow),
    pytest.param("feature", 1, marks=pytest.mark.slow),
  ],
)
def test_at_temperature_0_it_is_what_happened(draft, batch_size):
  """To the last round, also in a batch and over several turns."""
  config, sizes, batches = _run(draft, batch_size=batch_size)
  found, K = _of_run(config, sizes, batches), config.draft.num_tokens
  parts = [b.acceptance for b in batches if b.acceptance is not None]
  measured = metrics.add(parts, K)
  got = found.prediction
  assert got.rounds[:, K].sum() == pytest.approx(measured.rounds, abs=1e-6)
  assert got.tokens.mean[K] == pytest.approx(measured.tokens_per_call)
  assert len(got.length) == 6 and got.length.sum() == measured.tokens
  assert (found.speedups is None) == (batch_size > 1)
  costs, steps = found.costs, {}
  for batch in batches:
    seconds, n = steps.get(batch.decoder, (0, 0))
    steps[batch.decoder] = seconds + batch.seconds, n + batch.steps
  plain, speculative = (seconds / n for seconds, n in steps.values())
  assert costs.plain.median == pytest.approx(plain)
  assert costs.round[K].median == pytest.approx(speculative)
  assert costs.batch == batch_size
  if batch_size == 1:  # tokens over time, as the run's own speed-up
    want = got.tokens.mean[K] * plain / speculative
    assert found.speedups.mean[K] == pytest.approx(want)
  opened = _draft(config).opened
  shape = opened, np.dtype("float32"), sizes, batches
  took = {"load": 0.0, "compile": dict.fromkeys(settings.DECODERS, 0.0)}
  told = report.build(config, _model(), *shape, took, False, found)
  assert told["predicted"] and told["costs"]
  documented.check("Decoding", told)


def test_the_temperatures_of_a_head_are_swept():
  """Each variant is what the config's own temperature gives."""
  config, sizes, batches = _run("feature", todo=_todo(*TEXTS[:2]))
  config.sampling.temperature = 0.9
  answers = [
    (a.prompt_ids, a.token_ids)
    for b in batches
    for a in b.answers
    if b.decoder == play_test.PLAIN
  ]
  options = dict(num_draft=3, batch=2, slots=sizes.slots, track=same)
  feed = lambda config, **more: forecast.texts(
    _model(), _draft(config), answers, config, **options, **more
  )
  variants = ({}, dict(temperature=4.0), dict(temperature=4.0, top_k=1))
  found = feed(config, variants=variants)
  config.draft.temperature = 4.0
  (alone,) = feed(config)
  np.testing.assert_array_equal(found[1].log_q, alone.log_q)
  np.testing.assert_array_equal(found[1].alpha, alone.alpha)
  first = [x.log_q[0, :20, 0] for x in found]
  assert np.abs(first[0] - first[1]).max() > 0.01
  assert set(np.unique(first[2])) <= {0, -np.inf}


@pytest.mark.parametrize(
  "changes",
  [
    dict(draft="replay"),
    dict(verifier="coupled"),
    dict(decoder="autoregressive"),
    dict(max_new_tokens=0),
  ],
)
def test_where_there_is_nothing_to_say(changes):
  config, sizes, batches = _run(todo=_todo("To be"), **changes)
  assert _of_run(config, sizes, batches) is None


@functools.cache
def _short_run():
  return _run("ngram", todo=_todo("To be"), max_new_tokens=4)


@pytest.mark.parametrize("num_tokens", [0, 254, 255, 300])
def test_rounds_that_do_not_fit(num_tokens):
  """Nothing is said of a round as long as the cache; nothing breaks."""
  config, sizes, batches = _short_run()  # of another K, which matters nothing
  config = copy.deepcopy(config)
  config.draft.num_tokens = num_tokens
  found = _of_run(config, sizes, batches)
  assert (found is None) == (num_tokens != 254)  # 256 slots
  if found:
    assert found.costs.call(255) > 0 and len(found.prediction.iid) == 255


def _texts(answers, config, batch, **options):
  return forecast.texts(
    _model(),
    _draft(config),
    answers,
    config,
    num_draft=3,
    batch=batch,
    slots=256,
    track=same,
    **options,
  )


@functools.cache
def _answers():
  config, _, batches = _run()
  plain = [b for b in batches if b.decoder == "autoregressive"]
  return config, [(a.prompt_ids, a.token_ids) for b in plain for a in b.answers]


def _equal(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4)


def test_groups_and_empty_answers():
  """Texts do not depend on how many go in one pass; empty ones are none."""
  config, answers = _answers()
  (one,) = _texts(answers, config, 1)
  (some,) = _texts([*answers[:2], ((1, 2), ()), *answers[2:]], config, 4)
  real = np.arange(24) < one.length[:, None]
  cut = lambda texts: predict.Texts(texts.length, *(x[real] for x in texts[1:]))
  _equal(cut(one), cut(some))


def test_variants_are_runs_of_their_own():
  """A sweep on the same logits, against one config a temperature."""
  config, answers = copy.deepcopy(_answers()[0]), _answers()[1]
  config.sampling.temperature = 1.0
  found = _texts(
    answers, config, 3, variants=({}, dict(temperature=0.3), dict(top_p=0.5))
  )
  for temperature, got in ((-1.0, found[0]), (0.3, found[1])):
    config.draft.temperature = temperature
    (want,) = _texts(answers, config, 3)
    _equal(got, want)
  differ = functools.partial(np.allclose, atol=1e-3)
  assert not differ(found[0].alpha, found[1].alpha)
  assert not differ(found[0].alpha, found[2].alpha)


@pytest.mark.parametrize(
  "sizes, want",
  [([1, 1, 1, 1], 9), ([2, 2], 15), ([3, 1], 13), ([1, 2, 1], 10), ([4], 22)],
)
def test_rows_wait_for_the_longest(sizes, want):
  """Each batch at what its longest row has; some may be smaller than others."""
  rows = [((0,) * n, (0,) * m) for n, m in [(4, 2), (20, 4), (8, 0), (3, 2)]]
  left = iter(rows)
  batches = [[next(left) for _ in range(n)] for n in sizes]
  assert forecast.mean_context(batches) == want
