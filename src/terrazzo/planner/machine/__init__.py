"""What is known of machines: devices, their links, and how ranks lie on them.

Figures are those of `gpus.csv`, with their sources; None stands for what is not known. Read the modules in this order:

    devices    `Device` and `Cluster`: the table, its names, and the machine that this runs on
    architectures, checks_of_figures   what some have in common, and what figures may be
    mesh       `Mesh`: how many ranks each axis has; `RankGroup`: which exchange along one, and how they lie on hosts
    transfers  `UnitTransfer`: what is sent, for what, `When` in a step, over which ranks or `Link`
    network    `Network`: which link a group crosses, and the seconds of a collective on it

The bandwidth of an all-gather along `dp_shard`, on 8 H100:

    device("h100-sxm")             450 GB/s between devices of a host     devices, gpus.csv
    group_of(mesh, "dp_shard")     8 ranks, each next to the other        mesh
    RankGroup.on_hosts             8 on one host or domain               mesh
    Network.link                   all are in one domain: `scaleup`       network
    Network.bandwidth              0.80 of the link: 360 GB/s             network
    Network.move_s                 bytes over that, and waits per call    network
"""
