"""Sharding of a model: `tz.shard`, and what comes before it.

`tz.shard(model, optimizer, plan)`, from its first call to its last. Up to the line nothing is allocated or changed, and
`engine.estimate` stops there:

    prepare                             what is asked for is read, on all ranks or on none      prepare
      check_group, check_mesh           whether ranks can exchange                              mesh_checks
      _check_model, _read_arguments     the model's kind, units, plan, optimizers               model_checks,
                                                                                                settings_checks,
                                                                                                shared_parts_checks
      ComparedFacts.check_alike         ranks have the same model, and were told the same       compared_facts
      _lay_out                          a BucketLayout for each group; what they cannot do      packed_checks,
                                                                                                optimizer_checks
    ------------------------------------------------------------------------------------------------------------
    _open_store                         host memory and files                                   shard
    _build_units, one after the other   InitialValues.draw, synchronize, Bucket                 shard, initial_values
    _make_engine                        schedule, hooks, `Engine`                               shard
    put_on, for each optimizer          an OptimizerDriver; `tz.attach` comes in here           attach
    _intercept                          what users call from now on; see `interception`      shard

One weight on that way: a `Member` of a `UnitSpec` that owns it, a `Slot` of a `BucketLayout`, elements of the
`Resting` that holds this rank's part, and a view of `FullWeights`.

    shard                `tz.shard`, and `tz.estimate`, which stops before anything is changed
    prepare              all that precedes a change
    model_checks         what a model may be made of: modules, parameters, dtypes
    mesh_checks          whether ranks can exchange, on devices and axes that are known
    settings_checks      what must hold of precision and offload
    shared_parts_checks  parts of parameters and sequences that ranks share: whether they fit the mesh
    optimizer_checks     optimizers that come to a model: whether they go with it, the plan, and each other
    matrix_checks        whether matrices that an optimizer updates whole can be
    replica_checks       whether replicas can train by themselves
    packed_checks        whether frozen matrices can be kept in 4 bits
    compared_facts       what must be the same on all ranks: versions, the model, what they were told
    initializers         what gives a module on the meta device its first values: its own methods, or its model's
    unset_values         memory without a value, told from what has one
    initial_values       what a model on the meta device begins with; any model's buffers, moved and made equal on ranks
    attach               puts optimizers on a sharded model

Read them in that order.
"""
