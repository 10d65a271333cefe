"""Expert parallelism: ranks along `ep` have other experts of the same layers.

row_order             tokens sorted by their experts, and back
dispatch              rows to the ranks that have their experts, and back
share_experts         how a model's experts are cut
transformers_experts  experts of transformers, whose matrices are one tensor
"""
