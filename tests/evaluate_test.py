"""An evaluation's numbers: by definition, and by the predictor's own path."""

import functools
import types as python_types
from typing import NamedTuple

import jax
import numpy as np
import pytest
import student_test as trained
import toy
from lm_test import IDS, _model
from unroll_test import decoded

from configs import tiny
from specjax import (
  costs,
  evaluate,
  forced,
  generate,
  predict,
  request,
  theory,
  timing,
  trajectories,
  types,
)
from specjax import student as students
from specjax.drafters import feature
from specjax.errors import UserError
from specjax.models import load


class Student(NamedTuple):
  """What an evaluation reads of one."""

  model: types.Target
  shared: dict
  params: dict
  ids: tuple | None
  features: tuple = ()


def _asked(**options):
  asked = dict(draft=0.1, verify=((1, 1.0), (5, 1.4)), overhead=0.05)
  return python_types.SimpleNamespace(**asked | options)


def _sampling(temperature=1.0, top_p=1.0):
  return types.Sampling(
    np.float32(temperature), np.int32(0), np.float32(top_p), np.float32(0)
  )


K, LENGTH = 3, 40
COSTS = costs.given(_asked(), K)
OPTIONS = dict(batch=5, length=LENGTH, num_draft=K, costs=COSTS, chunk=7)


# A toy pair, and all by its definition


V = 7


@functools.cache
def _tabled(ids=None):
  """(teacher, student): trigrams of tables that are dicts, as params are."""
  target = toy.trigram(V)

  def apply(params, *args, **options):
    return target.apply(params["table"], *args, **options)

  keep = slice(None) if ids is None else np.array(ids)
  unembed = lambda params, hidden: hidden
  teacher = target._replace(apply=apply, unembed=unembed)
  draft = teacher._replace(unembed=lambda params, hidden: hidden[..., keep])
  tables = [toy.table(V, seed=s) for s in (0, 1)]
  near = tables[0] + 0.5 * tables[1]
  model = load.Model(teacher, {"table": tables[0]}, None, None, None)
  return model, Student(draft, {}, {"table": near}, ids)


def _law(logits, T, top_p=1.0):
  if T == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  p = np.exp((logits - logits.max()) / T)
  p /= p.sum()
  order = np.argsort(-p)
  enough = np.cumsum(p[order]) >= top_p
  if enough.any():
    p[order[np.argmax(enough) + 1 :]] = 0
  return p / p.sum()


def _drawn(table, temperatures, seed=0, top_p=1.0):
  """`Trajectories` of the toy target, by NumPy."""
  rng, rows = np.random.default_rng(seed), []
  for n, T in enumerate(temperatures):
    ids = [0, *rng.integers(0, V, 1 + n % 4)]  # the first counts as after 0
    prompt = len(ids)
    at = 1.0 if np.isnan(T) else T
    for _ in range(rng.integers(5, 30)):
      kept = 1.0 if np.isnan(T) else top_p
      p = _law(np.asarray(table[ids[-2], ids[-1]], float), at, kept)
      ids.append(rng.choice(V, p=p))
    rows.append((ids[:prompt], ids[prompt:], T))
  return trajectories.make(rows)


def _by_definition(model, student, found, rows, T, top_p):
  """All of a `Worth`, in loops over the answers' tokens; q is drawn at T."""
  p_table = np.asarray(model.params["table"], float)
  q_table = np.asarray(student.params["table"], float)
  ids = np.array(student.ids or range(V))
  texts, alphas, agree, kls = [], [], [], []
  for row in rows:
    x, ratio, alpha = found.tokens[row], [], []
    for t in range(found.prompt_length[row], found.length[row]):
      if t > LENGTH:  # the label of the last position is behind the cut
        break
      p = _law(p_table[x[t - 2], x[t - 1]], T[row], top_p)
      logits = q_table[x[t - 2], x[t - 1]][ids]
      q, free = np.zeros(V), np.zeros(V)
      q[ids] = _law(logits, T[row], top_p)
      free[ids] = _law(logits, T[row] or 1)
      ratio.append(q[x[t]] / (p[x[t]] or 1))  # what p cannot say: given text
      alpha.append(np.minimum(p, q).sum())
      best = ids[np.argmax(logits)]
      agree.append(best == np.argmax(p_table[x[t - 2], x[t - 1]]))
      at = ids[p[ids] > 0]
      mass = p[at].sum()
      kl = (p[at] * np.log(p[at] / free[at])).sum() - mass * np.log(mass or 1)
      kls.append(kl)
    texts.append((np.array(ratio), np.array(alpha)))
    alphas += alpha
  return texts, np.mean(alphas), np.mean(agree), np.mean(kls)


