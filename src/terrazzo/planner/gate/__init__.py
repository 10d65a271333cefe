"""Combinations that are known to be bad, with the reason and an alternative.

What cannot be is refused in `setup.checks`. Here is what could be, and fails or works badly in some framework.
Read the modules in this order:

    facts           what rules ask of a setup, and what sentences name of it
    rule            `Rule`, and the `PlanFinding` that it makes of a setup
    rules           combinations that are bad in every framework
    engine_rules    what Terrazzo does not run yet, or runs badly
    peer_rules      what other frameworks refuse or ignore
    gate            all rules asked of one setup: `findings`

A pipeline's bubble, from the setup to the sentence that names it:

    findings             every rule                                                       gate
      Rule.finding       is it about the setup's framework, and is the setup such a combination  rule
        Facts.bubble       idle time of a stage over its useful time, in per cent           facts, timing.bubble
        as_text            the rule's sentence with that put in                             rule
      PlanFinding            severity, reason, alternative and source                         rule

Refusals come first. `choice.search` drops what is refused, and a report shows everything.
"""
