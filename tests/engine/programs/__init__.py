"""Random training programs, each compared with one plain PyTorch process.

`grammar` says what a program is and draws one from a seed, `features` names what may be in it, `model` builds its
module, `oracle` runs it in one process, `run` on ranks, `compare` gives a verdict, `shrink` makes a failure readable.

    python -m tests.engine.programs --seeds 0:1000
"""