def _survival(ratio, s, j, rule):
  """A_{s,j} of one text."""
  parts = ratio[s : s + j]
  if rule == "token":
    return np.prod(np.minimum(1, parts))
  return min(np.prod(parts[:i]) for i in range(j + 1))


def _expected(texts, rule, k):
  """(total tokens / total rounds, A_k, alpha_k), by loops."""
  tokens = rounds = 0
  above, below, A = 0.0, 0.0, []
  for ratio, alpha in texts:
    n = len(ratio)
    r = np.zeros(n + k + 2)
    r[0] = 1
    for s in range(n):
      reach = [_survival(ratio, s, min(j, n - s), rule) for j in range(k + 1)]
      for j, (a, b) in enumerate(zip(reach, [*reach[1:], 0], strict=True)):
        r[s + j + 1] += r[s] * (a - b)
      if s + k <= n:
        A.append(reach[k])
        w = _survival(ratio, s, k - 1, "token")
        above, below = above + w * alpha[s + k - 1], below + w
    tokens, rounds = tokens + n, rounds + r[:n].sum()
  return tokens / rounds, np.mean(A), above / below


@pytest.mark.parametrize("ids, top_p", [(None, 1.0), ((4, 0, 2, 6, 1), 0.8)])
def test_by_definition(ids, top_p):
  """T = 0, 0.7, 1 and given text, and the mix; a whole head, a trimmed one."""
  model, student = _tabled(ids)
  kinds = [0.0, 0.7, 1.0, np.nan] * 3
  found = _drawn(model.params["table"], kinds, top_p=top_p)
  sampling = _sampling(top_p=top_p)
  got = evaluate.evaluate(
    student, student.params, model, found, sampling=sampling, **OPTIONS
  )
  T = np.where(np.isnan(found.temperature), 1, found.temperature)
  groups = {None: 3, 0.0: 0, 0.7: 1, 1.0: 2}
  assert got.by_temperature.keys() == groups.keys()
  every = {t: range(i, 12, 4) for t, i in groups.items()} | {"mix": range(12)}
  for name, rows in every.items():
    worth = got.mix if name == "mix" else got.by_temperature[name]
    texts, *means = _by_definition(model, student, found, rows, T, top_p)
    assert worth.texts == len(rows)
    assert worth.tokens == sum(len(ratio) for ratio, _ in texts)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    close((worth.alpha, worth.agreement, worth.forward_kl), means)
    for rule in ("token", "block"):
      prediction, S = worth.predictions[rule], worth.speedups[rule]
      mean, low, high = prediction.tokens
      assert (low <= mean + 1e-9).all() and (mean <= high + 1e-9).all()
      for k in range(1, K + 1):
        E_N, A, alpha = _expected(texts, rule, k)
        close((mean[k], prediction.survival[k]), (E_N, A))
        close(worth.alpha_by_depth[k - 1], alpha)
        close(S.mean[k], E_N / (1 + 0.4 * k / 4 + 0.1 * k + 0.05))
      assert S.best == (S.mean[1:].argmax() + 1 if S.mean[1:].max() > 1 else 0)
    greedy = got.by_temperature[0.0]
    assert greedy.alpha == pytest.approx(greedy.agreement, abs=1e-6)
  assert got.mix.alpha not in [x.alpha for x in got.by_temperature.values()]


def test_scalars_and_score():
  model, student = _tabled()
  found = _drawn(model.params["table"], [0.0, 0.7, np.nan])
  how = dict(OPTIONS, sampling=_sampling())
  got = evaluate.evaluate(student, student.params, model, found, **how)
  scalars = evaluate.scalars(got)
  block = got.mix.predictions["block"]
  assert {name.split("/")[0] for name in scalars} == {
    "mix",
    "T=0.0",
    "T=0.7",
    "given",
  }
  assert all(np.isfinite(x) for x in scalars.values())
  assert scalars["mix/E_N_block"] == block.tokens.mean[K]
  assert scalars["mix/A_2_block"] == block.survival[2]
  assert scalars["T=0.7/alpha_1"] == got.by_temperature[0.7].alpha_by_depth[0]
  S = got.mix.speedups["block"]
  assert evaluate.score(got) == scalars["mix/S_block"] == S.mean[1:].max()
  worse = {"table": -student.params["table"]}
  bad = evaluate.evaluate(student, worse, model, found, **how)
  assert evaluate.score(bad) < 1 and bad.mix.speedups["block"].best == 0
  assert evaluate.score(bad) < evaluate.score(got)


