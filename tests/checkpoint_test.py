"""A checkpoint is there whole or not at all, and what is read is what was kept.

A failing disk is a limit on the size of files, which the kernel enforces.
"""

import asyncio
import functools
import gc
import logging
import resource
import shutil
import subprocess
import sys
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoint
from specjax.errors import UserError

_MEGA = 1 << 20


def _tree(seed=0, width=64):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
    "params": {"layer_0": {"kernel": draw(8, width)}, "embed": draw(30, 8)},
    "moments": ((), {"count": jnp.int32(2**24 + 1)}),
    "half": draw(5).astype(jnp.bfloat16),
  }


def _same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def _keep(folder, trees, keep=2):
  with checkpoint.opened(folder, keep) as manager:
    for number, tree in trees.items():
      checkpoint.save(manager, number, tree, {"score": number / 3})


def test_what_is_read_is_what_was_saved(tmp_path):
  """Names, shapes, dtypes, values; whole numbers above 2^24 (B17)."""
  trees = {n: _tree(n) for n in (0, 3, 7)}
  _keep(tmp_path, trees)
  assert checkpoint.numbers(tmp_path) == [3, 7]
  with checkpoint.opened(tmp_path, 2) as manager:
    assert checkpoint.latest(manager) == 7
    assert checkpoint.meta(manager, 7)["score"] == 7 / 3
    for number in (7, 3):
      like = jax.eval_shape(lambda x: x, trees[number])
      _same(checkpoint.restore(manager, number, like), trees[number])


def test_nothing_there(tmp_path):
  assert checkpoint.numbers(tmp_path / "none") == []
  with checkpoint.opened(tmp_path, 2) as manager:
    assert checkpoint.latest(manager) is None


def test_donated_right_behind_save(tmp_path):
  """What a step overwrites while it is being written is kept as it was (B36).

  And a restored array can be donated like any other (B32).
  """
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jnp.arange(8 * _MEGA, dtype=jnp.float32)
  with checkpoint.opened(tmp_path, 1) as manager:
    for number in range(3):
      checkpoint.save(manager, number, {"x": x}, {})
      for _ in range(20):
        x = add(x)
      want = np.arange(8 * _MEGA, dtype=np.float32) + 20 * number
      checkpoint.wait(manager)
      got = checkpoint.restore(manager, number, {"x": x})["x"]
      np.testing.assert_array_equal(np.asarray(got), want)
    before = got.unsafe_buffer_pointer()
    got = add(got)
    assert got.unsafe_buffer_pointer() == before


@pytest.fixture
def small_files():
  """Give a function that makes every write beyond 64 kB fail."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
  yield lambda: limit((64 << 10, hard))
  limit((soft, hard))


@pytest.mark.parametrize("shows", ["save", "wait", "close"])
def test_a_save_that_fails(tmp_path, small_files, shows):
  """It is told at the next call, in a line; what was there stays (B36)."""
  tree = {"x": jax.random.normal(jax.random.key(0), (_MEGA,))}
  _keep(tmp_path, {1: tree}, keep=1)
  with pytest.raises(UserError) as error, checkpoint.opened(tmp_path, 1) as m:
    small_files()
    checkpoint.save(m, 2, tree, {})
    if shows == "save":
      checkpoint.save(m, 3, tree, {})
    if shows == "wait":
      checkpoint.wait(m)
    assert shows == "close"
  told = str(error.value)
  assert "cannot write a checkpoint" in told and "File too large" in told
  assert "free space" in told and "\n" not in told and len(told) < 600
  assert checkpoint.numbers(tmp_path) == [1]
  resource.setrlimit(
    resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2
  )
  with checkpoint.opened(tmp_path, 1) as manager:
    assert checkpoint.latest(manager) == 1
    _same(checkpoint.restore(manager, 1, tree), tree)
    until = time.monotonic() + 20  # where threads of others are slow
    names = lambda: [path.name for path in tmp_path.iterdir()]
    while names() != ["1"] and time.monotonic() < until:
      time.sleep(0.1)
    assert names() == ["1"]  # no half-written one
    checkpoint.save(manager, 2, tree, {})
  assert checkpoint.numbers(tmp_path) == [2]


_KILLED = """
import os, signal, sys, threading, time
import jax.numpy as jnp, numpy as np
from specjax import checkpoint

tree = {"x": jnp.asarray(np.random.default_rng(0).normal(size=24 << 20))}
with checkpoint.opened(sys.argv[1], 1) as manager:
  checkpoint.save(manager, 1, {"x": jnp.arange(9.0)}, {})
  checkpoint.wait(manager)
  checkpoint.save(manager, 2, tree, {})
  while not any("tmp" in name for name in os.listdir(sys.argv[1])):
    time.sleep(0.001)
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_while_saving(tmp_path):
  """A half-written checkpoint is none, and goes away (B36)."""
  program = [sys.executable, "-c", textwrap.dedent(_KILLED), str(tmp_path)]
  assert subprocess.run(program, check=False).returncode == -9
  assert len(list(tmp_path.iterdir())) == 2
  assert checkpoint.numbers(tmp_path) == [1]
  with checkpoint.opened(tmp_path, 1) as manager:
    assert checkpoint.latest(manager) == 1
    tree = {"x": jnp.arange(9.0)}
    _same(checkpoint.restore(manager, 1, tree), tree)
  assert len(list(tmp_path.iterdir())) == 1


