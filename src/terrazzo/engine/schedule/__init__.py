"""Schedule of what moves: gathers, releases and reductions, in an order that all ranks share.

A training step of units A and B, forward in this order, under `zero3` with `prefetch=1`. On the left what hooks call as
torch comes to units, on the right what moves:

    call                         goes through                           what moves
    Schedule.begin_forward       ForwardPass                            nothing yet
    ForwardPass.enter(A)         GatheredWeights.gather, Unit.weights   A is gathered, B ahead; A is here as it returns
    ForwardPass.leave(A)         GatheredWeights.reshard                A goes to `between`
    enter(B), leave(B)           the same                               B is on its way already
    Schedule.end_forward         ForwardPass.end, Straying.serve        what only other ranks run
    Schedule.begin_backward      BackwardPass                           nothing yet
    BackwardPass.enter(B)        _go_on_to                              B is gathered, A ahead
    BackwardPass.gradient_came   halfway                                on CPU, a gather that waits for a sum under way
    BackwardPass.enter(A)        leave_backward, close, Reductions      B's weights go; the sum of its gradients begins
    BackwardPass.end             run_to_end, Straying.serve, close      A's weights go; the sum of its gradients begins
    Schedule.end_backward        Reductions.wait                        all sums have ended

No call but these decides what moves: what is in this rank's memory never does. A rank that skips A takes part in A's
gathers when it comes to B, or to the end.

    runnable    what is asked of a unit, be it a real one or one that counts bytes
    visits      which units a forward ran; one list for all ranks
    order       in which order units are gathered and reduced, from such a list
    program     the order that ranks follow now, and what this rank has seen that is not in it
    gathered    weights that the program has gathered, and when each goes
    reductions  sums of gradients that are under way
    forward     one forward of the model along the program
    backward    one backward along it
    straying    units that come elsewhere than in the program
    schedule    begins and ends passes; what lasts from one to the next

Read them in that order. `pipeline/pipeline_schedule` is the same with several micro-batches under way.
"""
