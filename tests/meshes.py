"""What tests run in a process of its own, on eight devices that are one CPU.

  JAX_NUM_CPU_DEVICES=8 python tests/meshes.py CASE [ARGUMENT ...]

The last line is JSON. Each case compares a mesh with one device.
"""

import functools
import json
import math
import re
import sys

import jax
import ml_collections
import numpy as np

from specjax import checkpoint, generate, placing, request, sharding, types
from specjax import step as steps
from specjax.drafters import feature, lm, ngram, replay
from specjax.models import load

ARCHITECTURE = dict(
  model_type="llama",
  vocab_size=288,
  hidden_size=64,
  intermediate_size=128,
  num_hidden_layers=2,
  num_attention_heads=16,
  num_key_value_heads=8,
  max_position_embeddings=256,
  rope_theta=10_000.0,
  rms_norm_eps=1e-5,
  tie_word_embeddings=False,
)
# SmolLM2's heads, which neither 2 nor 4 nor 8 devices divide
NINE = ARCHITECTURE | dict(
  hidden_size=72, num_attention_heads=9, num_key_value_heads=3
)
# each part of a matrix or a cache is larger than anything that has to travel
WIDE = ARCHITECTURE | dict(hidden_size=320, intermediate_size=512)
PROMPTS = [[1], [2, 3], [5, 6] * 40, [9] * 30, [3, 1, 4, 1, 5], [8], [0] * 2]
PROMPTS += [[7]]
N, K = 20, 3


def mesh_of(shape):
  sizes = tuple(map(int, shape.split("x")))
  return sharding.make(ml_collections.ConfigDict({"mesh": sizes}))


def asked(temperature):
  """Ragged rows, each of its own seed and limit."""
  return request.make(
    PROMPTS,
    max_new=[N - i for i in range(len(PROMPTS))],
    seed=np.arange(len(PROMPTS)),
    temperature=temperature,
  )


def draft_of(kind, model, earlier=None):
  """(Drafter, parameters) of a method on the mesh of a `load.Model`.

  Args:
    earlier: [B, N] tokens for `replay`.
  """
  if kind == "ngram":
    return ngram.make(288), ()
  if kind == "replay":
    return replay.make(288), replay.Params(earlier, np.float32(0.8))
  if kind == "lm":
    part = load.part(model, layers=(0,))
    return lm.make(part.target, 288), part.params
  whole = load.part(load.whole(model), layers=(1,))
  config = feature.Config(whole.loaded, (0, 1))
  params = {**whole.params, **feature.begin(config, 1.0)}
  drafter = sharding.drafter(feature.make(config, 288), model.mesh)
  if model.mesh is not None:
    params = sharding.params(model.mesh, whole.loaded, params)
  return drafter, params


def decode(shape, *kinds, architecture=ARCHITECTURE):
  """Which of some drafts and verifiers give the tokens of one device.

  And, of drafts, the very acceptances: a draft that a mesh had spoilt would
  still be corrected by the target.

  Args:
    kinds: DRAFT:VERIFIER; at T = 0, in coupled mode at other temperatures.
  """
  mixed = [0.0, 0.7, 1.0, 0.0, 1.5, 0.5, 1.0, 0.7]
  opened = load.random(architecture)
  plain, accepted, found, told, compiled = {}, {}, {}, {}, []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: "backend_compile" in event and compiled.append(1)
  )
  for mesh in (None, mesh_of(shape)):
    model = load.model(opened, mesh=mesh)
    for name, temperature in (("greedy", 0.0), ("mixed", mixed)):
      call = model.target, model.params, asked(temperature)
      parts = generate.stream(*call, max_new_tokens=N, chunk_steps=7)
      next(parts)
      compiled.clear()
      tokens = list(parts)[-1].tokens
      told["compiled again"] = len(compiled)
      found[f"plain, {name}"] = bool((tokens == plain.get(name, tokens)).all())
      plain.setdefault(name, tokens)
    for kind in kinds:
      name, verifier = kind.split(":")
      coupled = verifier == "coupled"
      want = plain["mixed" if coupled else "greedy"]
      drafter, params = draft_of(name, model, want)
      out = generate.speculative(
        *(model.target, drafter, model.params, params),
        asked(mixed if coupled else 0.0),
        num_draft=K,
        max_new_tokens=N,
        verifier=verifier,
      )
      before = accepted.setdefault(kind, out.accepted)
      same = (out.tokens == want).all() and (out.accepted == before).all()
      found[kind] = found.get(kind, True) and bool(same)
      told[f"{kind} accepted"] = int(out.accepted.sum())
  told["parts"] = len(
    {str(s.index) for s in model.params["head"].addressable_shards}
  )
  return {"same": found, **told}


