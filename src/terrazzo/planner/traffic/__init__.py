"""What one rank sends in a step, by collective and by link.

Bytes of data parallelism are those of the engine's own `BucketSpec`, so that they equal what the engine counts as it
runs. Read the modules in this order:

    copies       what a bucket moves between the device, host memory and disks
    exchanges    activations along tp, cp, ep and pp
    outer_moves  an outer step of replicas that train by themselves
    volumes      all of that for one setup: `traffic_of`

The gathered weights that a rank sends go through these functions:

    traffic_of                    the rank along pp that sends most                              volumes
      placed_units                its units, and which ranks split them                          layout.placement
      unit_moves                  the collectives of one unit                                    volumes
        bucket.collectives        `all_gather weights`: elements x bytes x (n - 1) / n           layout.buckets
        Network.link              the link that these ranks cross                                machine.network
      repetitions                 once in each forward; in each backward if weights do not stay  volumes
      Sent                        bytes in a step, by link                                       figures

`timing` takes the same moves, one by one, for their seconds.
"""
