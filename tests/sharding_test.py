"""A mesh of devices changes where things lie, and no token.

What needs eight devices runs in a process of its own: `meshes.py`.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from configs import smollm2, tiny, tiny_train
from specjax import (
  cache,
  generate,
  memory,
  multihost,
  placing,
  recipe,
  settings,
  sharding,
  types,
)
from specjax.drafters import lm
from specjax.errors import UserError
from specjax.models import families, load, matrix, transformer

ROOT = Path(__file__).parents[1]
CONFIG = families.from_hf(meshes.ARCHITECTURE, "here")
SMOLLM2 = families.from_hf(dict(smollm2.get_config("random").architecture), "")


def _mesh(data, model):
  """Enough of a mesh to ask where things would lie; it has no devices."""
  return AbstractMesh((data, model), sharding.AXES)


def _run(*command, devices=8, seconds=500, **env):
  """What a process of its own, with so many devices, leaves and says."""
  env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), **env}
  env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | env
  return subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    timeout=seconds,
  )


def _case(*arguments):
  done = _run("tests/meshes.py", *map(str, arguments))
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout.splitlines()[-1])


# --- one device -------------------------------------------------------------


def test_one_device_has_no_mesh():
  """The programs of 1x1 are those of a code that knows of no mesh."""
  assert sharding.make(tiny.get_config()) is None
  model = load.model(load.random(meshes.ARCHITECTURE), mesh=None)
  assert model.target is transformer.make(model.loaded)
  assert model.loaded.shards == 1 and model.target.place is None
  made = lambda: generate.start(
    model.target, model.params, meshes.asked(0.0), max_new_tokens=meshes.N
  )
  state = jax.eval_shape(made)
  call = model.target, model.params, state, np.int32(8)
  text = generate._advance.lower(*call).as_text()
  assert "num_partitions = 1" in text
  # JAX's own, of the keys: of no mesh
  assert set(re.findall(r"<@(\w+)", text)) <= {"empty_mesh"}


def test_a_mesh_is_checked_before_anything_is_loaded():
  def refused(check, config, **changes):
    config.update(changes)
    with pytest.raises(UserError) as e:
      check(config)
    return str(e.value)

  check = lambda config: settings.check(config)
  assert "(data, model), such as 2,4, got 8" in refused(
    check, tiny.get_config(), mesh=(8,)
  )
  assert "got 0,2" in refused(check, tiny.get_config(), mesh=(0, 2))
  assert refused(check, tiny.get_config(), mesh=(4, 2), batch_size=7).endswith(
    "type --config.batch_size=8"
  )
  assert refused(
    recipe.check, tiny_train.get_config(), mesh=(3, 1), batch_size=8
  ).endswith("type --config.batch_size=9")
  said = refused(sharding.make, tiny.get_config(), mesh=(512, 2))
  assert "needs 1024 devices" in said
  assert f"there {'is' if jax.device_count() == 1 else 'are'}" in said
  assert f"{jax.device_count()}; type" in said


def test_a_run_may_go_on_with_another_mesh():
  """A mesh decides no result, so it is no other run (B35)."""
  old = recipe.plain(tiny_train.get_config())
  new = old | {"mesh": [2, 4]}
  assert not recipe.differing(old, new)
  del old["mesh"]  # one of before there were meshes
  assert not recipe.differing(old, new)


# --- the rules --------------------------------------------------------------


def _specs(config, mesh, **how):
  spec = lambda path, x: sharding.spec(mesh, config, path, x.shape, **how)
  tree = sharding.map_named(spec, transformer.shapes(config))
  return tree | tree["layer_0"]


def test_where_each_array_lies():
  found = _specs(CONFIG, _mesh(2, 4))
  assert found["embed"] == P("model", None)
  assert found["head"] == P(None, "model")
  for name, how in {
    "qkv": P(None, "model"),
    "out": P("model", None),
    "gate_up": P(None, "model"),
    "down": P("model", None),
  }.items():
    assert found[name]["kernel"] == how
  assert found["attn_norm"]["scale"] == P(None)


def test_what_is_trained_is_cut_over_all_devices():
  found = _specs(CONFIG, _mesh(2, 4), over_data=True)
  assert found["embed"] == P("model", "data")
  assert found["qkv"]["kernel"] == P("data", "model")
  assert found["down"]["kernel"] == P("model", "data")
  assert found["norm"]["scale"] == P(None)


def test_what_an_axis_does_not_divide_is_replicated_and_said():
  """SmolLM2: 3 key heads, 9 query heads."""
  mesh = _mesh(2, 4)
  found = _specs(SMOLLM2, mesh)
  assert found["qkv"]["kernel"] == found["out"]["kernel"] == P(None, None)
  assert found["down"]["kernel"] == P("model", None)
  assert sharding.undivided(mesh, SMOLLM2) == (
    "mesh 2x4: 4 devices do not divide 3 key and value heads: replicated on"
    " each of them"
  )
  assert sharding.undivided(_mesh(8, 1), SMOLLM2) is None
  assert sharding.undivided(mesh, CONFIG) is None
  assert matrix.shards(sharding.cut(mesh, SMOLLM2)) == {
    "qkv": 1,
    "gate_up": 4,
  }


def test_memory_of_one_device(monkeypatch):
  parts = {"weights": 800, "cache": 80, "probabilities": 20}
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert memory.on(_mesh(2, 4), parts) == {
    "weights": 200,
    "cache": 10,
    "probabilities": 10,
  }
  assert memory.on(None, parts) == parts
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert memory.on(_mesh(2, 4), parts)["weights"] == 1600  # one host has all


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_of_fused_matrices_hold_some_of_each(shards):
  widths = (16, 8, 8)
  x = np.arange(32)
  at = matrix.order(widths, shards)
  first = x[at][: 32 // shards]
  share = [n // shards for n in widths]
  starts = 0, 16, 24
  assert first.tolist() == [
    i for s, n in zip(starts, share, strict=True) for i in range(s, s + n)
  ]
  stored = jnp.asarray(x[at])[None, :, None]
  for start, stop in ((0, 16), (16, 24), (24, 32), (0, 24)):
    got = matrix.cut(stored, start, stop, shards, axis=1)[0, :, 0]
    assert sorted(got.tolist()) == list(range(start, stop))
  both = matrix.cut(stored, 0, 24, shards, axis=1)
  k = matrix.cut(both, 16, 24, shards, axis=1)
  assert k[0, :, 0].tolist() == list(range(16, 24))


# --- eight devices ----------------------------------------------------------

EVERY = ["lm:block", "lm:coupled", "feature:block", "feature:coupled"]
EVERY += ["ngram:token", "ngram:coupled", "replay:block", "replay:coupled"]


def test_tokens_of_one_device():
  """Both decoders, ragged rows, T = 0 and sampled, streamed in chunks."""
  found = _case("decode", "2x4", "lm:coupled")
  assert all(found["same"].values()), found
  assert found["compiled again"] == 0
  assert found["lm:coupled accepted"] > 10
  assert found["parts"] == 4  # the head is in four, on two devices each


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1x8", "2x4", "8x1"])
def test_tokens_of_one_device_for_every_draft(shape):
  found = _case("decode", shape, *EVERY)
  assert all(found["same"].values()), found
  assert found["compiled again"] == 0
  assert all(found[f"{kind} accepted"] > 0 for kind in EVERY), found


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["8x1", "2x4"])
def test_tokens_of_one_device_for_heads_that_are_not_divided(shape):
  """SmolLM2's 9 and 3: replicated over 4 devices, beside an MLP in parts."""
  kinds = ["lm:block", "feature:coupled"]
  found = _case("decode_nine", shape, *kinds)
  assert all(found["same"].values()), found
  assert found["parts"] == int(shape[-1])  # of the head, whose ids are divided


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "feature"])
@pytest.mark.parametrize("shape", ["1x8", "2x4", "8x1"])
def test_only_activations_travel_in_a_round(shape, kind):
  """Drafting, verification and what follows: no matrix, no cache, no part."""
  found = _case("collectives", shape, kind)
  widest = max(size for size, _, _ in found["sent"])
  widths = meshes.WIDE["vocab_size"], meshes.WIDE["hidden_size"]
  most = len(meshes.PROMPTS) * (meshes.K + 1) * max(widths)  # of a target call
  assert widest <= most < found["part"], found


