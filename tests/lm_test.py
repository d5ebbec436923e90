"""A draft model: its cache, its vocabulary and the law that it proposes."""

import dataclasses
import functools
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import outcomes
import pytest
import toy
from tokenizers import Tokenizer, models

from specjax import cache as kv
from specjax import generate, loop, metrics, request, types
from specjax.drafters import chain, lm
from specjax.models import load, transformer, weights

LLAMA = pathlib.Path(__file__).parent / "data" / "llama"
V, N = 96, 200
PROMPTS = [[1], [2, 3], list(range(5, 35))]


@functools.cache
def _model(name):
  """(target, params) of a tiny model whose layers matter."""
  source = load.source(str(LLAMA / name))
  params, config = weights.load(source, dtype=jnp.float32, untie=True)
  return transformer.make(config), params


def _run(target, draft, ask, **options):
  """Speculate; target and draft are pairs of a model and its parameters."""
  drafter = lm.make(
    draft[0], target[0].vocab_size, ids=options.pop("ids", None)
  )
  most = int(ask.max_new.max())
  return generate.speculative(
    target[0],
    drafter,
    target[1],
    draft[1],
    ask,
    max_new_tokens=most,
    **options,
  )


# Draft = target


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
  """One folder, loaded twice."""
  folder = tmp_path_factory.mktemp("twins") / "model"
  shutil.copytree(LLAMA / "gqa_untied", folder)
  names = {chr(33 + i): i for i in range(94)}
  Tokenizer(models.BPE(names, [])).save(str(folder / "tokenizer.json"))
  pair = [load.model(str(folder)) for _ in range(2)]
  buffers = [
    {x.unsafe_buffer_pointer() for x in jax.tree.leaves(m.params)} for m in pair
  ]
  assert len(buffers[0]) == len(buffers[1]) and not buffers[0] & buffers[1]
  return [(m.target, m.params) for m in pair]


@pytest.mark.parametrize(
  "num_draft",
  [1, 8, *(pytest.param(K, marks=pytest.mark.slow) for K in (2, 4))],
)
def test_a_draft_that_is_the_target(twins, num_draft):
  """T2, B04: 200 tokens at T = 0 and 1, not one rejection, alpha = 1.

  The draft is fed one by one and the target K + 1 at a time, so that their
  laws differ by rounding: sum min(p, q) is 1 only to 1e-5 at T = 1.
  """
  ask = request.make(
    PROMPTS * 2, max_new=N, temperature=[0, 0, 0, 1, 1, 1], seed=7
  )
  out = _run(*twins, ask, num_draft=num_draft)
  assert out.length.tolist() == [N] * 6
  t = np.arange(N)
  drafted = t % (num_draft + 1) < num_draft
  for row in range(6):
    np.testing.assert_array_equal(out.accepted[row], drafted)
    np.testing.assert_array_equal(out.round[row], t // (num_draft + 1))
  np.testing.assert_array_equal(~np.isnan(out.overlap), out.accepted)
  assert (out.overlap[:3, drafted] == 1).all()
  np.testing.assert_allclose(out.overlap[3:, drafted], 1, atol=1e-5)
  got = metrics.acceptance(out, num_draft)
  assert got.alpha == pytest.approx(1, abs=1e-6)
  plain = generate.autoregressive(*twins[0], ask, max_new_tokens=N)
  np.testing.assert_array_equal(out.tokens[:3], plain.tokens[:3])


# Its cache


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="num_draft")
def _round(target, draft, params, draft_params, state, num_accepted, num_draft):
  """A round that accepts so many [B]: u = 0 keeps, u = inf rejects."""
  i = jnp.arange(num_draft)
  u = jnp.where(i < num_accepted[:, None], 0.0, jnp.inf)
  noise = generate.keyed_noise(state, num_draft, "token")._replace(accept=u)
  return generate.round(
    target,
    lm.make(draft, target.vocab_size),
    params,
    draft_params,
    state,
    noise,
    num_draft=num_draft,
    verifier="token",
  )


