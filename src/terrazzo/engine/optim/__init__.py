"""The optimizer's side: stock `torch.optim` optimizers over flat runs of master weights.

A `Segment` is one such run: this rank's part of consecutive parameters of one bucket and one param group, 1-D. A step
goes through these modules, from top to bottom:

    optimizer.step()
      torch's hook before it: OptimizerDriver._before_step               driver
        engine.before_step()           edits of users are taken over     model/engine
        engine.begin_round()           first step of a round (DiLoCo)    model/engine
        SwappedGroups.hold_segments    segments replace parameters       swapped_groups
        LossScale.skips                fp16 only: overflow ends here     progress/loss_scale
        SwappedGroups.recut            split at parameters without       swapped_groups, segment
                                       a gradient
        OffDeviceUpdates.before_step   waits for updates that last       offload/background_updates
        MatrixSteps.step               whole matrices (Muon):            matrix_steps, matrix_owners
          exchange_parts               - to owners, and back             matrix_exchange
          OffDeviceUpdates.carry_out   - elements away from the device   matrix_host_steps, offload/updater
        OffDeviceUpdates.begin         segments away from the device     offload/background_updates
          on a thread: step_segment    - with states where they rest     offload/updater, segment_step
        DeviceUpdates.begin            segments on the device:           device_updates
          step_segment                 - moments in another dtype,       segment_step
                                         or in 8 bits
          Segment.take_gradient        - all others: `.grad` is set      segment
      the optimizer's own code: updates what has a `.grad`               torch
      torch's hook after it:  OptimizerDriver._after_step                driver
        SwappedGroups.hold_parameters  parameters are back               swapped_groups
        engine.publish()               weights follow the masters        model/engine
        OffDeviceUpdates.after_step    waits, if step='synchronous'      offload/background_updates
        engine.after_step()            an outer step, where one is due   replicas/rounds

So an element is updated by the optimizer's own code in either of two callers: its `step()`, over all segments that are
in its groups; or a `Stepper`, which runs the same code on one segment and on any thread. The latter steps what
`DeviceUpdates.excludes` from the former. Matrices alone have code of their own: `terrazzo.optim.MatrixOptimizer`.

    stock           the optimizer that a user has built, of torch or of their own
    segments        flat runs of master weights, which it steps in the place of parameters
    matrices        matrices that it needs whole, each on one rank
    device_updates  gives segments their gradients, and steps those that the optimizer's own step cannot
    clipping        the global norm of gradients
    zeroing         what ranks note where gradients are forgotten or zeroed
    driver          drives one optimizer: what torch's hooks around its step do

Read them in that order.
"""
