"""What is measured, and with what. `results` holds the committed records and reports.

    cpu           step time and memory beside peers on CPU ranks: `terrazzo bench --help`
    timeline      virtual step times on one simulated device: `terrazzo bench --suite timeline`
    gpu           step time, MFU and peak on one GPU: `make gpu`
    checkpoints   saving and loading: `python -m benchmarks.checkpoints`
    offload       the update on the CPU, swap files, whole steps: `python -m benchmarks.offload`
    allocator     what the caching allocator makes of a step: `python -m benchmarks.allocator`
    states        losses with optimizer states of fewer bytes: `python -m benchmarks.states`
    gathers       weights and gradients sent in fewer bits over a slow link: `python -m benchmarks.gathers`
    rounds        replicas that agree every so many steps over a slow link: `python -m benchmarks.rounds`
    planner       the planner against published measurements: `python -m benchmarks.planner`

`host`, `update` and `network` (with `namespaces` and `wire`) measure one thing each, for the suite cpu too.
`environment` says what a record is made with, and `readme` draws the README's chart.
"""
