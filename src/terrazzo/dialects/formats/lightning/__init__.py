"""Lightning's Trainer and its strategies (lightning 2.6), as LightningCLI's YAML or the Trainer's own arguments.

In reading order:

    precision           the precision that Lightning trains in, by its word and the strategy
    keys                arguments of the Trainer and the strategies, and the strategies by name
    trainer_arguments   what a document says to the Trainer, checked once
    read                arguments to the neutral description; calls the two that read below
    deepspeed_document  the document that DeepSpeedStrategy hands to DeepSpeed
    read_strategy       each strategy, by what is under it: FSDP's arguments, or a DeepSpeed document
    read_loop           the training loop
    model_checkpoint    callbacks, of which ModelCheckpoint says when is saved, read and written
    cli_findings        what LightningCLI stops at in FSDPStrategy's arguments
    findings            what Lightning refuses, or takes otherwise than it looks
    write               the neutral description to YAML of LightningCLI; calls those that write below
    write_loop          the training loop, optimizer and schedule
    write_precision     the word that misses the fewest dtypes, alone or with a `mixed_precision`
    write_strategy      DDP, or FSDPStrategy with the arguments of FSDP1
    write_deepspeed     DeepSpeedStrategy with a whole configuration
    dialect             the record of these functions, which the registry has by its name
"""