def _slots(cache, used):
  """The slots before used [B], the others zero, as arrays [B, S, ...]."""
  B = len(used)

  def part(x, axis):
    x = np.moveaxis(np.asarray(x), axis, 1)
    x = x.reshape(B, -1, *x.shape[1:]).swapaxes(1, 2)  # [B, S, G, d]
    real = np.arange(x.shape[1]) < used[:, None]
    return np.where(real[:, :, None, None], x, 0)

  return [(part(layer.k, 2), part(layer.v, 1)) for layer in cache]


@pytest.mark.parametrize(
  "plan", [[3], [0], [1], [3, 0, 2, 1, 3], ["-", 3, "-", "-", 0, 3, "-", 2]]
)
def test_its_cache_is_a_fresh_prefill(plan):
  """B04: after rounds that accept all, none, some, and rounds of K = 0 ("-").

  Slots 0 .. length - 3 at least, and once the next round has fed the last two
  tokens 0 .. length - 1. Every row begins elsewhere in the plan.
  """
  K, prompts = 3, [*PROMPTS, [7] * 63, [8] * 64, [9] * 65]
  (target, params), (draft, draft_params) = (
    _model("gqa_untied"),
    _model("head_dim"),
  )
  ask = request.make(prompts, max_new=60, temperature=1.0)
  options = types.Draft(lm.make(draft, V), draft_params, K)
  state = loop.start(target, params, ask, max_new_tokens=60, draft=options)
  prefill = jax.jit(kv.prefill, static_argnums=0)
  counts = [n for n in plan if n != "-"]
  for t in range(2 * len(plan)):
    k = 0 if plan[t % len(plan)] == "-" else K
    n = [counts[(t + row) % len(counts)] for row in range(len(prompts))]
    n = np.minimum(np.array(n), k)
    before = np.asarray(state.length)
    state = _round(target, draft, params, draft_params, state, n, num_draft=k)
    length = np.asarray(state.length)
    np.testing.assert_array_equal(length, before + n + 1)
    fresh = prefill(draft, draft_params, state.tokens, state.length + 1)
    used = np.maximum(before, length - 2)
    got, want = _slots(state.draft, used), _slots(fresh, used)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-5), got, want
    )


# Its vocabulary


def _resized(vocab_size):
  """The tiny model with so many ids; new ones have huge logits."""
  target, params = _model("gqa_untied")
  more = max(vocab_size - V, 0)
  config = load.source(str(LLAMA / "gqa_untied")).config
  config = dataclasses.replace(config, vocab_size=vocab_size)
  rng = np.random.default_rng(0)
  embed = rng.normal(0, 9, (more, config.width))
  params = params | dict(
    embed=jnp.concatenate([params["embed"], embed])[:vocab_size],
    head=jnp.concatenate([params["head"], embed.T], 1)[:, :vocab_size],
  )
  return transformer.make(config), jax.tree.map(jnp.float32, params)


@pytest.mark.parametrize("vocab_size", [83, 104])
def test_padded_vocabularies(vocab_size):
  """B11: what one of the two models lacks has q = 0; all else is as before."""
  target, draft = _model("gqa_untied"), _resized(vocab_size)
  ask = request.make(PROMPTS * 2, max_new=90, temperature=[0] * 3 + [1] * 3)
  out = _run(target, draft, ask, num_draft=4)
  plain = generate.autoregressive(*target, ask, max_new_tokens=90)
  np.testing.assert_array_equal(out.tokens[:3], plain.tokens[:3])
  assert (out.finish_reason == types.LENGTH).all()
  common = min(vocab_size, V)
  assert (out.tokens[out.accepted] < common).all()
  tested = ~np.isnan(out.overlap)
  if vocab_size >= V:  # padding is nothing: the draft is the target
    np.testing.assert_array_equal(out.accepted, tested)
    return
  for row in range(6):  # the target says what the draft lacks and is fed it
    lacking = np.flatnonzero(out.tokens[row] >= common)
    assert len(lacking) and not out.accepted[row, lacking].any()
    assert out.accepted[row, lacking[0] :].any()
  assert 0.5 < out.overlap[3:][tested[3:]].mean() < 1


