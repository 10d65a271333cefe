"""Combinations that are known to be bad, with the reason and an alternative.

What cannot be is refused in `setup.checks`. Here is what could be, and fails or works badly in some framework.
Read the modules in this order:

    facts            what rules ask of a setup, and what sentences name of it
    rule             `Rule`, the `RuleBook` that collects them, and the `PlanFinding` that one makes of a setup
    general_rules    combinations that are bad in every framework
    engine_rules     what Terrazzo's engine does not run yet, or runs badly
    train_rules      what `terrazzo train` has no configuration for
    deepspeed_rules  what DeepSpeed refuses or ignores
    peer_rules       what FSDP, Megatron-core and torchao do
    gate             all rules asked of one setup: `findings`

A pipeline's bubble, from the setup to the sentence that names it:

    findings             every rule                                                       gate
      Rule.finding       is it about the setup's framework, and is the setup such a combination  rule
        Facts.bubble       idle time of a stage over its useful time, in per cent           facts, timing.timeline
        as_text            the rule's sentence with that put in                             rule
      PlanFinding            severity, reason, alternative and source                         rule

Refusals come first. `choice.search` drops what is refused, and a report shows everything.
"""
