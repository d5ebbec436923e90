"""How costs are measured and put together; no test depends on a clock."""

import functools
import logging

import jax
import numpy as np
import pytest
import toy

from specjax import timing, types
from specjax.drafters import lm, ngram

V, SLOTS = 11, 64


@functools.cache
def _pair():
  model = toy.trigram(V, context=60)
  drafts = {
    "lm": types.Draft(lm.make(model, V), toy.table(V, seed=1), 9),
    "ngram": types.Draft(ngram.make(V), (), 9),
  }
  return model, toy.table(V), drafts


def _measure(**options):
  target, params, drafts = _pair()
  options = dict(batch=2, context=20, widths=[3, 1], steps=3, turns=2) | options
  options = dict(slots=SLOTS, drafts=drafts) | options
  return timing.measure(target, params, options.pop("drafts"), **options)


def test_what_is_measured():
  found = _measure(sampling=dict(temperature=0.7, top_p=0.9))
  assert list(found) == ["lm", "ngram"]
  for costs in found.values():
    assert list(costs.target) == [1, 2, 4] and list(costs.round) == [1, 3]
    assert (costs.batch, costs.context, costs.modelled) == (2, 20, False)
    every = [costs.plain, costs.draft]
    for cost in every + [*costs.target.values(), *costs.round.values()]:
      assert 0 < cost.low <= cost.median <= cost.high < 100
    assert costs.cost_ratio == costs.target[1].median / costs.draft.median
  # what does not depend on the draft is the same measurement
  assert found["lm"].target == found["ngram"].target
  assert found["lm"].plain == found["ngram"].plain


def test_bare_calls_alone():
  (costs,) = _measure(whole=False, drafts={"x": _pair()[2]["lm"]}).values()
  assert costs.plain is None and costs.round == {}
  assert list(costs.target) == [1, 2, 4]


def test_everything_takes_turns_and_the_first_is_not_counted():
  order = []

  def run(name, seconds):
    order.append(name)
    return next(seconds)

  variants = {
    name: functools.partial(run, name, iter(row))
    for name, row in dict(a=[9.0, 1, 2], b=[9.0, 3, 4]).items()
  }
  seen = []
  track = lambda runs: seen.append(len(runs)) or runs
  assert timing.take_turns(variants, 2, track) == dict(a=[1, 2], b=[3, 4])
  assert order == ["a", "b"] * 3 and seen == [6]


def test_nothing_compiles_twice(caplog):
  """Neither in the turns nor when it is measured again."""
  target, params, _ = _pair()
  own = {"x": types.Draft(lm.make(toy.trigram(V), V), toy.table(V), 2)}
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    _measure(drafts=own, turns=1, widths=[2])
    assert [r for r in caplog.records if "ompil" in r.message]
    caplog.clear()
    _measure(drafts=own, turns=3, widths=[2])
    _measure(drafts=own, widths=[2], context=7)  # the slots are the shape
  # two prompt lengths may be two programs of NumPy's conversion, never a loop
  names = ("_advance", "_speculate", "run", "_prefill")
  found = [r.message for r in caplog.records if "ompil" in r.message]
  assert not [text for text in found if any(f"jit({n})" in text for n in names)]
  loop = timing.target_loop(target, 2, 3, 3)
  assert loop is timing.target_loop(target, 2, 3, 3)


def test_bare_calls_hand_their_cache_on():
  """A loop that is not given its cache for good begins with a copy of it."""
  target = toy.trigram(V)
  cache = target.init_cache(2, 16)
  loops = {
    n: functools.partial(timing.target_loop(target, 2, n, 3), toy.table(V))
    for n in (1, 2)
  }
  calls = timing.in_turn(loops, cache, np.int32(4))
  assert all(calls[n]() > 0 for n in (1, 2, 1))
  assert all(x.is_deleted() for x in jax.tree.leaves(cache))


@pytest.mark.parametrize(
  "options, said",
  [
    (dict(context=50), "needs 62 tokens, there are 60"),  # the target's context
    (dict(steps=12), "needs 68"),
    (dict(widths=[40]), "needs 143"),
  ],
)
def test_what_does_not_fit(options, said):
  with pytest.raises(ValueError, match=said):
    _measure(**options)


def test_what_just_fits():
  for context, steps in ((48, 3), (1, 14)):
    costs = _measure(context=context, steps=steps, turns=1)["ngram"]
    assert costs.context == context


def test_fit():
  assert timing.fit(256, 100, 8, 16) == (100, 16)
  assert timing.fit(256, 200, 8, 16) == (256 - 16 * 9, 16)
  assert timing.fit(256, 200, 99, 16) == (56, 2)
  assert timing.fit(101, 50, 99, 16) == (1, 1)
  with pytest.raises(ValueError, match="K = 100 does not fit 101 tokens"):
    timing.fit(101, 50, 100, 16)


@pytest.mark.parametrize("V", [2, 11, 49152])
def test_made_up_prompts(V):
  """Ids that the vocabulary has; a look-up finds little in them."""
  target = toy.trigram(2)._replace(vocab_size=V)
  ids = timing.made_up(target, 300)
  assert len(ids) == 300 and min(ids) >= 0 and max(ids) < V
  if V > 251:
    assert len(set(ids[:251])) == 251
  if V > 300:
    assert len(set(ids)) == 300  # nothing can be copied


def _costs(**changes):
  cost = lambda x: timing.Cost(x, x, x)
  costs = timing.Costs(
    plain=cost(10.0),
    target={1: cost(8.0), 3: cost(12.0), 5: cost(13.0)},
    draft=cost(0.5),
    round={2: cost(15.0), 4: cost(18.0)},
    batch=1,
    context=64,
  )
  return costs._replace(**changes)


def test_between_measured_calls():
  costs = _costs()
  assert [costs.call(n) for n in (1, 2, 3, 4, 5)] == [8, 10, 12, 12.5, 13]
  for n in (0, 6):
    with pytest.raises(ValueError, match=r"\[1, 3, 5\] tokens .* not on"):
      costs.call(n)
  assert costs.cost_ratio == 16
  free = _costs(draft=timing.Cost(0, 0, 0))
  assert free.cost_ratio == np.inf


def test_rest_of_a_round():
  """15 - 2 / 2 - 12 = 2 and 18 - 4 / 2 - 13 = 3; between and outside."""
  rest = [_costs().overhead(K) for K in (0, 1, 2, 3, 4)]
  assert rest == [2, 2, 2, 2.5, 3]


def test_units_are_plain_steps():
  c, v, o = timing.units(_costs(), 4)
  assert c == 0.05
  np.testing.assert_allclose(v, [0.8, 1, 1.2, 1.25, 1.3])
  np.testing.assert_allclose(o, [0.2, 0.2, 0.2, 0.25, 0.3])
  # a measured round is what they add up to
  assert 4 * c + v[4] + o[4] == pytest.approx(1.8)


def test_medians_and_quarters():
  assert timing._cost([3.0, 1, 2, 5, 4]) == (3, 2, 4)
  assert timing._cost([7.0]) == (7, 7, 7)
