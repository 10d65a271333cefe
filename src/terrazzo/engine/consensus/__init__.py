"""Consensus of ranks: what they must have alike, where they compare it, and what they agree on.

Each rank keeps its own part of all states, so one that has done something else would not be noticed. They compare:

    when                                        what                                         where
    tz.shard, tz.attach, before they change     model, arguments, versions; one rank's       joint_checks, of facts
    anything                                    refusal is everyone's                        in sharding/compared_facts
    a training forward ends, until the order    the units that ran; the merged list is the   agreement
    is settled                                  program from then on
    a forward or a backward ends                which exchange this is, and what `_ALIKE`    pass_end, of what
                                                of pass_end lists: steps, edits of           `Progress` has noted
                                                gradients, hyper-parameters, denominators
    a step's last backward ends                 the same, and which gradients there are      agreement, in pass_end
    a module exchanges rows, as of experts      whether all have come to it                  row_exchanges
    `tz.gathered(model, write=True)` ends       what has been written into weights           written_weights
    a state dict or an average is loaded        the tensors of each rank                     `states`, by their digest
    a round of replicas begins                  the weights that it begins with              replicas/rounds, likewise

Plans that keep weights whole have no meeting at the end of a forward, nor of a backward that sums nothing over ranks.
What differs is named on every rank.

    number_rows       lists of numbers, as many as each rank has
    first_difference  where facts that ranks have compared first differ
    joint_checks      checks that all ranks pass, or all raise
    digest            a hash that ranks compare in the place of a tensor
    equal_values      tensors that differ take the first rank's values
    written_weights   what users have written into weights: compared, or taken from the first rank
    pass_end          where ranks meet at the end of a pass; it raises if they have not run the same
    agreement         what they agree on there: the program of the next steps, and which gradients there are
    row_exchanges     where they meet besides: before modules that exchange rows, such as experts

Read them in that order. The first three are of what ranks are told, `digest` to `written_weights` of values that they
hold, and the others of passes that they run. Numbers are exchanged by `Axes.differing`, `.anywhere`, `.maximum` and
`.rows` of `mesh`.
"""