def test_rows_without_an_answer():
  model, student = _tabled()
  found = _drawn(model.params["table"], [1.0] * 5)
  how = dict(OPTIONS, sampling=_sampling())
  want = evaluate.evaluate(student, student.params, model, found, **how)
  long = trajectories.make([([0] * (LENGTH + 1), [1, 2], 1.0), ([0, 1], [], 1)])
  both = trajectories.concatenate([long, found])
  got = evaluate.evaluate(student, student.params, model, both, **how)
  assert evaluate.scalars(got) == evaluate.scalars(want)
  with pytest.raises(UserError, match="nothing to learn from"):
    evaluate.evaluate(student, student.params, model, long, **how)


# Small language models


def _answers(temperatures, new=30, **options):
  """(request, Text, Trajectories) of the tiny target's plain decoding."""
  prompts = [[1], [2, 3], [5, 6, 7, 8], [9]]
  ask = request.make(
    prompts, max_new=new, temperature=temperatures, seed=3, **options
  )
  model, params = _model("gqa_untied")
  out = generate.autoregressive(
    model, params, ask, max_new_tokens=new, slots=64
  )
  text = forced.text(ask, out, 64)
  rows = [
    (text.tokens[r, :a].tolist(), text.tokens[r, a:b].tolist(), t)
    for r, (a, b, t) in enumerate(
      zip(text.prompt_length, text.length, temperatures, strict=True)
    )
  ]
  return text, trajectories.make(rows)


def _small(name, ids=None):
  """(teacher, student) of tiny language models."""
  teacher = load.Model(*_model("gqa_untied"), None, None, None)
  model, params = _model(name)
  return teacher, Student(model, {}, params, ids)


@pytest.mark.parametrize("draft_temperature", [None, 0.6])
def test_the_same_as_the_cached_pass(draft_temperature):
  """`forced.of_model` and `predict`, on the same texts."""
  teacher, student = _small("head_dim")
  temperatures = [0.8, 0.0, 0.8, 1.3]
  text, found = _answers(temperatures, top_p=0.9)
  got = evaluate.evaluate(
    student,
    student.params,
    teacher,
    found,
    sampling=_sampling(top_p=0.9),
    draft_temperature=draft_temperature,
    **OPTIONS,
  )
  own = text.sampling
  if draft_temperature is not None:
    fixed = np.full_like(own.temperature, draft_temperature)
    own = own._replace(temperature=fixed)
  log_p, ((log_q, alpha),) = forced.of_model(
    teacher.target, teacher.params, student.model, student.params, text, [own]
  )
  length = text.length - text.prompt_length
  real = np.arange(log_p.shape[1]) < length[:, None]
  log_q = forced.windows(np.where(real, log_q, -np.inf), K)
  texts = predict.Texts(length, log_p, log_q, alpha)
  for rule in ("token", "block"):
    for t, rows in (
      (0.8, [0, 2]),
      (0.0, [1]),
      (1.3, [3]),
      (None, [0, 1, 2, 3]),
    ):
      worth = got.by_temperature[t] if t is not None else got.mix
      some = predict.Texts(*(x[rows] for x in texts))
      want = predict.predict(some, rule)
      mine = worth.predictions[rule]
      close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
      jax.tree.map(close, mine, want)
      assert worth.alpha == pytest.approx(want.alpha, rel=1e-4)
      jax.tree.map(close, worth.speedups[rule], predict.speedups(want, COSTS))


