"""specjax: speculative decoding of language models in JAX.

Letters, used with these meanings everywhere:

  p  the target's law        q  the draft's law (as it was sampled from)
  B  batch                   T  query positions       S  cache slots
  K  drafted tokens a round  V  vocabulary            D  model width
  H  query heads             G  key/value heads       L  layers
  N  tokens emitted          F  target layers read as features

alpha = sum min(p, q) = 1 - TV(p, q) is the probability that a drafted token is
accepted; C = time of a target step / time of a draft step.

Positions count from 0; a `length` is the number of valid tokens in a row. A
`key` is consumed by the function it is given to.
"""

__version__ = "0.1.0"