@pytest.mark.slow
def test_only_activations_travel():
  """Never a matrix or a cache: a sum behind attention, one behind the MLP."""
  found = _case("collectives", "1x8")["sent"]
  layers = [where for _, _, where in found if "layer_" in where]
  assert len(layers) == 2 * meshes.ARCHITECTURE["num_hidden_layers"], found
  assert all("dot_general" in where for where in layers)
  rows = len(meshes.PROMPTS)
  widest = rows * meshes.ARCHITECTURE["vocab_size"]  # the logits
  assert max(size for size, _, _ in found) == widest
  assert len(found) == len(layers) + 2  # and the embedding
  whole = _case("collectives", "8x1")["sent"]
  assert max(size for size, _, _ in whole) <= 2 * rows  # indices


def test_a_state_is_restored_on_other_devices(tmp_path):
  """Saved on 4x2, equal on every other mesh and on none (B35)."""
  found = _case("restore", tmp_path)
  assert found["found"] == {
    "2x1": [True, [2]],
    "1x2": [True, [2]],
    "2x4": [True, [8]],
    "none": [True, [1]],
  }
  assert found["share"] < 0.13  # an eighth, and the norms


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8,1", "2,4"])
def test_smollm2_shapes(mesh):
  """9 and 3 heads: what is not divided is replicated, and said."""
  done = _run(
    "decode.py",
    "--config=configs/smollm2.py:random",
    "--config.architecture.num_hidden_layers=2",
    f"--config.mesh={mesh}",
    "--config.batch_size=8",
    "--config.max_new_tokens=8",
    "--config.prompt=Why is it so?",
    "--config.predict=False",
  )
  assert done.returncode == 0, done.stderr
  assert re.search(r"exact +yes", done.stderr), done.stderr
  line = "4 devices do not divide 3 key and value heads"
  assert done.stderr.count(line) == (mesh == "2,4")
  assert f"mesh {mesh.replace(',', 'x')} of 8 devices" in done.stderr