def test_a_draft_that_is_the_target():
  """All is accepted: E[N] is what texts of their lengths allow, n / ceil."""
  teacher, student = _small("gqa_untied")
  _, found = _answers([0.0, 1.0, 1.0, 0.5])
  got = evaluate.evaluate(
    student, student.params, teacher, found, sampling=_sampling(), **OPTIONS
  )
  n = found.length - found.prompt_length
  for worth, rows in ((got.mix, range(4)), (got.by_temperature[1.0], (1, 2))):
    assert worth.agreement == 1
    assert worth.alpha == pytest.approx(1, abs=1e-6)
    assert (
      worth.forward_kl == pytest.approx(0, abs=1e-5)
      or 0.0 in got.by_temperature
    )
    np.testing.assert_allclose(worth.alpha_by_depth, 1, atol=1e-6)
    for rule in ("token", "block"):
      k = np.arange(K + 1)
      bound = n[list(rows)].sum() / (-(-n[list(rows), None] // (k + 1))).sum(0)
      mine = worth.predictions[rule]
      np.testing.assert_allclose(mine.tokens.mean, bound, rtol=1e-5)
      np.testing.assert_allclose(mine.survival, 1, atol=1e-5)


def test_a_trimmed_draft():
  """A token that the draft lacks is never accepted, and p keeps its mass."""
  teacher, student = _small("gqa_untied")
  whole = student.model
  head = lambda params, x: whole.unembed(params, x)[..., list(IDS)]
  cut = whole._replace(unembed=head)
  student = student._replace(model=cut, ids=tuple(IDS))
  text, found = _answers([1.0] * 4)
  got = evaluate.evaluate(
    student, student.params, teacher, found, sampling=_sampling(), **OPTIONS
  ).mix
  answer = np.concatenate(
    [x[a:b] for x, a, b in zip(text.tokens, *text[1:3], strict=True)]
  )
  known = np.isin(answer, IDS)
  assert 0 < known.mean() < 1
  A = got.predictions["token"].survival
  assert A[1] <= known.mean()  # rho is 0 of the others
  assert got.alpha < 1


# A head on the target's features


def _round_by_round(model, draft, params, found, T):
  """[(rho, alpha) [n, K] by start and depth] of each text, as decoding has it.

  Every start is a prefill of its own, and a proposal whose draws are the
  text's.
  """
  config = feature.Config(draft.config, draft.features)
  drafter = feature.make(config, model.target.vocab_size, ids=draft.ids)
  tokens = np.pad(found.tokens, ((0, 0), (0, 64 - found.tokens.shape[1])))
  at = np.broadcast_to(np.arange(64), tokens.shape)
  apply = jax.jit(model.target.apply, static_argnames="features")
  hidden, taps, _ = apply(
    model.params, tokens, at, None, features=draft.features
  )
  logits = np.asarray(model.target.unembed(model.params, hidden), float)
  own = np.zeros(model.target.vocab_size, int)
  own[list(draft.ids)] = np.arange(len(draft.ids))
  spans = list(zip(found.prompt_length, found.length, strict=True))
  row, start = np.array(
    [(r, s) for r, (a, b) in enumerate(spans) for s in range(a, b)]
  ).T
  tree = students.merged(draft.shared, params)
  q = decoded(drafter, tree, tokens, taps, row, start, K, (own, T))
  texts = []
  for r, (a, b) in enumerate(spans):
    laws = np.asarray(q)[row == r]  # [n, K, V]
    ratio, alpha = np.zeros((2, b - a, K))
    for s, j in np.ndindex(b - a, K):
      if a + s + j < b:
        x, p = tokens[r, a + s + j], _law(logits[r, a + s + j - 1], T)
        ratio[s, j] = laws[s, j, x] / p[x]
        alpha[s, j] = np.minimum(p, laws[s, j]).sum()
    texts.append((ratio, alpha))
  return texts


def _expected_by_start(texts, rule, k):
  """(total tokens / total rounds, A_k, alpha_k), by loops."""
  tokens = rounds = 0
  above, below, A = 0.0, 0.0, []
  for ratio, alpha in texts:
    n, r = len(ratio), np.zeros(len(ratio) + k + 2)
    r[0] = 1
    for s in range(n):
      reach = [
        _survival(ratio[s], 0, min(j, n - s), rule) for j in range(k + 1)
      ]
      for j, (a, b) in enumerate(zip(reach, [*reach[1:], 0], strict=True)):
        r[s + j + 1] += r[s] * (a - b)
      if s + k <= n:
        A.append(reach[k])
        w = _survival(ratio[s], 0, k - 1, "token")
        above, below = above + w * alpha[s, k - 1], below + w
    tokens, rounds = tokens + n, rounds + r[:n].sum()
  return tokens / rounds, np.mean(A), above / below


def test_a_feature_head_is_what_its_rounds_are():
  """One unrolled pass: alpha and A by [start, depth], E[N] and S.

  Against every round of a drafter that is asked at every start.
  """
  model, T = trained.teacher(), 0.8
  draft = trained.make(model, **trained.HEAD | dict(head=200))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: x + np.float32(0.2 * rng.normal(size=x.shape)), draft.params
  )
  draw = lambda n: rng.integers(0, 300, n).tolist()
  sizes = [(1, 9), (4, 2), (7, 16), (20, 1)]
  found = trajectories.make([(draw(a), draw(b), T) for a, b in sizes])
  got = evaluate.evaluate(
    draft, params, model, found, sampling=_sampling(), **OPTIONS
  ).mix
  texts = _round_by_round(model, draft, params, found, T)
  close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6)
  close(got.alpha, np.concatenate([alpha[:, 0] for _, alpha in texts]).mean())
  for rule in ("token", "block"):
    prediction, S = got.predictions[rule], got.speedups[rule]
    for k in range(1, K + 1):
      E_N, A, alpha = _expected_by_start(texts, rule, k)
      close((prediction.tokens.mean[k], prediction.survival[k]), (E_N, A))
      close(got.alpha_by_depth[k - 1], alpha)
      close(S.mean[k], E_N / (1 + 0.4 * k / 4 + 0.1 * k + 0.05))
  first, *_, last = got.alpha_by_depth
  assert abs(first - last) > 0.001 and got.predictions["token"].survival[K] > 0