def _proposal(model, params, *, num_draft, texts, ids=None, seed=0):
  ask = request.make(texts, max_new=8, temperature=0.7, seed=seed)
  drafter = lm.make(model, V, ids=ids)
  options = types.Draft(drafter, params, num_draft)
  target, target_params = _model("gqa_untied")
  state = loop.start(
    target, target_params, ask, max_new_tokens=8, draft=options
  )

  @jax.jit
  def run(params, state):
    context = types.Context(
      state.tokens, state.length, state.draft_sampling, num_draft
    )
    noise = generate.keyed_noise(state, num_draft, "token")
    return drafter.propose(params, state.draft, context, noise)[0]

  return jax.device_get(run(params, state))


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, length):
  positions = jnp.arange(len(tokens))[None]
  hidden, _, _ = model.apply(params, tokens[None], positions, None)
  return model.unembed(params, hidden[0, length - 1])


def _by_definition(model, params, text, kept):
  """The law [V] behind a text: one pass, a softmax over the kept logits."""
  tokens = np.zeros(40, np.int32)
  tokens[: len(text)] = np.minimum(text, model.vocab_size - 1)
  logits = np.asarray(_logits(model, params, tokens, len(text)), np.float64)
  law = np.zeros(V)
  weight = np.exp(logits[: len(kept)] / 0.7)
  law[kept] = weight / weight.sum()
  return law


IDS = (95, 4, 17, 0, 60, 33, 8, 2, 71, 50)


@pytest.mark.parametrize("vocab_size, ids", [(83, None), (96, IDS)])
def test_its_law(vocab_size, ids):
  """B05, B11: q is the draft's law over the ids that both have, 0 elsewhere."""
  model, params = _resized(vocab_size)
  kept = list(ids or range(min(vocab_size, V)))
  if ids:
    config = load.source(str(LLAMA / "gqa_untied")).config
    config = dataclasses.replace(config, head_size=len(ids))
    model = transformer.make(config)
    params = params | dict(head=params["head"][:, np.array(ids)])
  texts = [[1], [2, 90], [*range(5, 35), 95]]
  got = _proposal(model, params, num_draft=3, texts=texts, ids=ids)
  assert got.length.tolist() == [3] * 3
  for text, draft, probs in zip(texts, got.tokens, got.probs, strict=True):
    for x, q in zip(draft.tolist(), probs, strict=True):
      want = _by_definition(model, params, text, kept)
      np.testing.assert_allclose(q, want, atol=1e-5)
      assert x in kept and (q[np.setdiff1d(np.arange(V), kept)] == 0).all()
      text = [*text, x]


def test_trimmed_head():
  """At T = 0 the plain answer, whatever is kept; else only of what is."""
  target, ids = _model("gqa_untied"), tuple(range(95, 0, -2))
  config = load.source(str(LLAMA / "gqa_untied")).config
  config = dataclasses.replace(config, head_size=len(ids))
  head = target[1]["head"][:, np.array(ids)]
  draft = transformer.make(config), target[1] | dict(head=head)
  ask = request.make(PROMPTS * 2, max_new=90, temperature=[0] * 3 + [1] * 3)
  out = _run(target, draft, ask, num_draft=4, ids=ids)
  plain = generate.autoregressive(*target, ask, max_new_tokens=90)
  np.testing.assert_array_equal(out.tokens[:3], plain.tokens[:3])
  assert (out.tokens[out.accepted] % 2 == 1).all()
  assert out.accepted.mean() > 0.2 and (out.tokens % 2 == 0).any()


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("V, ids", [(3, None), (4, (3, 0, 2)), (3, (1,))])
def test_joint_law(V, ids, verifier):
  """Of 4 tokens in float64, the draft's head whole, trimmed or reordered."""
  p, q = outcomes.laws(V, 3), outcomes.laws(V, 4)
  model = toy.trigram(V)
  if ids:
    kept = lambda table, hidden: hidden[..., np.array(ids)]
    model = model._replace(unembed=kept)
  with jax.enable_x64(True):
    q = jnp.log(jnp.asarray(q) + 1e-3)  # none of the kept ids all zero
    got = outcomes.joint_law(
      p,
      lm.make(model, V, ids=ids),
      q,
      [0],
      K=2,
      T=4,
      choices=len(ids or range(V)),
      verifier=verifier,
    )
  assert outcomes.error(got, outcomes.target_law(p, (0, 0), 4)) <= 1e-12