RUN = ["--config=configs/tiny_train.py"] + [
  f"--config.{key}={value}"
  for key, value in {
    "steps": 6,
    "accumulate": 1,
    "length": 40,
    "log_every": 1,
    "data.samples": 1,
    "data.max_new": 16,
    "data.batch": 8,
    "data.limit": 20,
    "evaluation.every": 3,
    "checkpoint.every": 2,
    "checkpoint.keep": 4,
  }.items()
]


def _losses(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return [row["loss"] for row in rows if row["step"] > 0]


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_devices(tmp_path):
  """Saved on eight, resumed on two and on one: equal losses (B18, B35)."""
  cache = f"--config.data.cache={tmp_path / 'cache'}"

  def train(name, mesh, devices):
    folder = tmp_path / name
    args = f"--workdir={folder}", f"--config.mesh={mesh}", cache
    done = _run("train_draft.py", *RUN, *args, devices=devices)
    assert done.returncode == 0, done.stderr
    return _losses(folder), done.stderr

  whole, _ = train("whole", "1,1", 1)
  eight, _ = train("eight", "4,2", 8)
  np.testing.assert_allclose(eight, whole, rtol=1e-5)
  for devices in (2, 1):
    name = f"on{devices}"
    shutil.copytree(tmp_path / "eight", tmp_path / name)
    shutil.rmtree(tmp_path / name / "draft")
    for number in (4, 6):
      shutil.rmtree(tmp_path / name / "checkpoints" / str(number))
    losses, said = train(name, f"{devices},1", devices)
    assert "going on from step 2 of 6" in said
    np.testing.assert_allclose(losses, whole, rtol=1e-5)


# --- many processes ---------------------------------------------------------


def test_one_process_is_alone():
  assert multihost.first() and not multihost.several()
  assert multihost.same([1]) == [1] and multihost.most(3) == 3
  multihost.meet("nobody waits")


def test_joining_needs_to_be_told_how(monkeypatch):
  monkeypatch.setenv(multihost.ADDRESS, "127.0.0.1:1")
  with pytest.raises(UserError, match="set JAX_COORDINATOR_ADDRESS=HOST:PORT"):
    multihost.join()


def _two(seconds, *command):
  """[(code, stdout, stderr)] of two processes that are one run."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  env = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    multihost.ADDRESS: address,
    multihost.COUNT: "2",
  }
  each = [
    subprocess.Popen(
      [sys.executable, *command, "--multihost"],
      cwd=ROOT,
      env=env | {multihost.NUMBER: str(i)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    said = [p.communicate(timeout=seconds) for p in each]
  finally:
    for p in each:
      if p.poll() is None:
        os.kill(p.pid, signal.SIGKILL)
        p.wait()
  return [(p.returncode, *s) for p, s in zip(each, said, strict=True)]


@pytest.mark.slow
def test_two_processes_decode_together(tmp_path):
  command = ["decode.py", "--config=configs/tiny.py", "--config.predict=False"]
  command += ["--config.batch_size=2", "--config.max_new_tokens=8"]
  command += ["--config.architecture.num_hidden_layers=1"]
  one, two = tmp_path / "one.json", tmp_path / "two.json"
  assert _run(*command, f"--json={one}", devices=1).returncode == 0
  command += ["--config.mesh=2,1", f"--json={two}"]
  first, second = _two(500, *command)
  assert first[0] == second[0] == 0, first[2] + second[2]
  one, two = json.loads(one.read_text()), json.loads(two.read_text())
  ids = lambda report, name: [o["token_ids"] for o in report[name]["outputs"]]
  for name in ("autoregressive", "speculative"):
    assert ids(one, name) == ids(two, name)
  assert two["mesh"] == {"data": 2, "model": 1}
  assert two["device"]["count"] == two["device"]["processes"] == 2
  gloo = lambda text: [x for x in text.splitlines() if "[Gloo]" not in x]
  assert "speed-up" in first[2] and not second[2] and not gloo(second[1])
  assert len(gloo(first[1])) > 0


@pytest.mark.slow
def test_two_processes_train_together(tmp_path):
  """One step: its loss is that of one process, whose files are there once."""
  short = [x for x in RUN if "steps" not in x]
  command = ["train_draft.py", *short, "--config.steps=1"]
  command += [f"--config.data.cache={tmp_path / 'cache'}"]
  done = _run(*command, f"--workdir={tmp_path / 'one'}", devices=1)
  assert done.returncode == 0, done.stderr
  command += ["--config.mesh=2,1", f"--workdir={tmp_path / 'two'}"]
  first, second = _two(500, *command)
  assert first[0] == second[0] == 0, first[2] + second[2]
  one, two = _losses(tmp_path / "one"), _losses(tmp_path / "two")
  np.testing.assert_allclose(two, one, rtol=1e-5)
  assert len((tmp_path / "two" / "runs.jsonl").read_text().splitlines()) == 1
  assert (tmp_path / "two" / "draft" / "config.json").is_file()
  assert not second[2]


# --- caches in pieces, which one CPU has ------------------------------------


def test_caches_of_a_mesh_are_in_one_piece():
  """Of target and draft, with what a draft has fed to its own."""
  auto = (AxisType.Auto, AxisType.Auto)
  mesh, slots = jax.make_mesh((1, 1), sharding.AXES, axis_types=auto), 320
  model = load.model(load.random(meshes.ARCHITECTURE))
  of = lm.make(model.target, 288)
  prompt = np.random.default_rng(0).integers(0, 288, (2, slots)).astype("i4")
  length = np.array([300, 9], np.int32)
  init = lambda of: of.init(model.params, prompt, length, None, slots)
  alone, cut = init(of), init(sharding.drafter(of, mesh))
  empty = sharding.target(model.target, mesh).init_cache(2, slots)
  for one, own, target in zip(alone, cut, empty, strict=True):
    assert isinstance(one, cache.Pieces)
    assert isinstance(own, cache.KV) and isinstance(target, cache.KV)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, target)
    for a, b in zip(cache.joined(one), own, strict=True):
      np.testing.assert_array_equal(np.asarray(a).reshape(b.shape), b)


# --- other platforms --------------------------------------------------------


@pytest.mark.parametrize(
  "with_draft, slots", [(False, None), (True, None), (True, 320)]
)
def test_the_loop_lowers_for_every_platform(with_draft, slots):
  """For cpu, cuda and tpu, on a machine that has only the first."""
  model = load.model(load.random(meshes.ARCHITECTURE))
  draft = None
  if with_draft:
    part = load.part(model, layers=(0,))
    draft = types.Draft(lm.make(part.target, 288), part.params, 3)
  how = dict(max_new_tokens=meshes.N, draft=draft, slots=slots)
  state = generate.start(model.target, model.params, meshes.asked(0.8), **how)

  @jax.jit
  def run(params, draft_params, state):
    own = draft and draft._replace(params=draft_params)
    return generate.advance(model.target, params, state, steps=8, draft=own)

  platforms = ["cpu", "cuda", "tpu"]
  arguments = model.params, draft and draft.params, state
  found = jax.export.export(run, platforms=platforms)(*arguments)
  assert found.platforms == tuple(platforms)
  assert "stablehlo.while" in found.mlir_module()


def test_a_batch_is_cut_by_the_row():
  """On one device that is all of it: each process hands over its own rows."""
  mesh = jax.make_mesh((1, 1), sharding.AXES)
  x = np.arange(12).reshape(6, 2)
  got = placing.rows(mesh, {"tokens": x, "states": None})
  assert got["states"] is None
  assert got["tokens"].sharding.spec == P("data")
  np.testing.assert_array_equal(got["tokens"], x)