def _wide(tree):
  return tree | {"params": _tree(width=65)["params"]}


def _deep(tree):
  more = {"layer_1": {"kernel": jnp.zeros((8, 64))}}
  return tree | {"params": tree["params"] | more}


def _shallow(tree):
  return tree | {"params": {"embed": tree["params"]["embed"]}}


def _float(tree):
  return tree | {"moments": ((), {"count": jnp.float32(0)})}


@pytest.mark.parametrize(
  "change, told",
  [
    (_wide, r"\[8, 64\] float32 as 'params/layer_0/kernel'.*\[8, 65\] float32"),
    (_deep, "nothing as 'params/layer_1/kernel'"),
    (_shallow, "as 'params/layer_0/kernel', this run has nothing"),
    (_float, r"\[\] int32 as 'moments/1/count', this run has \[\] float32"),
  ],
)
def test_another_tree_is_refused_by_name(tmp_path, change, told):
  """More or fewer layers, another width or dtype (B17)."""
  _keep(tmp_path, {1: _tree()})
  with (
    checkpoint.opened(tmp_path, 2) as manager,
    pytest.raises(UserError, match=told),
  ):
    checkpoint.restore(manager, 1, change(_tree()))


def _cut(folder):
  for path in folder.rglob("d/*"):
    path.write_bytes(path.read_bytes()[:-20])


def _flip(folder):
  """One bit of the largest array."""
  path = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def _no_data(folder):
  for path in folder.rglob("d"):
    shutil.rmtree(path)


def _no_tree(folder):
  shutil.rmtree(folder / "tree")


def _no_meta(folder):
  shutil.rmtree(folder / "meta")


def _bad_meta(folder):
  (folder / "meta" / "metadata").write_text("{")


@pytest.mark.parametrize(
  "damage", [_cut, _flip, _no_data, _no_tree, _no_meta, _bad_meta]
)
@pytest.mark.parametrize(
  "numbers, then", [((1, 2), "from 1"), ((2,), "new --workdir")]
)
def test_a_damaged_one_is_named(tmp_path, damage, numbers, then):
  """Never taken for whole, nor silently passed over for an older one (B17)."""
  _keep(tmp_path, {n: _tree(n) for n in numbers})
  damage(tmp_path / "2")
  with checkpoint.opened(tmp_path, 2) as manager:
    with pytest.raises(UserError) as error:
      checkpoint.meta(manager, checkpoint.latest(manager))
      checkpoint.restore(manager, 2, _tree())
    told = str(error.value)
    assert f"{tmp_path / '2'} is damaged" in told and told.endswith(then)
    assert "\n" not in told
  shutil.rmtree(tmp_path / "2")
  with checkpoint.opened(tmp_path, 2) as manager:
    assert checkpoint.latest(manager) == (1 if 1 in numbers else None)
    if 1 in numbers:
      _same(checkpoint.restore(manager, 1, _tree()), _tree(1))


def test_a_closed_loop_is_not_shown(tmp_path, monkeypatch):
  """It is what a failed save or read leaves behind, at any time (B36)."""
  shown = []
  monkeypatch.setattr(sys, "unraisablehook", shown.append)
  late = lambda text: types.SimpleNamespace(exc_value=RuntimeError(text))
  with pytest.raises(OSError), checkpoint.opened(tmp_path, 2):
    sys.unraisablehook(late("Event loop is closed"))
    raise OSError("No space left on device")
  sys.unraisablehook(late("Event loop is closed"))
  assert not shown
  sys.unraisablehook(late("something else"))
  assert len(shown) == 1


def test_a_lost_write_is_not_shown(tmp_path, caplog):
  """asyncio logs each failed write but the one that is told of (B36)."""
  logging.getLogger("asyncio").setLevel(logging.NOTSET)
  with checkpoint.opened(tmp_path, 2):
    loop = asyncio.new_event_loop()
    loop.create_future().set_exception(OSError("No space left on device"))
    gc.collect()
    loop.close()
  assert not caplog.records


def test_another_format(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "FORMAT", 99)
  _keep(tmp_path, {1: _tree()})
  monkeypatch.undo()
  with (
    checkpoint.opened(tmp_path, 2) as manager,
    pytest.raises(UserError, match="of format 99, this program reads 1"),
  ):
    checkpoint.meta(manager, 1)


def test_a_folder_that_cannot_be(tmp_path):
  (tmp_path / "file").write_text("")
  with (
    pytest.raises(UserError, match="cannot write a checkpoint into"),
    checkpoint.opened(tmp_path / "file" / "run", 1),
  ):
    pass