@pytest.mark.parametrize(
  "ids, said",
  [
    ((), "in 0..95"),
    ((0, 96), "in 0..95"),
    ((-1,), "in 0"),
    ((3, 3), "differ"),
  ],
)
def test_bad_ids(ids, said):
  with pytest.raises(ValueError, match=said):
    lm.make(_model("bias")[0], V, ids=ids)


# What it costs and where it ends


def test_equal_arguments_are_one_drafter():
  """B09: made again, nothing compiles again."""
  model = _model("bias")[0]
  assert lm.make(model, V) is lm.make(model, V)
  assert lm.make(model, V, ids=(1, 2)) is lm.make(model, V, ids=(1, 2))
  assert lm.make(model, V, ids=(1, 2)) is not lm.make(model, V, ids=(2, 1))


def test_a_context_that_is_too_short():
  """Both numbers are named; one token less fits."""
  target = toy.trigram(11), toy.table(11)
  draft = toy.trigram(11, context=40), toy.table(11, seed=1)
  ask = lambda n: request.make([[1] * 30, [2]], max_new=[n, 20])
  with pytest.raises(ValueError, match="holds 40 tokens.* needs 41"):
    _run(target, draft, ask(11), num_draft=4)
  plain = generate.autoregressive(*target, ask(10), max_new_tokens=20)
  out = _run(target, draft, ask(10), num_draft=4)
  np.testing.assert_array_equal(out.tokens, plain.tokens)


@pytest.mark.parametrize("batch, num_draft", [(1, 4), (3, 1)])
def test_no_copy_in_the_loop(batch, num_draft):
  """Both caches and the laws [B, K, V] are written in place."""
  (target, params), (draft, draft_params) = (
    _model("gqa_untied"),
    _model("head_dim"),
  )
  ask = request.make(PROMPTS[:batch], max_new=12, temperature=1.0)
  options = types.Draft(lm.make(draft, V), draft_params, num_draft)
  state = loop.start(target, params, ask, max_new_tokens=12, draft=options)
  text = (
    generate._speculate.lower(
      target,
      options.drafter,
      params,
      draft_params,
      state,
      np.int32(4),
      num_draft=num_draft,
      verifier="token",
    )
    .compile()
    .as_text()
  )
  arrays = jax.tree.leaves((state.cache, state.draft))
  shapes = {x.shape for x in arrays} | {(batch, num_draft, V)}
  names = {f"f32[{','.join(map(str, shape))}]" for shape in shapes}
  assert len(names) == 5 and all(name in text for name in names)
  copies = re.findall(r"= (f32\[[\d,]*\])\S* copy\(", text)
  assert not names & set(copies)


def test_x64_changes_nothing():
  """B59: a law of float64, of no draft too, would draw other tokens."""
  ids, target = (9, 1, 4), toy.trigram(11)
  kept = lambda table, hidden: hidden[..., np.array(ids)]
  draft = target._replace(unembed=kept), toy.table(11, seed=1)
  pair = (target, toy.table(11)), draft
  ask = request.make([[1], [2, 3]], max_new=60, temperature=1.0, seed=3)
  want = _run(*pair, ask, num_draft=2, ids=ids)
  with jax.enable_x64(True):
    got = _run(*pair, ask, num_draft=2, ids=ids)
    assert chain.nothing(1, 11).probs.dtype == jnp.float32
  jax.tree.map(np.testing.assert_array_equal, got, want)
