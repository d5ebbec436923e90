"""Another system in a process of its own: JSON lines in, JSON lines out.

benchmarks/peers.py starts it by an interpreter that has the system, so that two
libraries never share a pool of threads. It imports nothing of specjax.

  {"do": "load", "library": "transformers", ...} -> {"about": {...}}
  {"do": "decode", "prompt": [ids], "max_new": n, "stop": [ids], "how", "k"}
    -> {"ids", "prefill", "seconds", "timed", "calls"}
  {"do": "logits", "ids": [...]} -> {"logits": [V] behind the last of them}

"prefill" ends with the first new token, "seconds" are those of the `timed`
tokens behind it. What goes wrong is {"error": text}, a package that is not
there {"missing": name}.
"""

import importlib.metadata
import json
import os
import sys
import time


class Stamps:
  """What transformers calls a streamer: when which tokens came."""

  def __init__(self):
    self.at = []  # (time, how many tokens), the prompt first

  def put(self, tokens):
    self.at.append((time.perf_counter(), tokens.numel()))

  def end(self):
    pass


def transformers(folder, dtype, device, threads, assistant, **_):
  """Load a folder; return its commands and what there is to say of it."""
  import torch
  import transformers

  torch.set_num_threads(threads)
  torch.set_float32_matmul_precision("highest")
  transformers.logging.set_verbosity_error()

  def read(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
      path, dtype=getattr(torch, dtype)
    )
    # nothing of a folder's own: each call says all of it
    model.generation_config = transformers.GenerationConfig()
    return model.to(device).eval()

  model, helper = read(folder), read(assistant) if assistant else None

  def decode(prompt, max_new, stop, how, k):
    stamps, more = Stamps(), _options(helper, how, k)
    ids = torch.tensor([prompt], device=device)
    began = time.perf_counter()
    out = model.generate(  # without gradients, by itself
      ids,
      attention_mask=torch.ones_like(ids),
      do_sample=False,
      max_new_tokens=max_new,
      eos_token_id=stop or None,
      pad_token_id=stop[0] if stop else 0,
      streamer=stamps,
      **more,
    )
    out = out[0, len(prompt) :].tolist()
    return timed(out, began, stamps.at[1:], time.perf_counter())

  def logits(ids):
    with torch.no_grad():
      out = model(torch.tensor([ids], device=device), use_cache=False)
    return out.logits[0, -1].float().tolist()

  about = {k: importlib.metadata.version(k) for k in ("torch", "transformers")}
  about |= {"threads": torch.get_num_threads(), "device": device}
  return decode, logits, about


def _options(helper, how, k):
  """Arguments of `generate`; helper: the assistant model."""
  from transformers import CompileConfig

  static = dict(cache_implementation="static")
  if how == "static":
    return static | dict(disable_compile=True)
  if how == "compile":
    compiled = CompileConfig()
    compiled._compile_all_devices = True  # on a CPU it is off
    return static | dict(compile_config=compiled)
  if how == "lookup":
    return dict(prompt_lookup_num_tokens=k)
  if how == "assistant":
    own = helper.generation_config
    own.num_assistant_tokens_schedule = "constant"
    # without a k its own defaults, which stop where the draft is unsure
    own.num_assistant_tokens = k or 20
    own.assistant_confidence_threshold = 0.0 if k else 0.4
    return dict(assistant_model=helper)
  return {}


def llama(folder, cache, device, threads, slots, lookup, **_):
  """The same of a GGUF file."""
  import llama_cpp
  from llama_cpp import llama_speculative

  if device != "cpu" and not llama_cpp.llama_supports_gpu_offload():
    raise RuntimeError("llama-cpp-python was built without support of the GPU")
  draft = None
  if lookup:
    draft = llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=lookup)
  kind = {"F32": llama_cpp.GGML_TYPE_F32, "F16": llama_cpp.GGML_TYPE_F16}[cache]
  model = llama_cpp.Llama(
    folder,
    n_ctx=slots,
    n_threads=threads,
    n_threads_batch=threads,
    n_gpu_layers=0 if device == "cpu" else -1,
    draft_model=draft,
    logits_all=bool(lookup),
    type_k=kind,
    type_v=kind,
    verbose=False,
  )

  def logits(ids):
    model.reset()
    model.eval(ids)
    row = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return row[: model.n_vocab()]

  about = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
  about |= {"system": llama_cpp.llama_print_system_info().decode().strip()}
  about |= {"threads": threads, "device": device}
  return _llama_decode(model), logits, about


def _llama_decode(model):
  calls, feed = [0], model.eval

  def counted(tokens):
    calls[0] += 1
    feed(tokens)

  model.eval = counted

  def decode(prompt, max_new, stop, how, k):
    del how, k  # decided when it was loaded
    model.reset()  # else it begins where the last prompt was the same
    calls[0], ids, at = 0, [], []
    began = time.perf_counter()
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
      at.append((time.perf_counter(), 1))
      ids.append(int(token))
      if len(ids) == max_new or token in stop:
        break
    found = timed(ids, began, at, time.perf_counter())
    return found | {"calls": calls[0]}

  return decode


def timed(ids, began, at, end):
  """The answer to "decode"; at: when which tokens came."""
  return {
    "ids": ids,
    "prefill": at[0][0] - began,
    "seconds": end - at[0][0],
    "timed": len(ids) - at[0][1],
    "calls": len(at),
  }


def answer(system, ask):
  """(what is loaded now, the answer) of a line."""
  do = ask.pop("do")
  if do == "load":
    make = {"transformers": transformers, "llama.cpp": llama}
    *system, about = make[ask.pop("library")](**ask)
    return system, {"about": about}
  decode, logits = system
  if do == "decode":
    return system, decode(**ask)
  return system, {"logits": logits(**ask)}


def main():
  # what libraries print must not come between the answers
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  system = None
  for line in sys.stdin:
    try:
      system, found = answer(system, json.loads(line))
    except ModuleNotFoundError as e:
      found = {"missing": e.name}
    except Exception as e:  # whatever the system has to say
      found = {"error": " ".join(f"{type(e).__name__}: {e}".split())[:500]}
    print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
  main()
