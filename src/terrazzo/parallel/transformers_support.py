"""Which types of models of `transformers` ranks can share along which axis, and what else depends on a type, by
`model_type`.

This table is the only place that says so: all checks and the planner read it.
"""

from __future__ import annotations

__all__ = ["CHANGED_LOGITS", "CUT_MATRICES", "DOCUMENTS_APART", "KNOWN_TYPES", "NO_STAGES", "SHARED_SEQUENCES"]

# Each column is computed by a test of every type, last with transformers 5.23.0 and torch 2.13.0.
#   cp         tokens meet in attention alone, by the registry of attention functions, with positions
#   tp         the plan of tensor parallelism that transformers has is carried out here, where it leaves a mixture's
#              experts whole, and rows say their splits
#   pp         transformers says through which modules values go
#   documents  attention is cut where position ids begin anew; OPT and BLOOM, say, take these and look further back
#   head       logits are what one matrix makes of the last hidden states, and no more, so that a loss needs none
_TABLE = """
                cp    tp    pp    documents  head
    bloom       -     -     -     -          yes
    cohere      yes   -     yes   yes        -
    deepseek_v2 -     -     yes   -          yes
    deepseek_v3 -     -     yes   -          yes
    falcon      -     -     -     -          yes
    gemma       yes   yes   yes   yes        yes
    gemma2      -     yes   yes   yes        -
    gemma3_text yes   yes   yes   yes        yes
    glm4        -     yes   yes   -          yes
    gpt2        yes   -     -     yes        yes
    gpt_bigcode -     -     -     -          yes
    gpt_neox    yes   yes   yes   yes        yes
    gpt_oss     -     -     yes   -          yes
    gptj        -     -     -     yes        -
    granite     yes   yes   yes   yes        -
    llama       yes   yes   yes   yes        yes
    mistral     yes   yes   yes   yes        yes
    mixtral     yes   yes   yes   yes        yes
    mpt         -     -     -     -          yes
    olmo        yes   yes   yes   yes        yes
    olmo2       yes   -     yes   yes        yes
    olmo3       -     -     yes   -          yes
    olmoe       -     -     -     -          yes
    opt         -     -     -     -          yes
    phi         yes   yes   yes   yes        -
    phi3        yes   yes   yes   yes        yes
    qwen2       yes   yes   yes   yes        yes
    qwen2_moe   yes   yes   yes   yes        yes
    qwen3       yes   yes   yes   yes        yes
    qwen3_moe   yes   yes   yes   yes        yes
    smollm3     yes   yes   yes   yes        yes
    stablelm    yes   -     -     yes        yes
    starcoder2  yes   yes   yes   yes        yes
    xglm        -     -     -     -          yes
"""


_HEAD, *_ROWS = (line.split() for line in _TABLE.strip().splitlines())


def _types(column: str, cell: str = "yes") -> frozenset[str]:
    return frozenset(row[0] for row in _ROWS if row[1 + _HEAD.index(column)] == cell)


KNOWN_TYPES = frozenset(row[0] for row in _ROWS)
SHARED_SEQUENCES = _types("cp")
CUT_MATRICES = _types("tp")
NO_STAGES = _types("pp", "-")
"""Types that cannot be cut into stages. Of others that are not in the table, a run looks at the model itself."""
DOCUMENTS_APART = _types("documents")
CHANGED_LOGITS = _types("head", "-")
"""Types whose logits are scaled, capped or have a bias. Of all others, too, a run looks at the model itself."""