def collectives(shape, kind="plain"):
  """All that a step, or a round with a draft, sends over a mesh.

  Returns:
    sent: [elements, kind, where] of each; part: elements of the smallest part
    of a matrix or a cache that a device holds.
  """
  wide = kind != "plain"
  opened = load.random(WIDE if wide else ARCHITECTURE)
  model = load.model(opened, mesh=mesh_of(shape))
  call, draft = (model.target, model.params), None
  if wide:
    draft = types.Draft(*draft_of(kind, model), K)
  state = generate.start(*call, asked(0.0), max_new_tokens=N, draft=draft)
  if wide:
    both = model.target, draft.drafter, model.params, draft.params
    how = dict(num_draft=K, verifier=draft.verifier)
    lowered = generate._speculate.lower(*both, state, np.int32(8), **how)
  else:
    lowered = generate._advance.lower(*call, state, np.int32(8))
  kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
  line = rf'= \w+\[([\d,]*)\]\S* ({kinds})\(.*op_name="([^"]*)"'
  size = lambda text: math.prod(int(n) for n in text.split(",") if n)
  found = re.findall(line, lowered.compile().as_text())
  sent = [(size(shape), kind, where) for shape, kind, where in found]
  held = model.params, draft and draft.params, state.cache, state.draft
  parts = [
    x.addressable_shards[0].data.size
    for x in jax.tree.leaves(held)
    if x.ndim > 1 and x.size > len(PROMPTS) * WIDE["hidden_size"]
  ]
  return {"sent": sent, "part": min(parts)}


def restore(folder):
  """Save a state of training on 4x2 and restore it elsewhere."""
  how = dict(learning_rate=1e-3, warmup=0.0, beta1=0.9, beta2=0.95)
  how = ml_collections.ConfigDict(how | dict(weight_decay=0.0, clip=1.0))
  adam = steps.optimiser(how, 10)
  model = load.whole(load.model(load.random(ARCHITECTURE)))
  config, first = model.loaded, steps.start(model.params, adam)
  shapes = jax.eval_shape(lambda x: x, first)
  like = lambda mesh: placing.shapes(mesh, config, shapes)
  on = placing.put(first, like(mesh_of("4x2")))
  held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(on)]
  whole = [x.nbytes for x in jax.tree.leaves(on)]
  with checkpoint.opened(folder, 1) as saves:
    checkpoint.save(saves, 1, on, {})
    checkpoint.wait(saves)
    found = {}
    for name in ("2x1", "1x2", "2x4", "none"):
      where = shapes if name == "none" else like(mesh_of(name))
      got = checkpoint.restore(saves, 1, where)
      same = jax.tree.map(lambda x, y: bool((x == y).all()), first, got)
      devices = {len(x.sharding.device_set) for x in jax.tree.leaves(got)}
      found[name] = [all(jax.tree.leaves(same)), sorted(devices)]
  return {"found": found, "share": sum(held) / sum(whole)}


if __name__ == "__main__":
  cases = dict(decode=decode, collectives=collectives, restore=restore)
  cases["decode_nine"] = functools.partial(decode, architecture=NINE)
  print(json.dumps(cases[sys.argv[1]](*sys.argv[2:])))