# Costs


def test_given_costs():
  found = costs.given(_asked(), 4)
  c, v, o = timing.units(found, 4)
  assert c == 0.1 and found.modelled
  np.testing.assert_allclose(v, [1, 1.1, 1.2, 1.3, 1.4])
  np.testing.assert_allclose(o, 0.05)
  free = costs.given(_asked(draft=0.0, overhead=0), 1)
  assert timing.units(free, 1)[0] == 0 and free.cost_ratio == np.inf
  survival = np.array([1, 0.8, 0.5])
  S = theory.speedup_from_costs(survival, c, v[:3], o[:3])
  np.testing.assert_allclose(S[2], 2.3 / (1.2 + 0.2 + 0.05))


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(draft=-1.0), "costs.draft must be a number >= 0.*got -1"),
    (dict(overhead=np.inf), "costs.overhead must be"),
    (dict(draft=np.nan), "costs.draft must be"),
    (dict(verify=()), r"pairs .*such as \(\(1, 1.0\), \(5, 1.35\)\), got \(\)"),
    (dict(verify=((2, 1.0), (9, 2))), "tokens rising from 1"),
    (dict(verify=((1, 1.0), (9, 2), (5, 1))), "tokens rising from 1"),
    (dict(verify=((1, 1.0), (9, 0))), "costs above 0"),
    (dict(verify=(1.0, 1.1)), "must be pairs"),
    (dict(verify=((1, 1.0), (4, 1.2))), r"ends at 4 .*add \(5, cost\)"),
  ],
)
def test_bad_costs(options, words):
  with pytest.raises(UserError, match=words) as e:
    costs.given(_asked(**options), 4)
  assert "\n" not in str(e.value)


HEAD = dict(name="feature", layers=(), features=(0, -1), depth_weights=(1.0,))


@pytest.mark.parametrize(
  "kind", [HEAD, pytest.param({}, marks=pytest.mark.slow)]
)
def test_measured_costs(monkeypatch, kind):
  """Timed as decoding has both: a head of its own on a CPU, blocks of columns.

  The draft is tied and shares the target's embedding. No clock is looked at.
  """
  config = tiny.get_config()
  teacher = load.whole(load.model(load.random(config.architecture)))
  config.draft = dict(
    name="lm",
    weights="",
    layers=(0, -1),
    architecture={},
    features=(),
    depth_weights=(),
    embedding="shared",
    head=0,
  )
  config.draft.update(kind)
  draft = students.make(config, teacher)
  seen, measure = {}, costs.timing.measure

  def watched(target, params, drafts, **options):
    seen.update(params=params, own=drafts[""].params, **options)
    seen.update(features=drafts[""].drafter.features)
    return measure(target, params, drafts, **options)

  monkeypatch.setattr(costs.timing, "measure", watched)
  found = costs.measured(
    draft,
    draft.params,
    teacher,
    num_draft=2,
    slots=128,
    context=20,
    sampling=dict(temperature=0.7),
    turns=1,
  )
  assert list(found.round) == [1, 2] and list(found.target) == [1, 2, 3]
  assert found.batch == 1 and not found.modelled
  for cost in (found.plain, found.draft, *found.round.values()):
    assert 0 < cost.median < 100
  assert seen["slots"] == 128 and seen["sampling"] == dict(temperature=0.7)
  if kind:
    assert seen["features"] == (0, config.architecture.num_hidden_layers - 1)
    assert seen["own"]["fuse"]["kernel"].ndim == 3
  for params in (seen["params"], seen["own"]):
    assert params["head"].shape == (6, 64, 64)  # 384 logits in blocks of 64
    kernel = params["layer_0"]["gate_up"]["kernel"]
    assert kernel.shape == (6, 64, 64) and kernel.dtype == np.float32
  c, v, o = timing.units(found, 2)  # they reach from 0 to K
  assert np.isfinite([c, *v, *o]).all()
  with pytest.raises(UserError, match="round of K = 3 does not fit 4 tokens"):
    how = dict(num_draft=3, slots=4, context=1, sampling={})
    costs.measured(draft, draft.params, teacher, **how)
